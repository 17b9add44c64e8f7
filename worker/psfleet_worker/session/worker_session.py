"""One incarnation of a worker in its fleet: its seat, the servers it has joined, the collectives it has come
to.

Pure: its programs yield what is to be asked of the fleet and change the session by the answers.
"""

from collections.abc import Callable
from operator import attrgetter

from psfleet.consistency import ConsistencyMode
from psfleet.errors import DeadlineExceeded
from psfleet.runtime.worker_state import ScriptProgress
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

_PAUSE = 0.05  # seconds between two looks whether the servers agree


class Session:
    """A worker's incarnation: registered with server 0, joined on every server.

    Args:
        mode: In which the script begins.
        patience: Seconds that servers may be in different modes or rounds.

    Attributes:
        declared: The present mode, with the settings that servers know.
        incarnation: Number of the incarnation; 0: it has not begun.
        sequence: Last push or round of this incarnation that all servers know.
        clock: Number of pushes since the last collective.
        view: Newest view of the members that any server has reported.
        first: In a mode with rounds the one from which on this incarnation counts.
        progress: Script position, over all incarnations in this seat.
        collectives: Number of collectives of this incarnation so far.
        changes: Number of mode switches among them.
        turns: Changes between rounds and leases that this incarnation has made.
    """

    def __init__(self, worker: int, mode: ConsistencyMode, patience: float = 60.0) -> None:
        self.worker = worker
        self._be_in(mode)
        self.incarnation = self.sequence = self.clock = self.view = 0
        self.first = 1
        self.progress = ScriptProgress()
        self.collectives = self.changes = self.turns = 0
        self._patience = patience
        self._completed_before = 0  # collectives that were over when this incarnation began
        self._switches = 0  # changes of the mode that the servers have made

    def validate(self) -> None:
        """Check what must always hold; for tests."""
        assert self.sequence >= 0 <= self.clock
        assert self.changes <= self.collectives
        assert not self.incarnation or self.first >= 1

    def _be_in(self, mode: ConsistencyMode) -> None:
        self.declared = mode.agreed()

    @property
    def passes(self) -> bool:
        """The next collective was over before this incarnation began."""
        return self.collectives < self._completed_before

    def saw(self, view: int) -> None:
        """Note a view that a server has reported."""
        self.view = max(self.view, view)

    # -- beginning and end -----------------------------------------------------------------------

    def start(self) -> Program[None]:
        """Take the seat, and join in the mode in which the fleet is by now."""
        seat: SeatGranted = yield RegisterWorker()
        self.incarnation, self.view = seat.incarnation, seat.view
        self._completed_before = seat.completed
        self.first = max(seat.first, 1)
        self.progress = ScriptProgress(seat.progress)
        yield from self._adopt(seat)
        if self.declared.has_rounds:  # the servers may have come further, in another mode
            self.sequence = max(self.first - 1, self.sequence)

    def _adopt(self, seat: SeatGranted) -> Program[None]:
        """Join in the same mode on every server.

        All workers may have agreed to change it, and none may have sent that to the servers yet.
        """
        if seat.switches:
            self._be_in(seat.mode)
        # If they differ, the workers that make the change are on their way.
        what = "modes: a change was left half done"
        yield from self._join_equal(attrgetter("mode", "switches"), what, seat.switches, seat.last)

    def leave(self) -> Program[None]:
        """End this incarnation in order."""
        yield Leave(self.worker, self.incarnation, self.sequence)

    # -- joining -----------------------------------------------------------------------------------

    def join(self, switch: int = 0, last: int = 0) -> Program[None]:
        """Go on after a rest; learns the last round.

        Args:
            switch: Number of the mode switch that all workers have agreed on; 0: none.
            last: The highest push of any worker before it.
        """
        # If they differ, some servers are prepared for a view, and close rounds when they install it.
        yield from self._join_equal(attrgetter("sequence"), "rounds", switch, last)

    def _join_equal(
        self, key: Callable[[ServerJoined], object], what: str, switch: int, last: int
    ) -> Program[None]:
        """Join, again and again, until all servers say the same."""
        seconds = 0.0
        while len(replies := {*map(key, (yield from self._join(switch, last)))}) > 1:
            if seconds > self._patience:
                raise DeadlineExceeded(f"the servers are in different {what} ({replies})")
            yield Pause(_PAUSE)
            seconds += _PAUSE

    def _join(self, switch: int, last: int) -> Program[list[ServerJoined]]:
        """Begin or continue on every server, in the mode that it reports."""
        replies: list[ServerJoined] = yield Join(
            self.worker, self.incarnation, self.declared, switch, last
        )
        one = replies[0]
        self.sequence, self._switches = one.sequence, one.switches
        self._be_in(one.mode)
        self.clock = min(each.clock for each in replies)
        return replies

    def change_mode(self, mode: ConsistencyMode, last: int) -> Program[None]:
        """Continue in another mode. All workers are at the switch with nothing under way, and all do this.

        A change that the fleet had behind it when this incarnation began is passed over. `last` is the
        highest push of any worker before it.
        """
        self.changes += 1
        if self.changes > self._switches:
            had_rounds = self.declared.has_rounds
            self._be_in(mode)
            self.turns += self.declared.has_rounds != had_rounds
            yield from self.join(self.changes, last)

    # -- collectives ----------------------------------------------------------------------------------

    def meet(
        self, mode: str = "", value: object = None, reached: tuple[int, int] = (0, 0)
    ) -> Program[CollectiveResult]:
        """Come to the next collective; no worker waits for this one's pushes meanwhile.

        Every push of this incarnation must be applied.

        Args:
            mode: Reduction of the values; "switch": all go on in another mode.
            value: Value of this worker; None: it is a barrier.
            reached: Leases of data used up, and samples of the next one.
        """
        passes, number = self.passes, self.collectives + 1
        if self.declared.pulls_wait and not passes:  # the others would wait for this worker
            yield Leave(self.worker, self.incarnation, self.sequence, rest=number)
        result: CollectiveResult = yield JoinCollective(
            number, mode, value, self.changes + 1, reached
        )
        self.collectives = number
        if not passes:
            self.clock = 0
        return result

    def pass_collectives(self, collectives: int, changes: int) -> None:
        """Count those in a part of the script that an earlier incarnation ran and this one passes over."""
        self.collectives += collectives
        self.changes += changes
