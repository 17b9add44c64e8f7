"""Who is in the fleet: seats, their lives, and how a change is decided from all servers' reports.

See docs/protocol.md. Pure: the reports come in, the next roster comes out.
"""

from dataclasses import dataclass, field

from psfleet.consistency import find_mode
from psfleet.data.assignment import LOOKAHEAD
from psfleet.shard.membership_view import Incarnation, InstallView, SeatView, ViewReport, member

__all__ = ["Membership", "Seat", "ViewChange"]


@dataclass
class Seat:
    """One worker's seat.

    Attributes:
        boot: Number of the process that sits in it; 0: nobody has yet.
        earlier: Processes that sat in it before.
        lives: The rounds of its lives, the present one last; without a present one it is removed.
        left: The present life has left in order.
        rests: Meetings for which the present life need not rest any more.
        progress: How far the seat's script was when its last life ended, as that has said; empty: its next
            life has nothing behind it.
    """

    boot: int = 0
    earlier: set[int] = field(default_factory=set)
    lives: list[Incarnation] = field(default_factory=lambda: [Incarnation(0)])
    left: bool = False
    rests: int = 0
    progress: str = ""

    @property
    def life(self) -> Incarnation | None:
        """The present incarnation, perhaps of no process; None: the seat is removed."""
        return self.lives[-1] if self.lives and self.lives[-1].last is None else None

    @property
    def incarnation(self) -> int:
        """Number of the present incarnation; 0: no process has the seat."""
        return self.life.incarnation if self.life is not None else 0


@dataclass
class ViewChange:
    """A change of the view that is under way: servers are freezing.

    Attributes:
        joining: By seat the process that takes it.
        removed: Seats that are removed, unless somebody takes them.
        ended: By seat the life that ends.
        reports: Of the servers that are frozen.
    """

    view: int
    joining: dict[int, int]
    removed: set[int]
    ended: dict[int, int]
    reports: dict[int, ViewReport] = field(default_factory=dict)


@dataclass
class Membership:
    """The roster.

    Attributes:
        seats: By number; the first ones are those that the fleet was started for.
        lives: How many lives there have been.
        view: Number of the last decided view: the coordinator's starts, then its changes.
        closed: Highest closed round that was reported for it.
        sync: Whether rounds are what counts.
    """

    seats: dict[int, Seat]
    lives: int = 0
    view: int = 0
    closed: int = 0
    sync: bool = False

    def present(self) -> list[int]:
        """Seats that are not removed and have not left, taken or not."""
        return sorted(
            index for index, seat in self.seats.items() if seat.life is not None and not seat.left
        )

    def first_rounds(self) -> dict[int, int]:
        """By seat the first round or push of its life, of those who are present."""
        lives = {index: self.seats[index].life for index in self.present()}
        return {index: life.first for index, life in lives.items() if life is not None}

    def counts_in(self, index: int, number: int) -> bool:
        """Whether a seat is a member of a round."""
        seat = self.seats.get(index)
        return seat is not None and member(seat.lives, number) is not None

    def decide(self, change: ViewChange, met: int) -> None:
        """Be what the change leads to.

        Args:
            change: With the reports of all servers.
            met: How many meetings are over.
        """
        reports = list(change.reports.values())
        self.view = change.view
        self.closed = max(report.closed for report in reports)
        self.sync = any(find_mode(report.mode).has_rounds for report in reports)
        for index, seat in self.seats.items():
            self._note(index, seat, reports)
        removed = {index for index, seat in self.seats.items() if seat.life is None}
        for index in sorted(change.removed | change.joining.keys()):
            if index in self.seats:
                self._end(self.seats[index], index, reports)
        over = frozenset.intersection(*(report.left for report in reports))
        for index, boot in change.joining.items():
            seat = self.seats.setdefault(index, Seat(lives=[]))
            self._begin(seat, boot, met, follows=index not in removed, over=index in over)
        lowest = min(report.closed for report in reports)
        for seat in self.seats.values():
            seat.lives = [life for life in seat.lives if life.last is None or life.last > lowest]

    def _note(self, index: int, seat: Seat, reports: list[ViewReport]) -> None:
        """What a life has said to some servers holds for all."""
        own = [report for report in reports if report.lives.get(index) == seat.incarnation]
        if seat.incarnation:
            seat.left = seat.left or any(index in report.left for report in own)
            seat.rests = max([seat.rests, *(report.rests.get(index, 0) for report in own)])

    def _end(self, seat: Seat, index: int, reports: list[ViewReport]) -> None:
        """The present life counts up to the last round that every server holds of it."""
        life = seat.life
        if life is None:
            return
        seat.progress = _furthest(index, life.incarnation, reports) or seat.progress
        known = [report.of(report.committed, index, life.incarnation) for report in reports]
        last = max(life.first - 1, *known) if life.incarnation else life.first - 1
        seat.lives[-1] = Incarnation(life.incarnation, life.first, last)
        seat.earlier.add(seat.boot)

    def _begin(self, seat: Seat, boot: int, met: int, *, follows: bool, over: bool) -> None:
        """A process takes the seat: from the round after its predecessor's last, if none is missed.

        That is only so if the predecessor was there until now (`follows`): what a removed seat had
        to do has been given to others. A predecessor that has left every server is done with its script
        (`over`), and this one begins anew; one that died while it left had nothing else to do.
        """
        self.lives += 1
        last = seat.lives[-1].last if seat.lives and follows else None
        first = 1
        if last is not None and self.closed <= last and not seat.left:
            first = last + 1
        elif self.sync:
            first = self.closed + LOOKAHEAD + 1
        seat.lives.append(Incarnation(self.lives, first))
        if over:
            seat.progress = ""
        seat.boot, seat.left, seat.rests = boot, False, met

    def install(self) -> InstallView:
        """What servers are told."""
        return InstallView(
            self.view,
            {
                index: SeatView(tuple(seat.lives), seat.rests, seat.left)
                for index, seat in self.seats.items()
                if seat.lives
            },
            self.closed if self.sync else 0,
        )


def _furthest(index: int, incarnation: int, reports: list[ViewReport]) -> str:
    """What a life has said of its script with its last push that counts anywhere; empty: nothing."""
    own = [report for report in reports if report.lives.get(index) == incarnation]
    ahead = max(
        own,
        key=lambda report: (report.committed.get(index, 0), report.sequences.get(index, 0)),
        default=None,
    )
    return ahead.progress.get(index, "") if ahead is not None else ""
