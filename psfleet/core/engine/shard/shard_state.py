"""The mode in which a fleet runs, as one shard keeps it: whose pushes it holds, what pulls wait for.

In a mode without rounds a pull waits by the gate that the declaration of the mode names: until no other
worker is too far behind the push that it follows. Workers that rest at a collective do not count (rule R14 of
docs/protocol.md): the collective would otherwise wait for those who wait for them. When all have met, every
clock starts again at 0, on every server at the same place in each worker's stream.
"""

import copy
import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from typing_extensions import override

from psfleet.core.base.errors import ConfigError, DeadlineExceeded, ProtocolError
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine.consistency import NO_MODE, ConsistencyMode, find_part
from psfleet.core.engine.shard.events import Join, Pull, Push
from psfleet.core.engine.shard.membership_view import InstallView
from psfleet.core.engine.shard.rounds import Rounds
from psfleet.core.engine.shard.workers import Workers


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

    def begin_incarnation(self, worker: int, live: Iterable[int]) -> int:
        """An incarnation begins beside others that are under way: its clock, that of the slowest of them."""
        live_clocks = [self.at.get(seat, 0) for seat in live if seat != worker]
        self.at[worker] = min(live_clocks, default=0)
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

    def mark_ticked(self, now: float) -> None:
        """The shard knows."""
        self._told = now


@dataclass
class ConsistencyState:
    """The mode, and the rounds or the gate that it needs.

    Attributes:
        server: Name of the shard's server, for messages.
        rounds: Also says in every mode who runs, rests and has left.
        declared: The mode, with the settings that servers know.
        switches: Changes of the mode so far.
        gate: Rule by which pulls wait in a mode without rounds.
    """

    server: int
    rounds: Rounds
    declared: ConsistencyMode = NO_MODE
    switches: int = 0
    gate: PullGate = field(default_factory=PullGate)

    def __post_init__(self) -> None:
        self._be_in(self.declared, self.gate)

    @property
    def mode(self) -> Mode | None:
        """The name of the mode; None: no worker has joined."""
        return cast(Mode, self.declared.name) or None

    def check_mode(self, event: Join) -> None:
        """Refuse a worker that asks for another mode, or for a change of it that cannot be made."""
        if event.switch <= self.switches:
            if self.mode is not None:
                self._check_same(event)
        elif event.switch != self.switches + 1 or self.rounds.held:
            raise ProtocolError(
                f"worker {event.worker} makes change {event.switch} of the mode, but server "
                f"{self.server} has made {self.switches} and not all is settled here"
            )

    def adopted(self, event: Join) -> Join:
        """Return the join with the fleet's own mode, in case the mode has been changed.

        A worker that starts again asks for the mode that its script begins with.
        """
        if self.mode is None or not self.switches or event.switch:
            return event
        return dataclasses.replace(event, mode=self.declared)

    def _check_same(self, event: Join) -> None:
        if event.mode.name != self.mode:
            raise ConfigError(
                f"worker {event.worker} asks for mode {event.mode.name!r}, "
                f"but the fleet runs in mode {self.mode!r}"
            )
        for name, fleet_value in self.declared.agreed_settings.items():
            setting = event.mode.agreed_settings[name]
            if setting != fleet_value:
                raise ConfigError(
                    f"worker {event.worker} asks for a {name} of {setting}, "
                    f"but the fleet runs with {fleet_value}"
                )

    def start(self, event: Join) -> None:
        """The fleet runs in the mode of this worker, which is its own if it has one."""
        if event.mode.agreed() != self.declared:  # else the gate keeps what it knows
            self._be_in(event.mode, self.gate)

    def switch(self, event: Join, last: int) -> None:
        """Go on in another mode; rounds go on after `last`."""
        self.rounds.go_on_from(last)
        self._be_in(event.mode, PullGate())
        self.switches = event.switch

    def _be_in(self, mode: ConsistencyMode, before: PullGate) -> None:
        self.declared = mode.agreed()
        kind = find_part(mode.pull_gate) if mode.pull_gate else PullGate
        self.gate = kind(self.declared, before.at, before.leading_steps)

    def begin_incarnation(self, worker: int) -> None:
        """An incarnation begins: its clock."""
        self.gate.begin_incarnation(worker, self.rounds.running())

    def leave(self, worker: int) -> None:
        """The worker is gone for good."""
        rested = bool(self.rounds.resting)
        self.rounds.leave(worker)
        self._restart_after_collective(rested)

    def rest_worker(self, worker: int, number: int) -> None:
        """The worker sits out until everybody does."""
        self.rounds.rest_worker(worker, number)
        self._restart_after_collective(True)

    def install(self, event: InstallView, before: Mapping[int, int]) -> None:
        """Be what a view says; `before`: the incarnation of each seat until now."""
        rested = bool(self.rounds.resting)
        counts = self.mode is None or self.declared.has_rounds
        self.rounds.install(event.seats, before, event.closed if counts else 0)
        self._restart_after_collective(rested)

    def _restart_after_collective(self, rested: bool) -> None:
        if rested and not self.rounds.resting:  # all that were expected have come
            self.gate.restart()

    def pushed(self, push: Push) -> None:
        """A push has come, in a mode without rounds."""
        if self.declared.pull_gate:
            self.gate.advance(push.worker, push.clock)

    def is_ready(self, pull: Pull) -> bool:
        """Return whether the pull can be answered now."""
        if self.declared.pull_gate:
            return not self.gate.awaited(pull, self.rounds.running())
        return pull.commit <= self.rounds.closed

    def serve(self, pull: Pull) -> None:
        """The pull is answered."""
        if self.declared.pull_gate:
            self.gate.serve(pull, self.rounds.running())

    def late(self, pull: Pull) -> DeadlineExceeded:
        """Return the error for a pull that has waited for too long."""
        if self.declared.pull_gate:
            seats = self.gate.awaited(pull, self.rounds.running())
            reason = (
                f"{self.gate.wait(pull)} on server {self.server} and was not caught up with in time"
            )
        else:
            seats = self.rounds.awaited()
            reason = f"round {pull.commit} did not close in time on server {self.server}"
        waiting = ", ".join(f"worker {seat}" for seat in seats)
        return DeadlineExceeded(f"{reason}: it waits for {waiting}")

    def tick_every(self, others: float) -> float:
        """Return the wanted seconds between ticks; 0: none are wanted.

        `others`: those that the tables want.
        """
        return min(filter(None, (others, self.gate.tick_every)), default=0.0)

    def tick(self, seconds: float) -> bool:
        """Time has passed; whether pulls may have waited for it."""
        self.gate.tick(seconds)
        return bool(self.gate.tick_every)

    def validate(self) -> None:
        """Check what must always hold; for tests."""
        self.rounds.validate()
        self.gate.validate()


@dataclass(frozen=True)
class ShardState:
    """Stored state of a shard; everything else starts anew with its process.

    Attributes:
        workers: Their incarnations, and how far these are.
        consistency: The mode with its rounds and clocks.
        cut: Number of the last snapshot for which the shard was cut.
        makers: By key of the table the worker that made it, if one did.
    """

    workers: Workers = field(default_factory=lambda: Workers(0, 0))
    consistency: ConsistencyState = field(
        default_factory=lambda: ConsistencyState(0, Rounds(set()))
    )
    cut: int = 0
    makers: dict[int, int] = field(default_factory=dict)

    def copied(self) -> "ShardState":
        """The same value, of which nothing changes later. Held pushes never change and are shared."""
        pushes = {id(push): push for push in self.consistency.rounds.held.values()}
        return copy.deepcopy(self, pushes)
