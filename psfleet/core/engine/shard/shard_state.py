"""Consistency mode of the fleet in one shard: the state of rounds, and the rule for which pulls have to wait.

Sync mode has Rounds. In a mode without rounds, a PullGate decides which pulls wait: in ssp mode a pull waits
until no other worker is too many pushes behind. It does not wait for workers that wait at a collective (rule
R14 of docs/protocol.md); otherwise the collective would wait for the pull, and the pull for workers that are
already at the collective. A worker's *clock* is the number of its pushes since the last collective. After a
collective every clock restarts at 0, on every server at the same point of each worker's stream of pushes.

ConsistencyState is the part of the shard that depends on the mode, and ShardState is all that a snapshot
stores of a shard besides its tables.
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
    """Rule that decides which pulls wait for other workers, in a mode without rounds. Here no pull waits.

    A worker's clock is the number of its pushes since the last collective, such as a barrier. A push brings
    the new clock, and the pull after it names the same clock. To write a rule, derive a class and override
    `awaited` and `wait`. Clocks and `leading_steps` are stored with the shard; other attributes of a
    derived class are lost when the process ends.

    Attributes:
        mode: Consistency mode, with the settings that servers know.
        at: Clock of each seat (worker rank). A seat that has pushed nothing has no entry.
        leading_steps: Largest number of pushes that a worker was ahead of the slowest worker at a pull.
        tick_every: Seconds between the calls of `tick` that the rule needs, or 0 if it does not depend on
            time.
    """

    mode: ConsistencyMode = NO_MODE
    at: dict[int, int] = field(default_factory=dict)
    leading_steps: int = 0
    tick_every: ClassVar[float] = 0.0

    def begin_incarnation(self, worker: int, live: Iterable[int]) -> int:
        """Give a new worker process the clock of the slowest running worker, and return that clock.

        With a clock of 0, every other worker would wait until the new process has caught up.

        Args:
            worker: Rank of the worker.
            live: Ranks of the running workers.
        """
        live_clocks = [self.at.get(seat, 0) for seat in live if seat != worker]
        self.at[worker] = min(live_clocks, default=0)
        return self.at[worker]

    def advance(self, worker: int, clock: int) -> None:
        """Set a worker's clock (number of pushes since the last collective) to that of its new push.

        The new clock is lower than before if the worker has restarted.
        """
        self.at[worker] = clock

    def restart(self) -> None:
        """Reset the clocks to 0 after all workers have completed a collective, such as a barrier."""
        self.at.clear()

    def tick(self, seconds: float) -> None:
        """Receive the seconds since the last tick. The shard then checks its waiting pulls again."""

    def awaited(self, pull: Pull, live: Iterable[int]) -> list[int]:
        """Return the workers for which the pull has to wait; an empty list answers the pull now.

        Args:
            pull: The pull.
            live: Workers except those that wait at a collective (a barrier, say) or have left.
        """
        return []

    def wait(self, pull: Pull) -> str:
        """Return the reason of the wait for a time-out error, such as `worker 1 is 3 pushes ahead`."""
        return f"worker {pull.worker} is too far ahead"

    def serve(self, pull: Pull, live: Iterable[int]) -> None:
        """Record that the pull is answered."""
        behind = min((self.at.get(seat, 0) for seat in live), default=pull.clock)
        self.leading_steps = max(self.leading_steps, pull.clock - behind)

    def validate(self) -> None:
        """Check the invariants; for tests."""


@dataclass
class SspClock(PullGate):
    """Rule of ssp mode: a pull waits while its worker is more than `staleness` pushes ahead of another."""

    @property
    def staleness(self) -> int:
        """Number of pushes that a worker may be ahead of the slowest worker."""
        mode: Any = self.mode
        return int(mode.staleness)

    @override
    def awaited(self, pull: Pull, live: Iterable[int]) -> list[int]:
        """Return the workers that are more than `staleness` pushes behind the pull."""
        slowest = pull.clock - self.staleness  # lowest clock that the pull does not wait for
        return [seat for seat in live if self.at.get(seat, 0) < slowest]

    @override
    def wait(self, pull: Pull) -> str:
        return f"worker {pull.worker} is {self.staleness + 1} pushes ahead"

    @override
    def validate(self) -> None:
        assert self.leading_steps <= self.staleness


class TickTimer:
    """Decides when the next Tick event of a shard is due.

    Time in which no table and no rule needs ticks is skipped.

    Args:
        now: Seconds of a monotonic clock.
    """

    def __init__(self, now: float) -> None:
        self._told = now

    def due(self, every: float, now: float) -> float:
        """Return the seconds since the last tick if a tick is due, else 0.

        Args:
            every: Interval that the shard needs (`tick_every`), or 0 if it needs no ticks.
            now: Seconds of the same clock.
        """
        if not every:
            self._told = now
        seconds = now - self._told
        return seconds if every and seconds >= every else 0.0

    def mark_ticked(self, now: float) -> None:
        """Record that the shard has handled the tick that was due at `now`."""
        self._told = now


@dataclass
class ConsistencyState:
    """Consistency mode of the fleet, with its rounds or its rule for waiting pulls.

    Attributes:
        server: Index of the shard's server, for messages.
        rounds: Rounds of the shard. In every mode they also record which workers run, wait at a collective,
            and have left.
        declared: The mode, with the settings that servers know.
        switches: Number of mode switches so far.
        gate: Rule for waiting pulls in a mode without rounds.
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
        """Name of the mode, or None until the first worker joins."""
        return cast(Mode, self.declared.name) or None

    def check_mode(self, event: Join) -> None:
        """Refuse a worker that joins with another mode, or that requests an impossible mode switch.

        Raises:
            ConfigError: The mode or one of its settings differs from the fleet's.
            ProtocolError: The switch has the wrong number, or pushes of an open round are here.
        """
        if event.switch <= self.switches:
            if self.mode is not None:
                self._check_same(event)
        elif event.switch != self.switches + 1 or self.rounds.held:
            raise ProtocolError(
                f"worker {event.worker} begins mode switch {event.switch}, but server {self.server} has made "
                f"{self.switches}, or the pushes of a round have not all arrived"
            )

    def adopted(self, event: Join) -> Join:
        """Return the join event with the fleet's present mode instead of the mode that it requests.

        A worker that restarts after a mode switch requests the first mode of its script.
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
        """Set the mode to that of a joining worker, which `check_mode` has accepted."""
        if event.mode.agreed() != self.declared:  # the same mode again must not reset the gate
            self._be_in(event.mode, self.gate)

    def switch(self, event: Join, last: int) -> None:
        """Switch to another mode. The next round has the number `last` + 1."""
        self.rounds.go_on_from(last)
        self._be_in(event.mode, PullGate())
        self.switches = event.switch

    def _be_in(self, mode: ConsistencyMode, before: PullGate) -> None:
        self.declared = mode.agreed()
        kind = find_part(mode.pull_gate) if mode.pull_gate else PullGate
        self.gate = kind(self.declared, before.at, before.leading_steps)

    def begin_incarnation(self, worker: int) -> None:
        """Give a new worker process the clock (number of pushes) of the slowest worker."""
        self.gate.begin_incarnation(worker, self.rounds.running())

    def leave(self, worker: int) -> None:
        """Record that a worker has left for good. This may end the other workers' wait at a barrier."""
        rested = bool(self.rounds.resting)
        self.rounds.leave(worker)
        self._restart_after_collective(rested)

    def rest_worker(self, worker: int, number: int) -> None:
        """Record that a worker waits at a collective, such as a barrier. The last worker to come ends it."""
        self.rounds.rest_worker(worker, number)
        self._restart_after_collective(True)

    def install(self, event: InstallView, before: Mapping[int, int]) -> None:
        """Adopt the membership of a view, which says which worker processes belong to the fleet.

        Args:
            event: The view.
            before: For each seat (worker rank), the number of its worker process until now.
        """
        rested = bool(self.rounds.resting)
        counts = self.mode is None or self.declared.has_rounds
        self.rounds.install(event.seats, before, event.closed if counts else 0)
        self._restart_after_collective(rested)

    def _restart_after_collective(self, rested: bool) -> None:
        # Workers waited and now none does: the last expected worker has arrived at the collective.
        if rested and not self.rounds.resting:
            self.gate.restart()

    def pushed(self, push: Push) -> None:
        """Record a new push in a mode without rounds."""
        if self.declared.pull_gate:
            self.gate.advance(push.worker, push.clock)

    def is_ready(self, pull: Pull) -> bool:
        """Return whether the pull can be answered now."""
        if self.declared.pull_gate:
            return not self.gate.awaited(pull, self.rounds.running())
        return pull.commit <= self.rounds.closed

    def serve(self, pull: Pull) -> None:
        """Record that the pull is answered."""
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
        """Return the seconds between the Tick events that the mode and the tables need, or 0 for none.

        Args:
            others: Seconds between the ticks that the tables need, or 0.
        """
        return min(filter(None, (others, self.gate.tick_every)), default=0.0)

    def tick(self, seconds: float) -> bool:
        """Pass the seconds since the last tick to the mode's rule; return whether to check waiting pulls."""
        self.gate.tick(seconds)
        return bool(self.gate.tick_every)

    def validate(self) -> None:
        """Check the invariants; for tests."""
        self.rounds.validate()
        self.gate.validate()


@dataclass(frozen=True)
class ShardState:
    """State of a shard that is stored with its tables. All other state is lost with the process.

    Attributes:
        workers: The process of each worker, and its progress.
        consistency: Consistency mode with its rounds and clocks.
        cut: Number of the last snapshot that this shard has taken.
        makers: For each table key, the worker that made the table. Other tables have no entry.
    """

    workers: Workers = field(default_factory=lambda: Workers(0, 0))
    consistency: ConsistencyState = field(
        default_factory=lambda: ConsistencyState(0, Rounds(set()))
    )
    cut: int = 0
    makers: dict[int, int] = field(default_factory=dict)

    def copied(self) -> "ShardState":
        """Return a deep copy, except that it shares pushes with the original, since a push never changes."""
        pushes = {id(push): push for push in self.consistency.rounds.held.values()}
        return copy.deepcopy(self, pushes)
