"""The spans of a traced push: one for the push, and one for each call that carries it.

A call's span begins when the call leaves, and ends with its answer. Only a worker that traces imports this.
"""

import threading

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context

from psfleet.core.base.errors import PsfleetError
from psfleet.core.base.observability.spans import Tracing, traceparent
from psfleet_worker.connection.request import ServerRequest


class PushTrace:
    """The spans of one push. A span that is current in the script is the parent of them all.

    Attributes:
        calls: Number of calls that carry the push and have not ended.
    """

    def __init__(self, tracing: Tracing) -> None:
        self.span = tracing.tracer.start_span("push")
        self._tracing = tracing
        self.calls = 0
        self._lock = threading.Lock()

    def describe(self, push: int, samples: int) -> None:
        """Note the number of the push and its samples."""
        self.span.set_attributes({"psfleet.push": push, "psfleet.samples": samples})

    def leave(self, request: ServerRequest) -> "CallSpan":
        """Begin the span of a call that leaves, and send its context to the server."""
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
        """End the push in failure."""
        end(self.span, error)

    def called(self, error: PsfleetError | None) -> None:
        """Note the end of a call. The push ends with its last call, and fails with the first that fails."""
        with self._lock:
            self.calls -= 1
            over = not self.calls
        if over or error is not None:
            end(self.span, error)


class CallSpan:
    """The span of one call of a push."""

    def __init__(self, trace: PushTrace, span: Span) -> None:
        self._trace = trace
        self._span = span

    def called(self, error: PsfleetError | None) -> None:
        """End the call."""
        end(self._span, error)
        self._trace.called(error)


def end(span: Span, error: BaseException | None) -> None:
    """End a span, in failure if there is an error."""
    if not span.is_recording():  # it has ended, or is not sampled
        return
    if error is not None:
        span.record_exception(error)
        span.set_status(Status(StatusCode.ERROR, str(error)))
    span.end()
