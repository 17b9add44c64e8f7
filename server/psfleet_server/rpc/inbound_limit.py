"""How the messages of calls come in over TCP: few at a time, and whoever stalls keeps nobody out.

gRPC's own unary handlers hold a thread of the pool while a message is on its way, for as long as its
sender likes. As handlers of streams they are called before it, so that calls can be counted first. To
a client that sends one message both are the same.
"""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from psfleet.errors import FrameError, LimitExceeded
from psfleet.wire import error_status

__all__ = ["InboundLimit"]

Handler = Any  # grpc.RpcMethodHandler, generic in its stubs only
Behavior = Callable[..., Any]


class InboundLimit(grpc.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Takes in messages for the handlers behind it.

    Args:
        each: Messages that may be on their way over one connection.
        in_all: Over all connections. When there are so many, a call of a connection with fewer takes the
            place of the oldest of the connection with most.
        heard: Called with the peer of each call (ServicerContext.peer).
    """

    def __init__(self, each: int, in_all: int, heard: Callable[[str], None]) -> None:
        self._each = each
        self._in_all = in_all
        self._heard = heard
        self._lock = threading.Lock()
        self._coming: dict[str, dict[grpc.ServicerContext, float]] = {}
        self._handlers: dict[int, tuple[Handler, Handler]] = {}  # by id, with what has it

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Handler | None"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        handler = continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        known = self._handlers.get(id(handler))
        if known is None:
            known = self._handlers[id(handler)] = (handler, self._around(handler))
        return known[1]

    def _around(self, handler: Handler) -> Handler:
        """The handler, called before its message."""
        if handler.unary_unary is not None:
            return grpc.stream_unary_rpc_method_handler(self._answering(handler.unary_unary))
        held = self._held(handler.unary_stream)
        held.experimental_non_blocking = True  # type: ignore[attr-defined]  # see parking
        return grpc.stream_stream_rpc_method_handler(held)

    def _answering(self, behavior: Behavior) -> Behavior:
        def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
            request = self._take(requests, context)
            answer: bytes = b"" if request is None else behavior(request, context)
            return answer

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
        """The message of a call; None: there is none, and the call has its status."""
        peer = context.peer()
        self._heard(peer)
        try:
            self._enter(peer, context)
        except LimitExceeded as error:
            error_status.failure(context, error)
            return None
        try:
            return next(requests)
        except StopIteration:
            error_status.failure(context, FrameError("the call ended without its message"))
            return None
        finally:
            self._leave(peer, context)

    def _enter(self, peer: str, context: grpc.ServicerContext) -> None:
        with self._lock:
            own = len(self._coming.get(peer, ()))
            if own >= self._each:
                raise LimitExceeded(
                    f"{own} messages are on their way over this connection, the limit is {self._each}; "
                    "send fewer at a time, or raise incoming in PSFLEET_LIMITS"
                )
            evicted = None
            if sum(map(len, self._coming.values())) >= self._in_all:
                evicted = self._oldest_of_most(own)
            self._coming.setdefault(peer, {})[context] = time.monotonic()
        if evicted is not None:
            evicted.cancel()

    def _oldest_of_most(self, own: int) -> Any:
        """Make room for a call whose connection has `own` others; the call that has to go."""
        most = max(map(len, self._coming.values()))
        if own >= most:
            raise LimitExceeded(
                f"{self._in_all} messages are on their way to this server, which is the most; "
                "send fewer at a time"
            )
        _, peer, context = min(
            (
                (began, peer, context)
                for peer, calls in self._coming.items()
                if len(calls) == most
                for context, began in calls.items()
            ),
            key=lambda found: found[0],
        )
        self._forget(peer, context)
        return context

    def _leave(self, peer: str, context: grpc.ServicerContext) -> None:
        with self._lock:
            self._forget(peer, context)

    def _forget(self, peer: str, context: grpc.ServicerContext) -> None:
        calls = self._coming.get(peer, {})
        calls.pop(context, None)
        if not calls:
            self._coming.pop(peer, None)
