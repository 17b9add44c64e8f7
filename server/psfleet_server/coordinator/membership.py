"""Membership of the fleet: seats, their incarnations, and changes decided from all servers' reports.

See docs/protocol.md. Pure: the reports come in, the next roster comes out.
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
    """Roster of the fleet: its seats, and the number of the view that was decided last.

    Attributes:
        seats: Seats by number. The first ones are those that the fleet was started for.
        incarnations: Number of incarnations so far.
        view: Number of the last decided view: the coordinator's starts, then its changes.
        closed: Highest closed round that was reported for that view.
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
            PsfleetError: It cannot have the seat.
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
        """Be what the change leads to.

        Args:
            change: With the reports of all servers.
            completed: Number of completed collectives.
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
        lowest = min(report.closed for report in reports)
        for seat in self.seats.values():
            seat.incarnations = [
                incarnation
                for incarnation in seat.incarnations
                if incarnation.last is None or incarnation.last > lowest
            ]

    def _note(self, index: int, seat: Seat, reports: list[ViewReport]) -> None:
        """Take over what an incarnation reported to some servers only; it holds for all."""
        own = [report for report in reports if report.incarnations.get(index) == seat.incarnation]
        if seat.incarnation:
            seat.left = seat.left or any(index in report.left for report in own)
            seat.rests = max([seat.rests, *(report.rests.get(index, 0) for report in own)])

    def _end(self, seat: Seat, index: int, reports: list[ViewReport]) -> None:
        """The present incarnation counts up to the last round that every server holds of it."""
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
        """A process takes the seat: from the round after its predecessor's last, if none is missed.

        That is only so if the predecessor was there until now (`follows`): what a removed seat had
        to do has been given to others. A predecessor that has left every server is done with its script
        (`over`), and this one begins anew; one that died while it left had nothing else to do.
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
    own = [report for report in reports if report.incarnations.get(index) == incarnation]
    ahead = max(
        own,
        key=lambda report: (report.committed.get(index, 0), report.sequences.get(index, 0)),
        default=None,
    )
    return ahead.progress.get(index, "") if ahead is not None else ""
