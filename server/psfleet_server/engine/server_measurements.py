"""What a server measures and collects for displays; no part of its state."""

import threading
import time
from dataclasses import dataclass

from psfleet.observability.latency import LatencyHistogram

__all__ = ["CallBytes", "CallLatencies", "ShownLatency", "WorkerReports"]

_WATCHED = 60.0  # seconds after a look during which workers send their metrics
_LONGEST = 256 << 10  # bytes of one worker's metrics; longer ones are dropped


@dataclass(frozen=True)
class ShownLatency:
    """Times as metrics show them.

    Attributes:
        help: What metrics say of them.
        by_mode: With the consistency mode as their label.
    """

    times: LatencyHistogram
    help: str
    by_mode: bool


class CallLatencies:
    """Times from the arrival of a call; psfleet_server.services.method_handlers declares those of a method.

    Attributes:
        shown: By name NAME what metrics call psfleet_NAME_seconds.
        push: Of pushes, by themselves or with a pull behind them.
        waited: Of pulls that waited.
    """

    def __init__(self) -> None:
        self.shown: dict[str, ShownLatency] = {}
        self.push = self.of(
            "push", "Time to take a push; in an exchange, until the pull behind it may begin"
        )
        self.waited = self.of("waited", "Time of pulls that waited", by_mode=True)

    def of(self, name: str, help: str, *, by_mode: bool = False) -> LatencyHistogram:
        """The times of this name, which metrics show from now on."""
        new = ShownLatency(LatencyHistogram(), help, by_mode)
        return self.shown.setdefault(name, new).times


@dataclass
class CallBytes:
    """Bytes of the calls of the training, in messages and in shared memory.

    Attributes:
        push, pull, exchange: That came with each kind of call.
        values: That were sent.
        saved: By which the values would have been longer in float32.
    """

    push: int = 0
    pull: int = 0
    exchange: int = 0
    values: int = 0
    saved: int = 0

    @property
    def received(self) -> int:
        """All that came."""
        return self.push + self.pull + self.exchange


class WorkerReports:
    """The last metrics of each worker, which come with its beats while somebody looks. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until = 0.0
        self._texts: dict[int, bytes] = {}

    def look(self) -> dict[int, bytes]:
        """By seat what there is; for a minute workers are asked for more."""
        with self._lock:
            self._until = time.monotonic() + _WATCHED
            return dict(self._texts)

    def take(self, worker: int, text: bytes) -> bool:
        """A worker has sent this, or nothing; whether it is to send its metrics next time."""
        with self._lock:
            if text and len(text) <= _LONGEST:
                self._texts[worker] = text
            return time.monotonic() < self._until
