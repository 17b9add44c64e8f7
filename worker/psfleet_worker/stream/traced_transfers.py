"""Transfers whose pushes are traced: a span for the push, and one for each call that carries it.

A call's span begins when the call leaves, and ends with its answer. Only a worker that traces imports this.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from psfleet.errors import PsfleetError
from psfleet.observability.spans import Tracing, traceparent
from psfleet.runtime.interface import Gradient
from psfleet.schema.table import TableSpec
from psfleet.strategy import WireSettings
from psfleet_worker.connection.call import Call
from psfleet_worker.connection.connection import FleetConnection
from psfleet_worker.connection.request import ServerRequest
from psfleet_worker.session.instructions import LayOutPush, SendPush
from psfleet_worker.stream.pushes import FleetPush
from psfleet_worker.stream.transfers import Transfers

__all__ = ["TracedTransfers"]


class _PushTrace:
    """The spans of one push. A span that is current in the script is the parent of them all.

    Args:
        tracing: Makes them.

    Attributes:
        calls: How many calls that carry the push have not ended.
    """

    def __init__(self, tracing: Tracing) -> None:
        self.span = tracing.tracer.start_span("push")
        self._tracing = tracing
        self.calls = 0
        self._lock = threading.Lock()

    def leave(self, request: ServerRequest) -> Span:
        """A call leaves: begin its span, and tell the server of it."""
        span = self._tracing.tracer.start_span(
            "call",
            set_span_in_context(self.span),
            SpanKind.CLIENT,
            {"psfleet.request.bytes": request.bytes},
        )
        request.say(traceparent=traceparent(span))
        return span

    def called(self, span: Span, error: PsfleetError | None) -> None:
        """A call has ended. The push ends with its last call, and fails with the first that fails."""
        _end(span, error)
        with self._lock:
            self.calls -= 1
            over = not self.calls
        if error is not None:
            self.fail(error)
        elif over:
            _end(self.span, None)

    def fail(self, error: BaseException) -> None:
        """The push has failed."""
        _end(self.span, error)


def _end(span: Span, error: BaseException | None) -> None:
    if not span.is_recording():  # it has ended, or is not sampled
        return
    if error is not None:
        span.record_exception(error)
        span.set_status(Status(StatusCode.ERROR, str(error)))
    span.end()


class _TracedRequest(ServerRequest):
    """Tells the server of the call's span, if it carries a push that is traced."""

    trace: _PushTrace | None = None
    span: Span | None = None

    def request(self) -> bytes:
        """See ServerRequest.request. It is asked for when the call leaves, and perhaps again later."""
        if self.trace is not None and self.span is None:
            self.span = self.trace.leave(self)
        return super().request()


class _TracedCall(Call):
    """Ends the span of its request."""

    def __init__(self, owner: Any, method: str, *rest: Any) -> None:
        super().__init__(owner, method, *rest)
        self._carried = self.cargo if isinstance(self.cargo, _TracedRequest) else None
        if self._carried is not None and self._carried.span is not None:
            self._carried.span.update_name(f"psfleet.v1.{method}")
            self._carried.span.set_attribute("server.address", owner.endpoint)

    def end(self, answer: bytes | None = None, error: PsfleetError | None = None) -> None:
        """See Call.end."""
        carried, self._carried = self._carried, None
        if carried is not None and carried.trace is not None and carried.span is not None:
            carried.trace.called(carried.span, error)
        super().end(answer, error)


class TracedTransfers(Transfers):
    """See Transfers.

    Args:
        tracing: Makes the spans.
        fleet, spec_of, wire: See Transfers.
    """

    make_request = _TracedRequest
    _trace: _PushTrace  # of the push that is laid out

    def __init__(
        self,
        tracing: Tracing,
        fleet: FleetConnection,
        spec_of: Callable[[int], TableSpec],
        wire: WireSettings,
    ) -> None:
        super().__init__(fleet, spec_of, wire)
        self._tracing = tracing
        for client in fleet.clients:
            client.make_call = _TracedCall

    def push(
        self,
        gradients: Sequence[Gradient],
        samples: int,
        loss: float | None,
        position: tuple[int, int],
    ) -> FleetPush:
        """See Transfers.push."""
        self._trace = _PushTrace(self._tracing)
        try:
            return super().push(gradients, samples, loss, position)
        except BaseException as error:
            self._trace.fail(error)
            raise

    def _laden(
        self, gradients: Sequence[Gradient], said: dict[str, Any], load: LayOutPush
    ) -> list[ServerRequest]:
        parcels = super()._laden(gradients, said, load)
        span = self._trace.span
        span.set_attributes({"psfleet.push": load.sequence, "psfleet.samples": said["samples"]})
        for parcel in parcels:
            assert isinstance(parcel, _TracedRequest)
            parcel.trace = self._trace
        return parcels

    def _send(self, send: SendPush) -> FleetPush:
        self._trace.calls = send.addressed.count(send.sequence)
        for parcel, last in zip(self._parcels, send.addressed, strict=True):
            if last < send.sequence:  # a pull from there does not carry the push
                assert isinstance(parcel, _TracedRequest)
                parcel.trace = None
        return super()._send(send)
