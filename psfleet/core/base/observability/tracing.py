"""Records spans of pushes with OpenTelemetry and sends them to a collector.

A span records the time of one step of a push: the worker's call, the server's handling, and parts of it. Each
call carries the context of its span (`traceparent`), so that a collector can join the spans of all processes
to one trace. Only processes that trace import this module (trace_setup.py).
"""

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
_LAST_SECONDS = 2.0  # longest wait for the collector at the end of a process
_W3C = TraceContextTextMapPropagator()


class Tracing:
    """Creates the spans of one process, and sends them to a collector from a thread of its own.

    The tracer provider is not registered globally, because the global one belongs to the script. OTEL_*
    variables configure it further; for example, OTEL_TRACES_SAMPLER selects the pushes to trace.
    """

    def __init__(self, url: str, job: str, role: str, rank: int) -> None:
        resource_attributes: dict[str, str | int] = {
            "service.name": f"psfleet-{role}",
            "service.namespace": job,
            "service.instance.id": f"{role}.{rank}",
            "process.pid": os.getpid(),
        }
        # The provider's own exit hook would wait a second time for a silent collector, after `close`.
        self._provider = TracerProvider(
            resource=Resource.create(resource_attributes), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{url}/v1/traces")))
        self.tracer = self._provider.get_tracer("psfleet")
        # The exporter waits 10 s for a reply, or as long as OTEL_EXPORTER_OTLP_TIMEOUT says. In a daemon
        # thread, this wait does not delay the end of the process. The thread is started here, because
        # `close` may run when the interpreter exits, and Python 3.12 starts no threads then.
        self._is_ending = threading.Event()
        self._sender = ServiceThread(self._send_last, "last spans")
        self._sender.start()

    def serving(
        self, method: str, caller: str, attributes: dict[str, str | int]
    ) -> AbstractContextManager[Span]:
        """Begin a server's span of a call, for a `with` block. It is this thread's current span in the block.

        If an exception leaves the block, the span is marked as failed.

        Args:
            caller: Context of the caller's span (`traceparent`). A context that cannot be read is ignored.
        """
        parent = _W3C.extract({_FIELD: caller}, Context())
        return self.tracer.start_as_current_span(method, parent, SpanKind.SERVER, attributes)

    def child(self, name: str) -> Span | None:
        """Begin a span within this thread's current span.

        Returns None if this thread handles no traced push.
        """
        return self.tracer.start_span(name) if get_current_span().is_recording() else None

    def close(self) -> None:
        """Send the spans that have ended, waiting at most 2 s. Spans that have not ended are lost."""
        self._is_ending.set()
        self._sender.join(_LAST_SECONDS)

    def _send_last(self) -> None:
        self._is_ending.wait()
        self._provider.shutdown()


def traceparent(span: Span) -> str:
    """Return the context of a span, to be sent to another process, or "" if the span is not recorded."""
    carrier: dict[str, str] = {}
    if span.is_recording():
        _W3C.inject(carrier, set_span_in_context(span))
    return carrier.get(_FIELD, "")
