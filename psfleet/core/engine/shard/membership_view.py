"""Views: numbered memberships of the fleet, decided by the coordinator and installed on every server.

A *seat* is a worker's rank in the fleet. Each process that takes a seat is an *incarnation* of it, so a
worker that restarts is a new incarnation. The coordinator changes the view in two steps (docs/protocol.md):

    PrepareView --> every server freezes: it closes no round, refuses pushes of incarnations that end,
                    and answers with a ViewReport
    InstallView --> every server adopts the membership and goes on

From all reports the coordinator decides which incarnation is a member of which round. So every server closes
each round with the pushes of the same incarnations, no matter where and when a worker died.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Position = tuple[int, int]
"""Position of an incarnation in its data (not sync mode): used-up leases, and used samples of the next lease.

A lease is a set of samples that the coordinator has assigned to the incarnation.
"""


@dataclass(frozen=True, slots=True)
class Incarnation:
    """Process of a worker: it takes a seat (worker rank) and is a member of a range of rounds.

    Attributes:
        incarnation: Number of the process among those of its seat. 0 means that the seat is vacant and a
            worker is expected.
        first: First round of which the process is a member.
        last: Last round of which the process is a member, or None if the process has not ended.
    """

    incarnation: int
    first: int = 1
    last: int | None = None

    def is_member_in(self, number: int) -> bool:
        """Return whether this worker process is a member of round `number`."""
        return self.first <= number and (self.last is None or number <= self.last)


@dataclass(frozen=True, slots=True)
class SeatView:
    """Seat (worker rank) in a view, the numbered membership of the fleet.

    Attributes:
        incarnations: Worker processes that have taken the seat, oldest first. An ended process stays in the
            list as long as a server may need it.
        rests: Number of collectives (barriers, say) at which the present process need not wait again, because
            it has waited there or they were complete before it began.
        left: True if the present process has finished its script.
    """

    incarnations: tuple[Incarnation, ...]
    rests: int = 0
    left: bool = False

    @property
    def incarnation(self) -> Incarnation | None:
        """The present worker process of the seat, or None if the seat was removed."""
        return (
            self.incarnations[-1]
            if self.incarnations and self.incarnations[-1].last is None
            else None
        )


@dataclass(frozen=True, slots=True)
class PrepareView:
    """Announcement of a new view (membership of the fleet), which freezes a server.

    A frozen server closes no round until the view is installed. The reply is a ViewReport.

    Attributes:
        view: Number of the new view.
        ended: For each seat (worker rank) the incarnation (worker process) that ends. Its pushes are refused
            from now on.
    """

    view: int
    ended: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InstallView:
    """Membership of the fleet that the coordinator has decided. It is also a log record.

    The event installs a view, which is a numbered membership. A second copy of a view has no effect.

    Attributes:
        view: Number of the membership.
        seats: Every seat (worker rank) of the fleet.
        closed: Last round that any server had closed, or 0 in modes without rounds.
    """

    view: int
    seats: Mapping[int, SeatView]
    closed: int = 0


@dataclass(frozen=True)
class ViewReport:
    """State of a server that has stopped closing rounds, because workers have joined or ended.

    From the reports of all servers, the coordinator decides the new view (membership of the fleet). The
    mappings have an entry for each seat (worker rank), about its present worker process (incarnation).

    Attributes:
        mode: Mode of the fleet on this server, or empty if no worker has joined.
        closed: Last closed round.
        incarnations: Number of the incarnation.
        committed: Last round for which all servers are known to have the incarnation's push. They are known
            to have it if the worker has confirmed that (a commit), or if the round was closed with the push.
        rests: Number of collectives, such as barriers, at which the incarnation has waited.
        left: Seats whose workers have finished.
        sequences: Number of the incarnation's last push (modes without rounds).
        positions: Position of the incarnation in its data after that push.
        progress: Last loop position that the incarnation's script has reported.
        addressed: On server 0, the last push that was sent to each server, up to the last push here. A
            seat whose last push went to all servers has no entry.
    """

    mode: str = ""
    closed: int = 0
    incarnations: dict[int, int] = field(default_factory=dict)
    committed: dict[int, int] = field(default_factory=dict)
    rests: dict[int, int] = field(default_factory=dict)
    left: frozenset[int] = frozenset()
    sequences: dict[int, int] = field(default_factory=dict)
    positions: dict[int, Position] = field(default_factory=dict)
    progress: dict[int, str] = field(default_factory=dict)
    addressed: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def last_of(self, what: Mapping[int, int], seat: int, incarnation: int) -> int:
        """Return the value for this incarnation, or 0 if the report is about another process of the seat.

        Args:
            what: One of the mappings of this report.
            seat: Worker rank.
            incarnation: Number of the worker process in this seat.
        """
        return what.get(seat, 0) if self.incarnations.get(seat) == incarnation else 0


def member(incarnations: Iterable[Incarnation], number: int) -> Incarnation | None:
    """Return the incarnation (worker process) that is a member of round `number`, or None."""
    return next(
        (incarnation for incarnation in incarnations if incarnation.is_member_in(number)), None
    )
