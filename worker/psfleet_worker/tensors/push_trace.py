"""OpenTelemetry spans of a traced push: one for the push, and a child span for each call that carries it.

A call's span begins when the call is sent, and ends with its reply. The push's span ends with its last call.
The server continues the trace from the call's `traceparent`. Only a worker with tracing on imports this
module, so that OpenTelemetry need not be installed otherwise. Calls end in the threads of their clients.
"""

import threading

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from psfleet.core.base.errors import PsfleetError
from psfleet.core.base.observability.tracing import Tracing, traceparent
from psfleet_worker.connection.request import ServerRequest


class PushTrace:
    """The spans of one push, below the script's current span if there is one.

    Attributes:
        calls: Number of calls that carry the push and have not ended.
    """

    def __init__(self, tracing: Tracing) -> None:
        self.span = tracing.tracer.start_span("push")
        self._tracing = tracing
        self.calls = 0
        self._lock = threading.Lock()

    def describe(self, push: int, samples: int) -> None:
        """Set attributes of the span: the push's number, and how many samples the push has."""
        self.span.set_attributes({"psfleet.push": push, "psfleet.samples": samples})

    def leave(self, request: ServerRequest) -> "CallSpan":
        """Begin the span of a call that is being sent, and put its context into the call's header."""
        attributes: dict[str, str | int] = {
            "psfleet.request.bytes": request.bytes,
            "server.address": request.client.endpoint,
        }
        span = self._tracing.tracer.start_span(
            f"psfleet.v1.{request.method}",
            set_span_in_context(self.span),
            SpanKind.CLIENT,
            attributes,
        )
        request.say(traceparent=traceparent(span))
        return CallSpan(self, span)

    def fail(self, error: BaseException) -> None:
        """End the push's span as failed."""
        end(self.span, error)

    def called(self, error: PsfleetError | None) -> None:
        """Count the end of a call.

        The push's span ends with its last call, or as failed with the first failed call.
        """
        with self._lock:
            self.calls -= 1
            over = not self.calls
        if over or error is not None:
            end(self.span, error)


class CallSpan:
    """Span of one call of a push."""

    def __init__(self, trace: PushTrace, span: Span) -> None:
        self._trace = trace
        self._span = span

    def called(self, error: PsfleetError | None) -> None:
        """End the call's span. If this was the push's last call, the push's span ends too."""
        end(self._span, error)
        self._trace.called(error)


def end(span: Span, error: BaseException | None) -> None:
    """End a span, as failed if there is an error."""
    if not span.is_recording():  # it has ended, or is not sampled
        return
    if error is not None:
        span.record_exception(error)
        span.set_status(Status(StatusCode.ERROR, str(error)))
    span.end()
