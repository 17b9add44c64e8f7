"""Membership of the fleet: seats, their incarnations, and how the next view follows from servers' reports.

A worker process may have reported to some servers only before it died. So a change first freezes all servers,
and `Membership.decide` combines their reports: which pushes of an ended incarnation count, and from which
round on its successor does. docs/protocol.md has the rules. Pure: reports in, the next membership out.
"""

from dataclasses import dataclass, field

from psfleet.core.base.errors import ConfigError, Fenced
from psfleet.core.engine.consistency import find_mode
from psfleet.core.engine.round_plan import LOOKAHEAD
from psfleet.core.engine.shard.membership_view import (
    Incarnation,
    InstallView,
    SeatView,
    ViewReport,
    member,
)

_MOST_SEATS = 1 << 16


@dataclass
class Seat:
    """Seat of one worker, which several processes may take in turn.

    Attributes:
        boot: Number of the process in the seat, or 0 if none has come yet.
        earlier: Processes that had the seat before.
        incarnations: Rounds of the seat's incarnations, the present one last. A seat without a present
            incarnation is removed.
        left: True if the present incarnation has left in order.
        rests: Number of collectives for which the present incarnation no longer has to rest.
        progress: Loop position that the last incarnation reported when it ended. Empty means that the next
            incarnation starts from the beginning.
    """

    boot: int = 0
    earlier: set[int] = field(default_factory=set)
    incarnations: list[Incarnation] = field(default_factory=lambda: [Incarnation(0)])
    left: bool = False
    rests: int = 0
    progress: str = ""

    @property
    def present(self) -> Incarnation | None:
        """The present incarnation, which may have no process yet, or None if the seat is removed."""
        return (
            self.incarnations[-1]
            if self.incarnations and self.incarnations[-1].last is None
            else None
        )

    @property
    def incarnation(self) -> int:
        """Number of the present incarnation, or 0 if no process has the seat."""
        return self.present.incarnation if self.present is not None else 0


@dataclass
class ViewChange:
    """A change of the view that is under way: servers are freezing.

    Attributes:
        joining: By seat the process that takes it.
        removed: Seats that are removed unless a new process takes them.
        ended: By seat the incarnation that ends.
        reports: Reports of the servers that are frozen.
    """

    view: int
    joining: dict[int, int]
    removed: set[int]
    ended: dict[int, int]
    reports: dict[int, ViewReport] = field(default_factory=dict)


