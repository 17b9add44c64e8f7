"""The spans of pushes, by OpenTelemetry. Only processes that trace import this (open_tracing)."""

import os
import threading
from contextlib import AbstractContextManager

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from psfleet.core.base.threads import ServiceThread

_FIELD = "traceparent"
_LAST_SECONDS = 2.0  # at the end of a process, for a collector that does not answer
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
        # Its own hook at exit would wait for a silent collector once more after `close`.
        self._provider = TracerProvider(resource=Resource.create(own), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{url}/v1/traces")))
        self.tracer = self._provider.get_tracer("psfleet")
        # The exporter waits 10 s for an answer, or as long as OTEL_EXPORTER_OTLP_TIMEOUT says. In a daemon
        # thread this wait does not delay the end of the process. The thread starts here, because `close` may
        # run at the exit of the interpreter, when Python 3.12 starts no more threads.
        self._is_ending = threading.Event()
        self._sender = ServiceThread(self._send_last, "last spans")
        self._sender.start()

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
        """Send the spans that have ended, within 2 s. Other spans are lost."""
        self._is_ending.set()
        self._sender.join(_LAST_SECONDS)

    def _send_last(self) -> None:
        self._is_ending.wait()
        self._provider.shutdown()


def traceparent(span: Span) -> str:
    """Return the span's context for another process; empty: it is not recorded."""
    carrier: dict[str, str] = {}
    if span.is_recording():
        _W3C.inject(carrier, set_span_in_context(span))
    return carrier.get(_FIELD, "")
