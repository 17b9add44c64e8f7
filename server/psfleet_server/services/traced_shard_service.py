"""The service Shard with a span for each push that its worker traces. Only servers that trace import this."""

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.trace import SpanKind

from psfleet.observability.spans import Tracing, parent
from psfleet.wire import frame
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.deferred_reply import DeferredReply
from psfleet_server.services.shard_service import ShardService

__all__ = ["TracedShardService"]


class TracedShardService(ShardService):
    """See ShardService.

    Args:
        host: See ShardService.
        tracing: Makes the spans.
    """

    def __init__(self, host: ShardHost, tracing: Tracing) -> None:
        super().__init__(host)
        self._tracer = tracing.tracer

    def push(self, request: bytes) -> bytes:
        """See ShardService.push."""
        with self._span("Push", request):
            return super().push(request)

    def exchange(self, request: bytes, reply: DeferredReply) -> None:
        """See ShardService.exchange. The span ends when the pull is answered, or waits for other workers."""
        with self._span("Exchange", request):
            super().exchange(request, reply)

    @contextmanager
    def _span(self, method: str, request: bytes) -> Iterator[None]:
        """What this thread does within is part of the push. What it raises fails the span."""
        header, _ = frame.decode(request)
        if not header.traceparent:
            yield
            return
        with self._tracer.start_as_current_span(
            f"psfleet.v1.Shard/{method}",
            parent(header.traceparent),
            SpanKind.SERVER,
            {
                "psfleet.worker": header.worker,
                "psfleet.push": header.sequence,
                "psfleet.request.bytes": len(request),
            },
        ):
            yield
