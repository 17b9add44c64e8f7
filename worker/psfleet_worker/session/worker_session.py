"""Protocol of one worker process: joins the fleet, orders its pushes and pulls, takes part in collectives.

Everything here is a pure state machine, so that `tests/protocol` can run it with lost messages and killed
processes. An operation is a program: a generator that yields instructions
(`psfleet_worker.session.instructions`) and gets their results. `psfleet_worker.connection` makes the calls,
and `psfleet_worker.tensors.transfers` has the arrays.

- Session: the membership, the mode, and the numbers that servers and worker must agree on.
- Stream: the order of pushes and pulls, and where a snapshot cuts it.
- Collectives: barriers, all-reduces and mode switches. A worker flushes its stream before it arrives at one.

How a push becomes final depends on the mode:

    with rounds     push -> held by every server -> next pull or flush commits -> round closes
    other modes     push -> applied by each server as it comes; at most WINDOW pushes are unacknowledged

In modes without rounds a pull may be sent with the push before it, in one call per server. With rounds that
is possible with a single server only: a pull commits the round, and all servers must have the push by then.
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

_PAUSE = 0.05  # seconds before servers that disagree are asked again


WINDOW = 4
"""Maximum number of unacknowledged pushes in modes without rounds, not counting one that waits for a pull."""


class Session:
    """State of a worker process as a member of the fleet: registered with server 0, joined on every server.

    Args:
        patience: Seconds for which servers may be in different modes or rounds before that is an error.

    Attributes:
        declared: Present mode, with those settings that servers need.
        incarnation: Number that identifies this process as the worker's present one, or 0 before it is
            registered.
        sequence: Number of the last push of this process (of the last round, in a mode with rounds).
        clock: Number of pushes since the last collective.
        view: Newest view number (membership) that any server has reported.
        first: First round in which this process takes part. Used in modes with rounds.
        progress: Script position, over all processes of this worker.
        collectives: Number of collectives that this process has completed.
        changes: Number of mode switches among these collectives.
        turns: Number of switches between rounds and leases (ranges of samples handed out outside sync mode)
            that this process has made.
    """

    def __init__(self, worker: int, mode: ConsistencyMode, patience: float = 60.0) -> None:
        self.worker = worker
        self._be_in(mode)
        self.incarnation = self.sequence = self.clock = self.view = 0
        self.first = 1
        self.progress = ScriptProgress()
        self.collectives = self.changes = self.turns = 0
        self._patience = patience
        self._completed_before = (
            0  # number of collectives that were over when this incarnation began
        )
        self._switches = 0  # number of mode switches that the servers have made

    def validate(self) -> None:
        """Check the invariants, for tests."""
        assert self.sequence >= 0 <= self.clock
        assert self.changes <= self.collectives
        assert not self.incarnation or self.first >= 1

    def _be_in(self, mode: ConsistencyMode) -> None:
        self.declared = mode.agreed()

    @property
    def passes(self) -> bool:
        """True if the next collective was complete before this process began, and so returns at once."""
        return self.collectives < self._completed_before

    def saw(self, view: int) -> None:
        """Note the number of a view (the fleet's membership) that a server has reported, if it is newer."""
        self.view = max(self.view, view)

    def start(self) -> Program[None]:
        """Register with server 0, and then join every server. Server 0 says which consistency mode holds now.

        Like every Program here, it yields instructions, which the connection carries out.
        """
        seat: SeatGranted = yield RegisterWorker()
        self.incarnation, self.view = seat.incarnation, seat.view
        self._completed_before = seat.completed
        self.first = max(seat.first, 1)
        self.progress = ScriptProgress(seat.progress)
        yield from self._adopt(seat)
        # The servers report the sequence that a worker process has reached. They may have reached a later one
        # in another mode.
        if self.declared.has_rounds:
            self.sequence = max(self.first - 1, self.sequence)

    def _adopt(self, seat: SeatGranted) -> Program[None]:
        """Join every server after the registration, in the same mode on each.

        The coordinator may know a mode switch that no worker has brought to the servers yet. This process
        then brings it, with its Join.
        """
        if seat.switches:
            self._be_in(seat.mode)
        # Servers with another mode are about to learn of the switch from the other workers.
        difference = "modes: a change was left half done"
        yield from self._join_equal(
            attrgetter("mode", "switches"), difference, seat.switches, seat.last
        )

    def leave(self) -> Program[None]:
        """Report to every server that this process has finished its script."""
        yield Leave(self.worker, self.incarnation, self.sequence)

    def join(self, switch: int = 0, last: int = 0) -> Program[None]:
        """Become a member of rounds again, and learn the number of the last round.

        Call it after a rest: while this worker waited at a collective, rounds closed without it.

        Args:
            switch: Number of the mode switch that all workers have agreed on, or 0 if there is none.
            last: Highest push number of any worker at that switch.
        """
        # Servers in different rounds are frozen for a change of members. They close the missing rounds when
        # they install the new view.
        yield from self._join_equal(attrgetter("sequence"), "rounds", switch, last)

    def _join_equal(
        self, key: Callable[[ServerJoined], object], difference: str, switch: int, last: int
    ) -> Program[None]:
        """Join every server, and repeat that until `key` is the same for the replies of all servers."""
        seconds = 0.0
        while len(replies := {*map(key, (yield from self._join(switch, last)))}) > 1:
            if seconds > self._patience:
                raise DeadlineExceeded(f"the servers are in different {difference} ({replies})")
            yield Pause(_PAUSE)
            seconds += _PAUSE

    def _join(self, switch: int, last: int) -> Program[list[ServerJoined]]:
        """Join every server once, and adopt the mode, push number and clock that the servers report."""
        replies: list[ServerJoined] = yield Join(
            self.worker, self.incarnation, self.declared, switch, last
        )
        first = replies[0]
        self.sequence, self._switches = first.sequence, first.switches
        self._be_in(first.mode)
        self.clock = min(joined.clock for joined in replies)
        return replies

    def change_mode(self, mode: ConsistencyMode, last: int) -> Program[None]:
        """Continue in another mode. All workers call this at the same switch, with no push under way.

        Does nothing if the fleet had made the switch before this process began.

        Args:
            last: Highest push number of any worker at the switch.
        """
        self.changes += 1
        if self.changes > self._switches:
            had_rounds = self.declared.has_rounds
            self._be_in(mode)
            self.turns += self.declared.has_rounds != had_rounds
            yield from self.join(self.changes, last)

    def meet(
        self, mode: str = "", value: object = None, reached: tuple[int, int] = (0, 0)
    ) -> Program[CollectiveResult]:
        """Arrive at the next collective and wait for all workers. Every push of this process must be applied.

        Args:
            mode: Name of the reduction. "switch" means that all workers continue in another mode.
            value: Value of this worker, or None at a barrier.
            reached: Position in the data: number of leases (ranges of samples) that are used up, and number
                of samples used of the next lease.
        """
        passes, number = self.passes, self.collectives + 1
        # In such a mode, pulls of other workers wait for pushes of this one and would never end. So the
        # worker first rests: it tells every server not to wait for it.
        if self.declared.pulls_wait and not passes:
            yield Leave(self.worker, self.incarnation, self.sequence, rest=number)
        result: CollectiveResult = yield JoinCollective(
            number, mode, value, self.changes + 1, reached
        )
        self.collectives = number
        if not passes:
            self.clock = 0
        return result

    def pass_collectives(self, collectives: int, changes: int) -> None:
        """Count the collectives and mode switches in a part of the script that this process skips.

        An earlier process of this worker has run that part. Collectives are numbered for the whole fleet, so
        they count for this process too.
        """
        self.collectives += collectives
        self.changes += changes


_ARRIVE, _LAND = AwaitReads(joined=True), AwaitReads()
_SETTLE, _FLUSH = AwaitPushes(), AwaitPushes(leaves=True)
_WINDOW_FREE, _READ_AHEAD = AwaitPushes(WINDOW - 1), SendPull(ahead=True)


class Stream:
    """Order of one worker process's pushes and pulls. A program that raises an error has changed nothing.

    In a mode without waiting pulls, a push goes only to the servers that hold one of its tables, and to
    server 0. Two additions make that safe:

    - The push contains the number of pushes before it that were not sent to this server, so that the server
      can distinguish them from lost ones.
    - Server 0 learns which servers get the push. If the worker dies after it has sent the push to some of
      them only, server 0 knows the last push that each server should have.

    Attributes:
        open: Number of the round that is pushed but not committed yet (servers may not close it), or 0.
        cut: A pair: the number of the last snapshot that this worker has marked, and the worker's last push
            in that snapshot.
        last_snapshot: Number of the last snapshot that server 0 has requested.
    """

    def __init__(self, session: Session) -> None:
        self.open = 0
        self.cut = (0, 0)
        self._session = session
        # A push begins when it has a number, and counts in `session.sequence` once it has left. A snapshot
        # that cuts the stream between the two must include the push, so the cut uses `_begun`.
        self._begun = 0
        self.last_snapshot = 0
        self._left = False  # pushes may be unacknowledged
        self._ahead = False  # a prefetched pull may be under way
        self._overtaken = False  # a push was made after that pull
        self._addressed: tuple[
            int, ...
        ] = ()  # last push sent to each server; empty if all went to all
        self._begun_to: tuple[int, ...] = ()  # the same, with the push that has begun

    def validate(self) -> None:
        """Check the invariants, for tests."""
        assert not self.open or self._session.declared.has_rounds
        assert self.cut[1] <= max(self._begun, self._session.sequence)

    def begin(self) -> None:
        """Start the stream, once the session has joined.

        With rounds, the first pull waits for the round before this process's first round.
        """
        if self._session.declared.has_rounds:
            self.open = self._session.sequence

    def reroute(self) -> None:
        """Start over with another number of servers.

        No call is under way, and all servers know all pushes.
        """
        self._addressed = self._begun_to = ()

    @property
    def reads_ahead(self) -> bool:
        """True if the mode allows that a prefetched pull reads values before earlier pushes are applied."""
        return self._session.declared.reads_ahead

    def pull(self, own: bool = True) -> Program[Any]:
        """Pull. In a mode with rounds, also commit the worker's pushed round, so that servers may close it.

        Returns the values after that round has closed.

        Args:
            own: True to read the values that the caller wants. False only waits for the round; the caller
                must have waited for all pushes before.
        """
        if self._ahead:
            yield from self._arrive()
        session = self._session
        # The pull commits the round at every server, so every server must hold the push before.
        if own and session.declared.has_rounds:
            yield _SETTLE
        read = yield SendPull(self.open, own=own)
        session.view = max(session.view, read.view)
        self.open = 0
        if self._left:
            yield _SETTLE
            self._left = False
        return read

    def pull_ahead(self) -> Program[Any]:
        """Start a prefetched pull and return at once. An earlier prefetched pull is awaited first."""
        if self._ahead:
            self._session.saw((yield _LAND))
        read = yield _READ_AHEAD
        self._ahead, self._overtaken = True, False
        return read

    def _arrive(self) -> Program[None]:
        """Wait for the prefetched pull, and let its values be joined to arrays."""
        if self._ahead:
            self._session.saw((yield _ARRIVE))
            self._ahead = self._overtaken = False

    def push(self) -> Program[Any]:
        """Send a step's gradients. At most WINDOW pushes are unacknowledged in modes without rounds.

        Returns:
            The result of SendPush: the handle of the push.
        """
        # The order matters: the session counts the push only after SendPush has succeeded. A push that fails
        # in LayOutPush or SendPush has then used no number, and the next one takes its place.
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
        """Wait until every push is applied. With rounds, this waits until the last round has closed."""
        yield from self._arrive()
        yield _FLUSH
        if self.open:
            yield from self.pull(own=False)

    def hears(self, number: int) -> bool:
        """Return whether a snapshot that server 0 requests is new. If so, run `mark` in another thread."""
        if number <= self.last_snapshot:
            return False
        self.last_snapshot = number
        return True

    def mark(self, number: int) -> Program[None]:
        """Take part in a snapshot: report to all servers the last push of this worker that belongs to it.

        Later pushes contain the mark too. A server learns the last push from the mark or from such a push,
        depending on which arrives first. So the server never applies a later push unawares.
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
    """Collectives of one worker process: apply its pushes, wait for all workers, and join rounds again.

    Args:
        position: Returns the position in the data: number of leases (ranges of samples) that are used up, and
            number of samples used of the next lease.
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
        """Wait for all workers at a barrier or all-reduce. Rounds close without this worker meanwhile.

        Args:
            mode: Reduction of the values: "sum", "max" or "min".
            value: Value of this worker, or None at a barrier.
        """
        passes = self._session.passes
        result = yield from self._meet(mode, value)
        yield from self._come_back(passes)
        return result

    def set_mode(self, mode: ConsistencyMode) -> Program[None]:
        """Continue in another mode. Every worker must call this at the same point, between two steps.

        Raises:
            ConfigError: The workers request different modes. The mode is unchanged.
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
        """Become a member of rounds again, if rounds have closed without this worker during the collective.

        Args:
            passes: True if the collective was complete before this process began, so that this worker has
                not waited for it.
        """
        if self._session.declared.has_rounds and not passes:
            yield from self._session.join()


def _words(mode: ConsistencyMode) -> str:
    settings = "".join(f" with {name} {value}" for name, value in mode.agreed_settings.items())
    return f"mode {mode.name!r}{settings}"
