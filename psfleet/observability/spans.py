"""The spans of pushes, by OpenTelemetry. Only processes that trace import this (open_tracing)."""

import os

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

__all__ = ["Tracing", "parent", "traceparent"]

_FIELD = "traceparent"
_W3C = TraceContextTextMapPropagator()


class Tracing:
    """Makes the spans of one process, and sends them to a collector in a thread of its own.

    The provider is not the global one, which is the script's. OTEL_* variables say the rest, for example
    OTEL_TRACES_SAMPLER which pushes are traced.

    Args:
        url: Of the collector.
        job, role, rank: Of this process.

    Attributes:
        tracer: Starts spans.
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

    def close(self) -> None:
        """Send what has ended. Spans that end later are lost."""
        self._provider.shutdown()


def traceparent(span: Span) -> str:
    """The span as another process is told of it; empty: it is not recorded."""
    carrier: dict[str, str] = {}
    if span.is_recording():
        _W3C.inject(carrier, set_span_in_context(span))
    return carrier.get(_FIELD, "")


def parent(said: str) -> Context:
    """The context of a span in another process. One that cannot be read is as none."""
    return _W3C.extract({_FIELD: said}, Context())
