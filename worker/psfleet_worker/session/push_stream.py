"""One worker's stream of pushes, and the pulls between them: what gets which number and waits for what.

In a mode with rounds every server holds a push; the next pull or flush commits it and waits for the round to
close. In other modes pushes leave in order, a few at a time; a pull comes after the pushes before it,
and takes the last one with it. So it does in rounds where there is one server: what that holds every server
holds. Snapshots cut the stream between two pushes.

Pure: its programs say what is to be done; the arrays are with whoever runs them
(`psfleet_worker.stream.transfers`).
"""

from collections.abc import Sequence
from typing import Any

from psfleet.shard.events import MarkCut
from psfleet_worker.session.instructions import (
    AwaitMarking,
    AwaitPushes,
    AwaitReads,
    CutStream,
    LayOutPush,
    Program,
    ReportState,
    SendPull,
    SendPush,
)
from psfleet_worker.session.worker_session import Session

WINDOW = 4
"""Pushes under way at most, in modes without rounds, beside the one that last waited for company."""

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
