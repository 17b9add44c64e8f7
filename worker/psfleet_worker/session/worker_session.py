"""One life of a worker in its fleet: its seat, the servers it has joined, the meetings it has come to.

Pure: its programs yield what is to be asked of the fleet and change the session by the answers.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import cast

from psfleet.consistency import ConsistencyMode
from psfleet.data.progress import ScriptProgress
from psfleet.errors import DeadlineExceeded
from psfleet.settings.mode_names import Mode
from psfleet.shard.events import Join, Leave
from psfleet_worker.session.instructions import (
    CollectiveResult,
    JoinCollective,
    Pause,
    Program,
    RegisterWorker,
    SeatGranted,
    ServerJoined,
)

__all__ = ["Session"]

_PAUSE = 0.05  # seconds between two looks whether the servers agree


class Session:
    """A worker's life: registered with server 0, joined on every server.

    Args:
        worker: Its seat.
        mode: In which the script begins.
        patience: Seconds that servers may be in different modes or rounds.

    Attributes:
        declared: The present mode, with the settings that servers know.
        incarnation: Number of the life; 0: it has not begun.
        sequence: Last push or round of this life that all servers know.
        clock: Pushes since all workers last met.
        view: The last view of the members that any server has told of.
        first: In a mode with rounds the one from which on this life counts.
        progress: How far the script is, over all lives in this seat.
        meetings: How many meetings this life has come to.
        changes: How many changes of the mode are among them.
        turns: Changes between rounds and leases that this life has made.
    """

    def __init__(self, worker: int, mode: ConsistencyMode, patience: float = 60.0) -> None:
        self.worker = worker
        self._be_in(mode)
        self.incarnation = self.sequence = self.clock = self.view = 0
        self.first = 1
        self.progress = ScriptProgress()
        self.meetings = self.changes = self.turns = 0
        self._patience = patience
        self._met = 0  # meetings that were over when this life began
        self._switches = 0  # changes of the mode that the servers have made

    def validate(self) -> None:
        """Check what must always hold; for tests."""
        assert self.sequence >= 0 <= self.clock
        assert self.changes <= self.meetings
        assert not self.incarnation or self.first >= 1

    @property
    def mode(self) -> Mode:
        """The name of the present mode."""
        return cast(Mode, self.declared.name)

    def _be_in(self, mode: ConsistencyMode) -> None:
        self.declared = mode.agreed()

    @property
    def rests(self) -> bool:
        """Whether the others would wait for this worker while it waits for them at a meeting."""
        return self.declared.pulls_wait

    @property
    def passes(self) -> bool:
        """Whether the next meeting was over before this life began."""
        return self.meetings < self._met

    def saw(self, view: int) -> None:
        """A server has told of this view."""
        self.view = max(self.view, view)

    # -- beginning and end -----------------------------------------------------------------------

    def start(self) -> Program[None]:
        """Take the seat, and join in the mode in which the fleet is by now."""
        seat: SeatGranted = yield RegisterWorker()
        self.incarnation, self.view, self._met = seat.incarnation, seat.view, seat.met
        self.first = max(seat.first, 1)
        self.progress = ScriptProgress(seat.progress)
        yield from self._adopt(seat)
        if self.declared.has_rounds:  # the servers may have come further, in another mode
            self.sequence = max(self.first - 1, self.sequence)

    def _adopt(self, seat: SeatGranted) -> Program[None]:
        """Join in the same mode on every server.

        All workers may have met to change it, and none may have told the servers yet.
        """
        if seat.switches:
            self._be_in(seat.mode)
        # If they differ, the workers that make the change are on their way.
        what = "modes: a change was left half done"
        yield from self._join_equal(_mode_of, what, seat.switches, seat.last)

    def leave(self) -> Program[None]:
        """End this life in order."""
        yield Leave(self.worker, self.incarnation, self.sequence)

    # -- joining -----------------------------------------------------------------------------------

    def join(self, switch: int = 0, last: int = 0) -> Program[None]:
        """Go on after a rest; learns the last round.

        Args:
            switch: Number of the change of the mode that all workers have met for; 0: none.
            last: The highest push of any worker before it.
        """
        # If they differ, some servers are prepared for a view, and close rounds when they install it.
        yield from self._join_equal(attrgetter("sequence"), "rounds", switch, last)

    def _join_equal(
        self, said: Callable[[ServerJoined], object], what: str, switch: int, last: int
    ) -> Program[None]:
        """Join, again and again, until all servers say the same."""
        waited = 0.0
        while len(answers := {*map(said, (yield from self._join(switch, last)))}) > 1:
            if waited > self._patience:
                raise DeadlineExceeded(f"the servers are in different {what} ({answers})")
            yield Pause(_PAUSE)
            waited += _PAUSE

    def _join(self, switch: int, last: int) -> Program[list[ServerJoined]]:
        """Begin or go on on every server, in the mode that it says."""
        joined: list[ServerJoined] = yield Join(
            self.worker, self.incarnation, self.declared, switch, last
        )
        one = joined[0]
        self.sequence, self._switches = one.sequence, one.switches
        self._be_in(one.mode)
        self.clock = min(each.clock for each in joined)
        return joined

    def change_mode(self, mode: ConsistencyMode, last: int) -> Program[None]:
        """Go on in another mode. All workers have met with nothing under way, and all do this.

        A change that the fleet had behind it when this life began is passed over. `last` is the highest push
        of any worker before it.
        """
        self.changes += 1
        if self.changes > self._switches:
            had_rounds = self.declared.has_rounds
            self._be_in(mode)
            self.turns += self.declared.has_rounds != had_rounds
            yield from self.join(self.changes, last)

    # -- meetings ----------------------------------------------------------------------------------

    def meet(
        self, mode: str = "", value: object = None, reached: tuple[int, int] = (0, 0)
    ) -> Program[CollectiveResult]:
        """Come to the next meeting; nobody waits for this worker meanwhile.

        Every push of this life must be applied.

        Args:
            mode: How to combine `value`; "switch": all go on in another mode.
            value: What this worker brings; None: it is a barrier.
            reached: Leases of data used up, and samples of the next one.
        """
        passes, number = self.passes, self.meetings + 1
        if self.rests and not passes:
            yield Leave(self.worker, self.incarnation, self.sequence, rest=number)
        released: CollectiveResult = yield JoinCollective(
            number, mode, value, self.changes + 1, reached
        )
        self.meetings = number
        if not passes:
            self.clock = 0
        return released

    def pass_meetings(self, meetings: int, changes: int) -> None:
        """Those that the script's earlier life came to in a part that this life passes over."""
        self.meetings += meetings
        self.changes += changes


def _mode_of(joined: ServerJoined) -> tuple[ConsistencyMode, int]:
    return joined.mode, joined.switches
