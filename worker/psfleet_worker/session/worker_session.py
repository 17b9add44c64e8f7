"""One incarnation of a worker in its fleet: its seat and servers, its stream of pushes, its collectives.

Pure: programs yield what is to be asked of the fleet, and change the session by the answers. The arrays are
with whoever runs them (`psfleet_worker.tensors.transfers`).

Pushes: in a mode with rounds every server holds a push; the next pull or flush commits it and waits for the
round to close. In other modes pushes leave in order, a few at a time; a pull comes after the pushes before
it, and takes the last one with it. So it does in rounds where there is one server: what that holds every
server holds. Snapshots cut the stream between two pushes.

Collectives: who comes to one has flushed its stream before.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from numpy.typing import NDArray

from psfleet.core.base.errors import ConfigError, DeadlineExceeded
from psfleet.core.engine.consistency import ConsistencyMode
from psfleet.core.engine.shard.events import Join, Leave, MarkCut
from psfleet.core.engine.worker_state import ScriptProgress
from psfleet.core.net.membership_messages import read_change, write_change
from psfleet_worker.session.instructions import (
    AwaitMarking,
    AwaitPushes,
    AwaitReads,
    CollectiveResult,
    CutStream,
    JoinCollective,
    LayOutPush,
    Pause,
    Program,
    RegisterWorker,
    ReportState,
    SeatGranted,
    SendPull,
    SendPush,
    ServerJoined,
)

_PAUSE = 0.05  # seconds between two looks whether the servers agree


WINDOW = 4
"""Pushes under way at most, in modes without rounds, beside the one that last waited for company."""


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


_ARRIVE, _LAND = AwaitReads(joined=True), AwaitReads()
_SETTLE, _FLUSH = AwaitPushes(), AwaitPushes(leaves=True)
_WINDOW_FREE, _READ_AHEAD = AwaitPushes(WINDOW - 1), SendPull(ahead=True)


class Stream:
    """The stream of one incarnation. A program that ends with an error has changed nothing.

    Where no pull waits for other workers, a push is sent only to servers that hold one of its tables, and to
    server 0. It says how many pushes before it a server has not been sent, so that the server can tell them
    from lost ones. Server 0 learns which servers get it, in case that this incarnation ends between two
    servers.

    Attributes:
        open: The round that is pushed and not committed; 0: none.
        cut: The last snapshot that is marked, and the last push in it.
        last_snapshot: The last snapshot that is wanted.
    """

    def __init__(self, session: Session) -> None:
        self.open = 0
        self.cut = (0, 0)
        self._session = session
        self._begun = 0  # the last push that has got its number
        self.last_snapshot = 0
        self._left = False  # a push has left since all before it were acknowledged, or is about to
        self._ahead = False  # something is read ahead that may be under way
        self._overtaken = False  # and a push has been made after it
        self._addressed: tuple[int, ...] = ()  # by server the last push that was sent to it
        self._begun_to: tuple[int, ...] = ()  # likewise, of those that have got their number

    def validate(self) -> None:
        """Check what must always hold; for tests."""
        assert not self.open or self._session.declared.has_rounds
        assert self.cut[1] <= max(self._begun, self._session.sequence)

    def begin(self) -> None:
        """The incarnation has begun: the round before its first is the one to wait for, if there are
        rounds."""
        if self._session.declared.has_rounds:
            self.open = self._session.sequence

    def reroute(self) -> None:
        """Begin with another number of servers, with nothing under way: all of them know all pushes."""
        self._addressed = self._begun_to = ()

    # -- pulls -------------------------------------------------------------------------------------

    @property
    def reads_ahead(self) -> bool:
        """A pull may overtake a push: not where pulls wait for other workers."""
        return self._session.declared.reads_ahead

    def pull(self, own: bool = True) -> Program[Any]:
        """Read; what is there when the open round has closed, if there is one.

        `own`: Read what the caller wants; else only wait for the round, with all pushes settled.
        """
        if self._ahead:
            yield from self._arrive()
        session = self._session
        if own and session.declared.has_rounds:  # a pull commits what every server holds
            yield _SETTLE
        read = yield SendPull(self.open, own=own)
        session.view = max(session.view, read.view)
        self.open = 0
        if self._left:
            yield _SETTLE
            self._left = False
        return read

    def pull_ahead(self) -> Program[Any]:
        """Begin to read. What was read ahead before is answered first: at most one is under way."""
        if self._ahead:
            self._session.saw((yield _LAND))
        read = yield _READ_AHEAD
        self._ahead, self._overtaken = True, False
        return read

    def _arrive(self) -> Program[None]:
        """Wait until all that was read ahead is here."""
        if self._ahead:
            self._session.saw((yield _ARRIVE))
            self._ahead = self._overtaken = False

    # -- pushes ------------------------------------------------------------------------------------

    def push(self) -> Program[Any]:
        """Send a step's gradients, a few pushes ahead of their acknowledgements.

        Returns:
            What the instruction to send is answered with.
        """
        session = self._session
        if self.open:
            yield from self.flush()
        if self._overtaken:
            yield from self._arrive()
        if self._left:
            yield _WINDOW_FREE
        sequence, clock = session.sequence + 1, session.clock + 1
        is_held = session.declared.has_rounds
        goes_to: Sequence[bool] = yield LayOutPush(sequence, clock)
        before = self._addressed or (sequence - 1,) * len(goes_to)
        addressed = (sequence,) * len(goes_to)
        if not all(goes_to):
            addressed = tuple(
                sequence if to_it else last for to_it, last in zip(goes_to, before, strict=True)
            )
        self._begun, self._begun_to = sequence, addressed
        lingers = not is_held or len(goes_to) == 1
        ticket = yield SendPush(
            sequence, self.cut, lingers, is_held, self._ahead, before, addressed
        )
        self._addressed = addressed
        self._overtaken, self._left = self._ahead, True
        session.sequence, session.clock = sequence, clock
        session.progress.made()
        self.open = sequence if is_held else 0
        return ticket

    def flush(self) -> Program[None]:
        """Wait until the last push is in a closed round, or applied."""
        yield from self._arrive()
        yield _FLUSH
        if self.open:
            yield from self.pull(own=False)

    # -- snapshots ---------------------------------------------------------------------------------

    def hears(self, number: int) -> bool:
        """Return whether a snapshot that server 0 requests is new; then run `mark`, beside the script."""
        if number <= self.last_snapshot:
            return False
        self.last_snapshot = number
        return True

    def mark(self, number: int) -> Program[None]:
        """Take part in a snapshot: mark the last push that has begun, on all servers.

        Pushes that follow carry the cut, so that a server knows it from whichever comes first.
        """
        session = self._session
        marks, last = yield AwaitMarking(number)
        if marks:
            last = max(self._begun, session.sequence)
            self.cut = number, last
            cut = MarkCut(number, session.worker, session.incarnation, last)
            yield CutStream(cut, self._begun_to)
        yield ReportState(number, last)


class Collectives:
    """The collectives of one incarnation.

    Args:
        position: Position of the incarnation in its data: leases used up, and samples of the next one.
    """

    def __init__(
        self, session: Session, stream: Stream, position: Callable[[], tuple[int, int]]
    ) -> None:
        self._session = session
        self._stream = stream
        self._position = position

    def gather(
        self, mode: str = "", value: NDArray[Any] | None = None
    ) -> Program[CollectiveResult]:
        """Meet all workers. Rounds of the others go on without this one meanwhile.

        Args:
            mode: Reduction of the values: sum, max or min.
            value: Value of this worker; None: it is a barrier.
        """
        passes = self._session.passes
        result = yield from self._meet(mode, value)
        yield from self._come_back(passes)
        return result

    def set_mode(self, mode: ConsistencyMode) -> Program[None]:
        """Go on in another mode; every worker must come here between two of its steps.

        Raises:
            ConfigError: The workers want different things; nothing was changed.
        """
        yield from self._stream.flush()
        session = self._session
        passes = session.passes
        change = write_change(mode, session.sequence)
        common, last = read_change((yield from self._meet("switch", change)).value)
        if common is None:
            yield from self._come_back(passes)
            raise ConfigError(
                f"worker {session.worker} asks for {_words(mode)} and another worker for something else; "
                "let all of them ask for the same"
            )
        yield from session.change_mode(common, last)

    def _meet(self, mode: str, value: NDArray[Any] | None) -> Program[CollectiveResult]:
        yield from self._stream.flush()
        return (yield from self._session.meet(mode, value, self._position()))

    def _come_back(self, passes: bool) -> Program[None]:
        """Be a member of rounds again, unless the collective was over before this incarnation began."""
        if self._session.declared.has_rounds and not passes:
            yield from self._session.join()


def _words(mode: ConsistencyMode) -> str:
    settings = "".join(f" with {name} {value}" for name, value in mode.agreed_settings.items())
    return f"mode {mode.name!r}{settings}"
