"""Rule by which pulls wait in a mode without rounds, named in the mode's declaration.

A pull waits until no other worker is too far behind the push that it follows. Workers that rest at a
collective do not count (rule R14 of docs/protocol.md): the collective would otherwise wait for those who wait
for them. When all have met, every clock starts again at 0, on every server at the same place in
each worker's stream.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from typing_extensions import override

from psfleet.consistency import NO_MODE, ConsistencyMode
from psfleet.shard.events import Pull


@dataclass
class PullGate:
    """The clocks of one shard's workers, and which pulls they let pass: all, unless a rule says otherwise.

    A worker's clock counts its pushes since the last collective; the push brings it, and the pull that
    follows names it. A rule derives from this class and overrides `awaited` and `wait`. Clocks and
    `leading_steps` are durable; whatever else it keeps starts anew with the process.

    Attributes:
        mode: With the settings that servers know.
        at: Clock of each seat; one without it has pushed nothing.
        leading_steps: Largest lead in steps of a worker at a pull.
        tick_every: Wanted seconds between calls of `tick`; 0: the rule does not depend on time.
    """

    mode: ConsistencyMode = NO_MODE
    at: dict[int, int] = field(default_factory=dict)
    leading_steps: int = 0
    tick_every: ClassVar[float] = 0.0

    def begin(self, worker: int, live: Iterable[int]) -> int:
        """An incarnation begins beside others that are under way: its clock, that of the slowest of them."""
        others = [self.at.get(seat, 0) for seat in live if seat != worker]
        self.at[worker] = min(others, default=0)
        return self.at[worker]

    def advance(self, worker: int, clock: int) -> None:
        """The worker's next push has come, with that clock: lower than before if it began anew."""
        self.at[worker] = clock

    def restart(self) -> None:
        """Note that all workers have completed a collective."""
        self.at.clear()

    def tick(self, seconds: float) -> None:
        """Time has passed. Pulls that wait are asked about again."""

    def awaited(self, pull: Pull, live: Iterable[int]) -> list[int]:
        """Return the workers that the pull waits for, without those that rest or have left."""
        return []

    def wait(self, pull: Pull) -> str:
        """Describe the worker's lead for a time-out error: `worker 1 is 3 pushes ahead`."""
        return f"worker {pull.worker} is too far ahead"

    def serve(self, pull: Pull, live: Iterable[int]) -> None:
        """The pull is answered."""
        behind = min((self.at.get(seat, 0) for seat in live), default=pull.clock)
        self.leading_steps = max(self.leading_steps, pull.clock - behind)

    def validate(self) -> None:
        """Check what must always hold; for tests."""


@dataclass
class SspClock(PullGate):
    """The bound of a mode that has the setting `staleness`."""

    @property
    def staleness(self) -> int:
        """Number of pushes that a worker may be ahead of the slowest."""
        mode: Any = self.mode
        return int(mode.staleness)

    def awaited(self, pull: Pull, live: Iterable[int]) -> list[int]:
        """Those too far behind it."""
        slowest = pull.clock - self.staleness
        return [seat for seat in live if self.at.get(seat, 0) < slowest]

    @override
    def wait(self, pull: Pull) -> str:
        return f"worker {pull.worker} is {self.staleness + 1} pushes ahead"

    @override
    def validate(self) -> None:
        assert self.leading_steps <= self.staleness


class TickTimer:
    """Time since the last tick of a shard.

    Time in which no rule asks for ticks does not count.

    Args:
        now: Seconds, of a clock that never goes back.
    """

    def __init__(self, now: float) -> None:
        self._told = now

    def due(self, every: float, now: float) -> float:
        """Seconds to tell the shard; 0: it is not time yet.

        Args:
            every: The shard's `tick_every`.
        """
        if not every:
            self._told = now
        seconds = now - self._told
        return seconds if every and seconds >= every else 0.0

    def told(self, now: float) -> None:
        """The shard knows."""
        self._told = now
