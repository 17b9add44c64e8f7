"""What makes a push durable, as spans of its trace. Only a server that traces imports this."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry.trace import Tracer, get_current_span

from psfleet.faults.crash_points import CrashFaults
from psfleet.wire.frame import Part
from psfleet_server.durability.log import ServerLog
from psfleet_server.durability.log_shipping import LogShipping
from psfleet_server.durability.records import name_of

__all__ = ["TracedLog", "TracedShipping"]


@contextmanager
def _child(tracer: Tracer, name: str) -> Iterator[None]:
    """A span within the push that this thread takes, if it takes one that is traced."""
    if not get_current_span().is_recording():
        yield
        return
    with tracer.start_as_current_span(name):
        yield


class TracedLog(ServerLog):
    """See ServerLog.

    Args:
        tracer: Makes the spans.
        more: See ServerLog.
    """

    def __init__(self, tracer: Tracer, *more: Any, **settings: Any) -> None:
        self._tracer = tracer
        super().__init__(*more, **settings)

    def append(self, kind: int, parts: Sequence[Part]) -> None:
        """See ServerLog.append."""
        with _child(self._tracer, f"log {name_of(kind)}"):
            super().append(kind, parts)

    def settle(self, end: int) -> None:
        """See ServerLog.settle."""
        if self.is_settled(end):
            return
        with _child(self._tracer, "log sync"):
            super().settle(end)


class TracedShipping(LogShipping):
    """See LogShipping.

    Args:
        tracer: Makes the spans.
        crashes: For tests.
    """

    def __init__(self, tracer: Tracer, crashes: CrashFaults | None = None) -> None:
        self._tracer = tracer
        super().__init__(crashes)

    def settle(self, end: int) -> None:
        """See LogShipping.settle."""
        if self.is_settled(end):
            return
        with _child(self._tracer, "standby"):
            super().settle(end)
