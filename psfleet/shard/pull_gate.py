"""What pulls wait for in a mode without rounds: a rule that the mode's declaration names."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from psfleet.consistency import NO_MODE, ConsistencyMode
from psfleet.shard.events import Pull

__all__ = ["PullGate"]


@dataclass
class PullGate:
    """The clocks of one shard's workers, and which pulls they let pass: all, unless a rule says otherwise.

    A worker's clock counts its pushes since all workers last met; the push brings it, and the pull that
    follows names it. A rule derives from this class and overrides `awaited` and `wait`. Clocks and `lead` are
    durable; whatever else it keeps starts anew with the process.

    Attributes:
        mode: With the settings that servers know.
        at: Clock of each seat; one without it has pushed nothing.
        lead: How far ahead a worker was at most when it was given values.
        tick_every: How many seconds should lie between calls of `tick`; 0: the rule knows no time.
    """

    mode: ConsistencyMode = NO_MODE
    at: dict[int, int] = field(default_factory=dict)
    lead: int = 0
    tick_every: ClassVar[float] = 0.0

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

    def tick(self, seconds: float) -> None:
        """Time has passed. Pulls that wait are asked about again."""

    def awaited(self, pull: Pull, live: Iterable[int]) -> list[int]:
        """Whom the pull waits for, of the workers that neither rest nor have left; empty: nobody."""
        return []

    def wait(self, pull: Pull) -> str:
        """How far ahead it is, for the error if that lasts too long: `worker 1 is 3 pushes ahead`."""
        return f"worker {pull.worker} is too far ahead"

    def serve(self, pull: Pull, live: Iterable[int]) -> None:
        """The pull is answered."""
        behind = min((self.at.get(seat, 0) for seat in live), default=pull.clock)
        self.lead = max(self.lead, pull.clock - behind)

    def validate(self) -> None:
        """Check what must always hold; for tests."""