@dataclass
class Membership:
    """Seats of the fleet, and the number of the view that was decided last.

    Attributes:
        seats: Seats by number. The first ones are those that the fleet was started for.
        incarnations: Number of incarnations so far.
        view: Number of the last decided view (`Coordinator`: the term, then the changes within it).
        closed: Highest closed round that a server reported for that view.
        sync: True if the fleet trains in rounds.
    """

    seats: dict[int, Seat]
    incarnations: int = 0
    view: int = 0
    closed: int = 0
    sync: bool = False

    def __post_init__(self) -> None:
        self._present: tuple[int, ...] | None = None  # computed again after a change

    def present(self) -> tuple[int, ...]:
        """Seats that are not removed and have not left, taken or not, in order."""
        if self._present is None:
            self._present = tuple(
                sorted(
                    index
                    for index, seat in self.seats.items()
                    if seat.present is not None and not seat.left
                )
            )
        return self._present

    def leave(self, index: int) -> None:
        """Note that the seat's present incarnation has left in order."""
        self.seats[index].left = True
        self._present = None

    def first_rounds(self) -> dict[int, int]:
        """Return by seat the first round or push of the present incarnation."""
        incarnations = {index: self.seats[index].present for index in self.present()}
        return {
            index: incarnation.first
            for index, incarnation in incarnations.items()
            if incarnation is not None
        }

    def seat_for(self, worker: int, boot: int, workers: int, seats: int) -> Seat | None:
        """Return the seat that a process wants, or None if that seat is a new one.

        Args:
            worker: Number of the seat.
            boot: Number of the process.
            workers: Number of workers for which the process was started.
            seats: Number of workers that the servers were started for.

        Raises:
            ConfigError: The fleet has no such seat, or was started for another number of workers.
            Fenced: A later process has taken the seat.
        """
        if not 0 <= worker < min(max(workers, seats), _MOST_SEATS):
            raise ConfigError(f"worker {worker} is unknown; the fleet has workers 0 to {seats - 1}")
        if worker < seats != workers:
            raise ConfigError(
                f"worker {worker} was started for {workers} workers, "
                f"the servers were started for {seats}"
            )
        seat = self.seats.get(worker)
        if seat is not None and boot in seat.earlier:
            raise Fenced(f"a later process has taken the seat of worker {worker}")
        return seat

    def counts_in(self, index: int, number: int) -> bool:
        """Return whether a seat is a member of a round."""
        seat = self.seats.get(index)
        return seat is not None and member(seat.incarnations, number) is not None

    def decide(self, change: ViewChange, collectives: int) -> None:
        """Apply a change for which every server has reported.

        Args:
            change: The change, with the reports of all servers.
            collectives: Number of completed collectives, at which new incarnations do not rest.
        """
        reports = list(change.reports.values())
        self._present = None
        self.view = change.view
        self.closed = max(report.closed for report in reports)
        self.sync = any(find_mode(report.mode).has_rounds for report in reports)
        for index, seat in self.seats.items():
            self._note(index, seat, reports)
        vacant = {index for index, seat in self.seats.items() if seat.present is None}
        for index in sorted(change.removed | change.joining.keys()):
            if index in self.seats:
                self._end(self.seats[index], index, reports)
        over = frozenset.intersection(*(report.left for report in reports))
        for index, boot in change.joining.items():
            seat = self.seats.setdefault(index, Seat(incarnations=[]))
            self._begin(seat, boot, collectives, follows=index not in vacant, over=index in over)
        # A server that is behind still closes rounds from `lowest` on, and needs to know who was a member of
        # them. Incarnations that ended before are no longer needed.
        lowest = min(report.closed for report in reports)
        for seat in self.seats.values():
            seat.incarnations = [
                incarnation
                for incarnation in seat.incarnations
                if incarnation.last is None or incarnation.last > lowest
            ]

    def _note(self, index: int, seat: Seat, reports: list[ViewReport]) -> None:
        """Note that an incarnation has left or rested, even if it told only some of the servers."""
        own_reports = [
            report for report in reports if report.incarnations.get(index) == seat.incarnation
        ]
        if seat.incarnation:
            seat.left = seat.left or any(index in report.left for report in own_reports)
            seat.rests = max([seat.rests, *(report.rests.get(index, 0) for report in own_reports)])

    def _end(self, seat: Seat, index: int, reports: list[ViewReport]) -> None:
        """End the present incarnation of a seat, with the last push that any server knows to be committed.

        A worker commits a push only when every server holds it, so every server can close that round.
        """
        incarnation = seat.present
        if incarnation is None:
            return
        seat.progress = _furthest(index, incarnation.incarnation, reports) or seat.progress
        lasts = [
            report.last_of(report.committed, index, incarnation.incarnation) for report in reports
        ]
        last = (
            max(incarnation.first - 1, *lasts) if incarnation.incarnation else incarnation.first - 1
        )
        seat.incarnations[-1] = Incarnation(incarnation.incarnation, incarnation.first, last)
        seat.earlier.add(seat.boot)

    def _begin(self, seat: Seat, boot: int, collectives: int, *, follows: bool, over: bool) -> None:
        """Begin an incarnation in a seat, if possible in the round after its predecessor's last one.

        If that round has closed without the seat, or the samples of the seat were given to other workers, a
        new incarnation in sync mode counts only from the first round whose plan is not final yet.

        Args:
            seat: The seat.
            boot: Number of the process.
            collectives: Number of completed collectives.
            follows: The seat was not removed before this change, so its samples are still its own.
            over: The predecessor has left every server and is done with its script, so the new incarnation
                starts from the beginning. A predecessor that died while it was leaving had nothing else to
                do, so its position stays.
        """
        self.incarnations += 1
        last = seat.incarnations[-1].last if seat.incarnations and follows else None
        first = 1
        if last is not None and self.closed <= last and not seat.left:
            first = last + 1
        elif self.sync:
            first = self.closed + LOOKAHEAD + 1
        seat.incarnations.append(Incarnation(self.incarnations, first))
        if over:
            seat.progress = ""
        seat.boot, seat.left, seat.rests = boot, False, collectives

    def install(self) -> InstallView:
        """Return the instruction that installs this membership on servers."""
        return InstallView(
            self.view,
            {
                index: SeatView(tuple(seat.incarnations), seat.rests, seat.left)
                for index, seat in sorted(self.seats.items())
                if seat.incarnations
            },
            self.closed if self.sync else 0,
        )


def _furthest(index: int, incarnation: int, reports: list[ViewReport]) -> str:
    """Return the script position of the incarnation's last push that counts, or empty if none came."""
    own_reports = [report for report in reports if report.incarnations.get(index) == incarnation]
    ahead = max(
        own_reports,
        key=lambda report: (report.committed.get(index, 0), report.sequences.get(index, 0)),
        default=None,
    )
    return ahead.progress.get(index, "") if ahead is not None else ""
