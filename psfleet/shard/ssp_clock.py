"""Ssp mode: no worker is more than `staleness` pushes ahead of the slowest one.

A pull waits until no other worker is too far behind the push that it follows. Workers that rest at a
meeting do not count (rule R14 of docs/protocol.md): the meeting would otherwise wait for those who wait
for them. When all have met, every clock starts again at 0, on every server at the same place in
each worker's stream.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from psfleet.shard.events import Pull
from psfleet.shard.pull_gate import PullGate

__all__ = ["SspClock"]


@dataclass
class SspClock(PullGate):
    """The bound of a mode that has the setting `staleness`."""

    @property
    def staleness(self) -> int:
        """How many pushes a worker may be ahead of the slowest."""
        mode: Any = self.mode
        return int(mode.staleness)

    def awaited(self, pull: Pull, live: Iterable[int]) -> list[int]:
        """Those too far behind it."""
        slowest = pull.clock - self.staleness
        return [seat for seat in live if self.at.get(seat, 0) < slowest]

    def wait(self, pull: Pull) -> str:
        """See PullGate."""
        return f"worker {pull.worker} is {self.staleness + 1} pushes ahead"

    def validate(self) -> None:
        """See PullGate."""
        assert self.lead <= self.staleness
