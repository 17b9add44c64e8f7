"""Ssp mode: no worker is more than `staleness` pushes ahead of the slowest one.

A worker's clock counts its pushes since all workers last met. The push brings it, the pull that
follows names it, and that pull waits until no other worker is too far behind. Workers that rest at a
meeting do not count (rule R14 of docs/protocol.md): the meeting would otherwise wait for those who wait
for them. When all have met, every clock starts again at 0, on every server at the same place in
each worker's stream.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["WorkerClocks"]


@dataclass
class WorkerClocks:
    """Clocks of one shard's workers; a seat without one has pushed nothing.

    Attributes:
        staleness: How many pushes a worker may be ahead of the slowest.
        at: Clock of each seat.
        lead: How far ahead a worker was at most when it was given values.
    """

    staleness: int = 0
    at: dict[int, int] = field(default_factory=dict)
    lead: int = 0

    def begin(self, worker: int, live: Iterable[int]) -> int:
        """A life begins beside others that are under way: its clock, that of the slowest of them."""
        others = [self.at.get(seat, 0) for seat in live if seat != worker]
        self.at[worker] = min(others, default=0)
        return self.at[worker]

    def advance(self, worker: int, clock: int) -> None:
        """The worker's next push has come, with that clock: lower than before if it began anew."""
        self.at[worker] = clock

    def restart(self) -> None:
        """All workers have met."""
        self.at.clear()

    def awaited(self, clock: int, live: Iterable[int]) -> list[int]:
        """Whom a pull of that clock waits for: those too far behind it."""
        return [seat for seat in live if self.at.get(seat, 0) < clock - self.staleness]

    def serve(self, clock: int, live: Iterable[int]) -> None:
        """A pull of that clock is answered."""
        behind = min((self.at.get(seat, 0) for seat in live), default=clock)
        self.lead = max(self.lead, clock - behind)

    def validate(self) -> None:
        """Check what must always hold; for tests."""
        assert self.lead <= self.staleness
