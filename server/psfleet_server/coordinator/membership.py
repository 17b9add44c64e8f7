"""Membership of the fleet: the workers, their processes, and the next view computed from servers' reports.

A *seat* is a worker's numbered position in the fleet. The processes that occupy it in turn are its
*incarnations*. A worker process may have reported to some servers only before it died. So a change of members
first freezes all servers. `Membership.decide` then combines their reports and decides two things: which
pushes of an ended incarnation count, and in which round its successor begins. docs/protocol.md has the rules.
Pure: reports in, the next membership out. worker_liveness.py decides which workers are dead, and
coordinator.py when the members change.
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
    """Position of one worker in the fleet (its rank), which several processes may occupy in turn.

    Attributes:
        boot: Random number that identifies the process in the seat, or 0 if no process has come yet.
        earlier: Numbers of the processes that occupied the seat before.
        incarnations: The first and last round of each process of the seat; the last entry is the present
            process. A seat without a present process is removed from the fleet.
        left: True if the present process has finished its script.
        rests: Number of collectives at which the present process no longer has to rest, that is, to wait
            while rounds close without it.
        progress: Loop position that the last process reported when it ended. Empty means that the next
            process starts from the beginning.
    """

    boot: int = 0
    earlier: set[int] = field(default_factory=set)
    incarnations: list[Incarnation] = field(default_factory=lambda: [Incarnation(0)])
    left: bool = False
    rests: int = 0
    progress: str = ""

    @property
    def present(self) -> Incarnation | None:
        """The present incarnation, or None if the seat is removed.

        A seat that waits for its first process has an incarnation with number 0.
        """
        return (
            self.incarnations[-1]
            if self.incarnations and self.incarnations[-1].last is None
            else None
        )

    @property
    def incarnation(self) -> int:
        """Number of the present incarnation, or 0 if no process occupies the seat."""
        return self.present.incarnation if self.present is not None else 0


@dataclass
class ViewChange:
    """A change of members that is under way, while the servers freeze and report.

    Attributes:
        view: Number of the view (numbered membership) that will result.
        joining: For each seat that a new process takes, the number of the process.
        removed: Seats that are removed unless a new process takes them.
        ended: For each seat whose process ends, the number of its incarnation.
    """

    view: int
    joining: dict[int, int]
    removed: set[int]
    ended: dict[int, int]
    reports: dict[int, ViewReport] = field(default_factory=dict)


@dataclass
class Membership:
    """All seats (numbered worker positions) of the fleet, as of the last decided view.

    Attributes:
        seats: Seats by number. The first ones are those that the fleet was started for.
        incarnations: Number of worker processes that have been members so far.
        view: Number of the last decided view (membership). It consists of the number of the coordinator's
            term and of the changes within the term.
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
        """Return the numbers of all workers that take part, in ascending order.

        A seat whose process has not come yet is included. Removed seats and workers that have finished are
        not.
        """
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
        """Note that the seat's present process has finished its script."""
        self.seats[index].left = True
        self._present = None

    def first_rounds(self) -> dict[int, int]:
        """Return, for each seat, the first push or round that counts for its present process."""
        incarnations = {index: self.seats[index].present for index in self.present()}
        return {
            index: incarnation.first
            for index, incarnation in incarnations.items()
            if incarnation is not None
        }

    def seat_for(self, worker: int, boot: int, workers: int, seats: int) -> Seat | None:
        """Return the seat that a process registers for, or None if the seat is a new one.

        Args:
            boot: Random number that identifies the process.
            workers: Number of workers that the process was started for.
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
            raise Fenced(f"a later process has taken over as worker {worker}")
        return seat

    def counts_in(self, index: int, number: int) -> bool:
        """Return whether the worker in seat `index` takes part in round `number`."""
        seat = self.seats.get(index)
        return seat is not None and member(seat.incarnations, number) is not None

    def decide(self, change: ViewChange, collectives: int) -> None:
        """Apply a change of members for which every server has reported.

        Args:
            collectives: Number of completed collectives. At these, new processes do not rest (wait while
                rounds close without them).
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
        # these rounds. Incarnations that ended before `lowest` are no longer needed.
        lowest = min(report.closed for report in reports)
        for seat in self.seats.values():
            seat.incarnations = [
                incarnation
                for incarnation in seat.incarnations
                if incarnation.last is None or incarnation.last > lowest
            ]

    def _note(self, index: int, seat: Seat, reports: list[ViewReport]) -> None:
        """Note that a worker has left or rests, even if only some of the servers got its message."""
        own_reports = [
            report for report in reports if report.incarnations.get(index) == seat.incarnation
        ]
        if seat.incarnation:
            seat.left = seat.left or any(index in report.left for report in own_reports)
            seat.rests = max([seat.rests, *(report.rests.get(index, 0) for report in own_reports)])

    def _end(self, seat: Seat, index: int, reports: list[ViewReport]) -> None:
        """End the present incarnation of a seat after the last push that any server knows to be committed.

        A worker commits a push (lets its round close) only when every server holds the push. So every server
        can close that round.
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

        In sync mode there are two exceptions: that round has closed without the seat, or the samples of the
        seat were given to other workers. The new incarnation then takes part from the first round whose plan
        can still change.

        Args:
            boot: Random number that identifies the process.
            follows: True if the seat was not removed before this change, so its samples still belong to it.
            over: True if the predecessor has left every server. The predecessor has then finished its script,
                and the new incarnation starts from the beginning. If the predecessor died while it was
                leaving, its loop position stays.
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
        """Return the message that makes servers work with this membership."""
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
    """Return the loop position that came with the incarnation's last push, or empty if there was none.

    Args:
        incarnation: Number of the worker's ended process.
    """
    own_reports = [report for report in reports if report.incarnations.get(index) == incarnation]
    ahead = max(
        own_reports,
        key=lambda report: (report.committed.get(index, 0), report.sequences.get(index, 0)),
        default=None,
    )
    return ahead.progress.get(index, "") if ahead is not None else ""
