"""The mode in which a fleet runs, as one shard keeps it: whose pushes it holds, what pulls wait for."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from psfleet.consistency import ConsistencyMode, find_mode
from psfleet.errors import ConfigError, DeadlineExceeded, ProtocolError
from psfleet.settings.mode import Mode
from psfleet.shard.events import Join, Pull
from psfleet.shard.membership_view import InstallView
from psfleet.shard.rounds import Rounds
from psfleet.shard.ssp_clock import WorkerClocks

__all__ = ["ConsistencyState"]


@dataclass
class ConsistencyState:
    """The mode, and the rounds or clocks that it needs.

    Attributes:
        server: Whose shard it is, for messages.
        rounds: Also says in every mode who runs, rests and has left.
        clocks: Of a mode that has clocks.
        mode: Its name; None: no worker has joined.
        switches: Changes of the mode so far.
        declared: What is done in the mode.
    """

    server: int
    rounds: Rounds
    clocks: WorkerClocks = field(default_factory=WorkerClocks)
    mode: Mode | None = None
    switches: int = 0
    declared: ConsistencyMode = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._be_in(self.mode)

    # -- the mode ------------------------------------------------------------------------------

    def check_mode(self, event: Join, waiting: bool) -> None:
        """Refuse a worker that asks for another mode, or for a change of it that cannot be made.

        Args:
            waiting: There are pulls that have not been answered.
        """
        if event.switch <= self.switches:
            if self.mode is not None:
                self._check_same(event, self.mode)
        elif event.switch != self.switches + 1 or self.rounds.held or waiting:
            raise ProtocolError(
                f"worker {event.worker} makes change {event.switch} of the mode, but server "
                f"{self.server} has made {self.switches} and not all is settled here"
            )

    def adopted(self, event: Join) -> Join:
        """What a join comes to once the mode has been changed: with the fleet's own mode.

        A worker that starts again asks for the mode that its script begins with.
        """
        if self.mode is None or not self.switches or event.switch:
            return event
        return dataclasses.replace(event, mode=self.mode, staleness=self.clocks.staleness)

    def _check_same(self, event: Join, mode: Mode) -> None:
        if event.mode != mode:
            raise ConfigError(
                f"worker {event.worker} asks for mode {event.mode!r}, "
                f"but the fleet runs in mode {mode!r}"
            )
        if self.declared.has_clocks and event.staleness != self.clocks.staleness:
            raise ConfigError(
                f"worker {event.worker} asks for a staleness of {event.staleness}, "
                f"but the fleet runs with {self.clocks.staleness}"
            )

    def start(self, event: Join) -> None:
        """The fleet runs in the mode of this worker, which is its own if it has one."""
        self._be_in(event.mode)
        self.clocks.staleness = event.staleness

    def switch(self, event: Join, last: int) -> None:
        """Go on in another mode; rounds go on after `last`."""
        self.rounds.go_on_from(last)
        self._be_in(event.mode)
        self.switches, self.clocks = event.switch, WorkerClocks(event.staleness)

    def _be_in(self, mode: Mode | None) -> None:
        self.mode, self.declared = mode, find_mode(mode)

    # -- who runs ------------------------------------------------------------------------------

    def begin(self, worker: int) -> None:
        """A life begins: its clock."""
        self.clocks.begin(worker, self.rounds.running())

    def leave(self, worker: int) -> None:
        """The worker is gone for good."""
        rested = bool(self.rounds.resting)
        self.rounds.leave(worker)
        self._restart_if_met(rested)

    def rest(self, worker: int, number: int) -> None:
        """The worker sits out until everybody does."""
        self.rounds.rest(worker, number)
        self._restart_if_met(True)

    def install(self, event: InstallView, before: Mapping[int, int]) -> None:
        """Be what a view says; `before`: the life of each seat until now."""
        rested = bool(self.rounds.resting)
        counts = self.mode is None or self.declared.has_rounds
        self.rounds.install(event.seats, before, event.closed if counts else 0)
        self._restart_if_met(rested)

    def _restart_if_met(self, rested: bool) -> None:
        if rested and not self.rounds.resting:  # whoever was to come has come
            self.clocks.restart()

    # -- pulls ---------------------------------------------------------------------------------

    def is_ready(self, pull: Pull) -> bool:
        """Whether the pull waits for nothing more."""
        if self.declared.has_clocks:
            return not self.clocks.awaited(pull.clock, self.rounds.running())
        return pull.commit <= self.rounds.closed

    def serve(self, pull: Pull) -> None:
        """The pull is answered."""
        if self.declared.has_clocks:
            self.clocks.serve(pull.clock, self.rounds.running())

    def late(self, pull: Pull) -> DeadlineExceeded:
        """What a pull is told that has waited for too long."""
        if self.declared.has_clocks:
            awaited = self.clocks.awaited(pull.clock, self.rounds.running())
            what = (
                f"worker {pull.worker} is {self.clocks.staleness + 1} pushes ahead on "
                f"server {self.server} and was not caught up with in time"
            )
        else:
            awaited = self.rounds.awaited()
            what = f"round {pull.commit} did not close in time on server {self.server}"
        waiting = ", ".join(f"worker {seat}" for seat in awaited)
        return DeadlineExceeded(f"{what}: it waits for {waiting}")

    def validate(self) -> None:
        """Check what must always hold; for tests."""
        self.rounds.validate()
        self.clocks.validate()
