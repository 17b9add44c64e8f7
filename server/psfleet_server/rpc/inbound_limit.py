"""Limit on inbound messages over TCP: few at a time, and a sender that stalls blocks no others.

gRPC's own unary handlers hold a thread of the pool while a message is on its way, for as long as its
sender likes. As handlers of streams they are called before it, so that calls can be counted first. To
a client that sends one message both are the same.
"""

from collections.abc import Callable, Iterator
from typing import Any

import grpc

from psfleet.errors import FrameError, LimitExceeded
from psfleet.http2.calls import InboundMessages
from psfleet.wire.connections import error_status

Handler = Any  # grpc.RpcMethodHandler, generic in its stubs only
Behavior = Callable[..., Any]


class InboundLimit(grpc.ServerInterceptor):  # type: ignore[type-arg]  # generic in its stubs only
    """Takes in messages for the handlers behind it.

    Args:
        messages: Those of all endpoints of this server.
        on_call: Called with the peer of each call (ServicerContext.peer).
    """

    def __init__(self, messages: InboundMessages, on_call: Callable[[str], None]) -> None:
        self._messages = messages
        self._on_call = on_call
        self._handlers: dict[int, tuple[Handler, Handler]] = {}  # by id, with what has it

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
        """The handler, called before its message."""
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
        """The message of a call; None: there is none, and the call has its status."""
        peer = context.peer()
        self._on_call(peer)
        try:
            self._messages.enter(peer, context)
        except LimitExceeded as error:
            error_status.failure(context, error)
            return None
        try:
            return next(requests)
        except StopIteration:
            error_status.failure(context, FrameError("the call ended without its message"))
            return None
        finally:
            self._messages.leave(peer, context)
