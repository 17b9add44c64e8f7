"""What a server measures and collects for displays; no part of its state."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from psfleet.observability.latency import LatencyHistogram

__all__ = ["CallBytes", "CallLatencies", "WorkerReports"]

_WATCHED = 60.0  # seconds after a look during which workers send their metrics
_LONGEST = 256 << 10  # bytes of one worker's metrics; longer ones are dropped


def _shown(help: str, *, by_mode: bool = False) -> dict[str, Any]:
    """What metrics say of a histogram; `by_mode`: with the consistency mode as its label."""
    return {"help": help, "by_mode": by_mode}


@dataclass
class CallLatencies:
    """Times from the arrival of a call, which metrics call psfleet_<field>_seconds."""

    push: LatencyHistogram = field(
        default_factory=LatencyHistogram,
        metadata=_shown("Time to take a push; in an exchange, until the pull behind it may begin"),
    )
    pull: LatencyHistogram = field(
        default_factory=LatencyHistogram, metadata=_shown("Time to answer a pull, with waiting")
    )
    exchange: LatencyHistogram = field(
        default_factory=LatencyHistogram,
        metadata=_shown("Time to answer a push with the pull behind it"),
    )
    waited: LatencyHistogram = field(
        default_factory=LatencyHistogram, metadata=_shown("Time of pulls that waited", by_mode=True)
    )


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
