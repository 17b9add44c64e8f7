"""Protects a server on TCP: refuses calls without the job's token, and limits concurrently arriving messages.

- Token. A call without the token ends before its message is received, so a stranger costs no memory.
- Messages. gRPC calls a unary handler only when the whole message has arrived, and until then a slow sender
  occupies a thread of the pool. A stream handler is called before its first message. So unary handlers are
  registered as stream handlers, which first count the call and then read one message. A client that sends one
  message notices no difference.
- Connections. gRPC limits them itself (psfleet.core.net.connections.channel.server_options): it ends a
  handshake that takes too long, and closes connections beyond a maximum. gRPC gives no access to accepted
  sockets. Do not take them from /proc: a duplicate of a socket stays open after gRPC closes its own, and
  wakes an epoll that no longer knows the socket.
"""

from collections.abc import Callable, Iterator
from typing import Any

import grpc

from psfleet.core.base.errors import AccessDenied, FrameError, LimitExceeded
from psfleet.core.base.logs import RateLimitedLog, log_of
from psfleet.core.net.connections import error_statuses
from psfleet.core.net.connections.access import TOKEN_KEY, Access, is_tcp
from psfleet.core.net.connections.credentials import Credentials
from psfleet.core.net.connections.token_check import refusal
from psfleet.core.net.http2.calls import InboundMessages

_log = log_of(__name__)

READS = frozenset(
    f"/psfleet.v1.{method}"
    for method in (
        "Followers/ReadChanges",
        "Followers/ReadRows",
        "Metrics/Collect",
        "Shard/Evictions",
        "Shard/ReadState",
        "Shard/Status",
    )
)
"""Methods that change nothing, whatever the request.

Pull is not among them, because a pull may commit a push.
"""

REFUSED = "the call was refused: {}; use the credentials of this job (PSFLEET_TLS)"
"""Error of a call that `Credentials.refusal` has refused, at either address."""

Handler = Any  # grpc.RpcMethodHandler, generic in its stubs only


Behavior = Callable[..., Any]


def gates(access: Access, endpoint: str) -> "list[grpc.ServerInterceptor[Any, Any]]":
    """Return the interceptors of a server at this endpoint: over TCP, one that checks the job's token."""
    if access.credentials is None or not is_tcp(endpoint):
        return []
    return [_TokenInterceptor(access.credentials)]


class _TokenInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Refuses calls without the job's token. The check costs about 5 microseconds per call."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        # A handler for a stream of requests is called before any of the requests is read.
        self._refusal = grpc.stream_stream_rpc_method_handler(self._refuse)
        self._log = RateLimitedLog(_log)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Handler | None"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        metadata = handler_call_details.invocation_metadata or ()
        tokens = [value for key, value in metadata if key == TOKEN_KEY]
        if refusal(self._credentials, tokens, only_reads=handler_call_details.method in READS):
            return self._refusal
        return continuation(handler_call_details)

    def _refuse(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        tokens = [value for key, value in context.invocation_metadata() if key == TOKEN_KEY]
        why = refusal(self._credentials, tokens, only_reads=False)
        self._log.say(f"refused a call from {context.peer()}: {why}")
        error_statuses.failure(context, AccessDenied(REFUSED.format(why)))
        yield from ()


class InboundLimit(grpc.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Limits how many messages are received at the same time, for all handlers behind this interceptor.

    Args:
        messages: Counter of the messages that are arriving at all endpoints of this server.
    """

    def __init__(self, messages: InboundMessages) -> None:
        self._messages = messages
        # Wrapped handlers by the id of the original one. The original is kept too, because its id could be
        # reused.
        self._handlers: dict[int, tuple[Handler, Handler]] = {}

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Handler | None"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        entry = self._handlers.get(id(handler))
        if entry is None:
            entry = self._handlers[id(handler)] = (handler, self._around(handler))
        return entry[1]

    def _around(self, handler: Handler) -> Handler:
        """Wrap a unary handler as a stream handler, which is called before its message has arrived."""
        if handler.unary_unary is not None:
            return grpc.stream_unary_rpc_method_handler(self._answering(handler.unary_unary))
        behavior = self._held(handler.unary_stream)
        behavior.experimental_non_blocking = True  # type: ignore[attr-defined]  # see parking
        return grpc.stream_stream_rpc_method_handler(behavior)

    def _answering(self, behavior: Behavior) -> Behavior:
        def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            request = self._take(requests, context)
            reply: bytes = b"" if request is None else behavior(request, context)
            return reply

        return handle

    def _held(self, behavior: Behavior) -> Behavior:
        def handle(
            requests: Iterator[bytes],
            context: grpc.ServicerContext,
            send: Callable[[bytes | None], None],
        ) -> None:
            request = self._take(requests, context)
            if request is None:
                send(None)
            else:
                behavior(request, context, send)

        return handle

    def _take(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes | None:
        """Receive the message of a call. Returns None if that fails; the call then has its error status."""
        peer = context.peer()
        try:
            self._messages.enter(peer, context)
        except LimitExceeded as error:
            error_statuses.failure(context, error)
            return None
        try:
            return next(requests)
        except StopIteration:
            error_statuses.failure(context, FrameError("the call ended without its message"))
            return None
        finally:
            self._messages.leave(peer, context)
