"""The spans of pushes, by OpenTelemetry. Only processes that trace import this (open_tracing)."""

import os
from contextlib import AbstractContextManager

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_FIELD = "traceparent"
_W3C = TraceContextTextMapPropagator()


class Tracing:
    """Makes the spans of one process, and sends them to a collector in a thread of its own.

    The provider is not the global one, which is the script's. OTEL_* variables say the rest, for example
    OTEL_TRACES_SAMPLER which pushes are traced.

    Args:
        job, role, rank: Names and number of this process.
    """

    def __init__(self, url: str, job: str, role: str, rank: int) -> None:
        own: dict[str, str | int] = {
            "service.name": f"psfleet-{role}",
            "service.namespace": job,
            "service.instance.id": f"{role}.{rank}",
            "process.pid": os.getpid(),
        }
        self._provider = TracerProvider(resource=Resource.create(own))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{url}/v1/traces")))
        self.tracer = self._provider.get_tracer("psfleet")

    def serving(
        self, method: str, caller: str, attributes: dict[str, str | int]
    ) -> AbstractContextManager[Span]:
        """Begin a server's span of a call; `child` finds it. An error inside fails it.

        Args:
            caller: The caller's span (`traceparent`). One that cannot be read is as none.
        """
        parent = _W3C.extract({_FIELD: caller}, Context())
        return self.tracer.start_as_current_span(method, parent, SpanKind.SERVER, attributes)

    def child(self, name: str) -> Span | None:
        """Begin a span within the push that this thread takes; None: it takes none that is traced."""
        return self.tracer.start_span(name) if get_current_span().is_recording() else None

    def close(self) -> None:
        """Send what has ended. Spans that end later are lost."""
        self._provider.shutdown()


def traceparent(span: Span) -> str:
    """Return the span's context for another process; empty: it is not recorded."""
    carrier: dict[str, str] = {}
    if span.is_recording():
        _W3C.inject(carrier, set_span_in_context(span))
    return carrier.get(_FIELD, "")
