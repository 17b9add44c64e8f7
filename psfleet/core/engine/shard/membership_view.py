"""Views: numbered memberships of the fleet, decided by the coordinator and installed on every server.

The coordinator changes the view in two steps (docs/protocol.md):

    PrepareView --> every server freezes: it closes no round, refuses pushes of incarnations that end,
                    and answers with a ViewReport
    InstallView --> every server adopts the membership and goes on

From all reports the coordinator decides in which rounds each incarnation counts. So every server closes each
round with the pushes of the same incarnations, wherever and whenever a worker died.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Position = tuple[int, int]
"""Progress of an incarnation in its data (async modes): leases used up, and samples of the next one."""


@dataclass(frozen=True, slots=True)
class Incarnation:
    """An incarnation of a seat, and the rounds in which it counts.

    Attributes:
        incarnation: Number of the incarnation. 0 means that the seat is vacant and a worker is expected.
        first: First round in which it counts.
        last: Last round in which it counts, or None if it has not ended.
    """

    incarnation: int
    first: int = 1
    last: int | None = None

    def is_member_in(self, number: int) -> bool:
        """Return whether the incarnation is a member of that round."""
        return self.first <= number and (self.last is None or number <= self.last)


@dataclass(frozen=True, slots=True)
class SeatView:
    """Seat of a view with its incarnations.

    Attributes:
        incarnations: Incarnations in order. An ended incarnation stays as long as a server may need it.
        rests: Number of collectives for which the present incarnation has rested, at least.
        left: True if the present incarnation has left in order.
    """

    incarnations: tuple[Incarnation, ...]
    rests: int = 0
    left: bool = False

    @property
    def incarnation(self) -> Incarnation | None:
        """The present incarnation, or None if the seat is removed."""
        return (
            self.incarnations[-1]
            if self.incarnations and self.incarnations[-1].last is None
            else None
        )


@dataclass(frozen=True, slots=True)
class PrepareView:
    """Announcement of a new view, which freezes a server. The reply is a ViewReport.

    Attributes:
        view: Number of the coming view.
        ended: For each seat the incarnation that will end; its pushes are refused from now on.
    """

    view: int
    ended: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InstallView:
    """A decided view. It is also a record of the log, and takes effect once.

    Attributes:
        view: Number of the view.
        seats: Every seat of the fleet.
        closed: Last round that any server had closed, or 0 in modes without rounds.
    """

    view: int
    seats: Mapping[int, SeatView]
    closed: int = 0


@dataclass(frozen=True)
class ViewReport:
    """State of a frozen server. The coordinator decides the new view from the reports of all servers.

    The mappings have an entry for each seat, and describe its present incarnation.

    Attributes:
        mode: Mode of the fleet on this server, or empty if no worker has joined.
        closed: Last closed round.
        incarnations: Number of the incarnation.
        committed: Last round that it has committed, or that was closed with its push. Every server holds
            that push.
        rests: Number of its last rest.
        left: Seats that have left in order.
        sequences: Its last push (modes without rounds).
        positions: Progress in its data after that push.
        progress: Loop position of its script, as it was last reported.
        addressed: On server 0, for each server the last push that was sent to it, up to the last push here.
            A seat whose last push went to all servers has no entry.
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
        """Return a value of this incarnation, or 0 if the server knows another incarnation of the seat.

        Args:
            what: One of the mappings of this report.
            seat, incarnation: The seat and the incarnation.
        """
        return what.get(seat, 0) if self.incarnations.get(seat) == incarnation else 0


def member(incarnations: Iterable[Incarnation], number: int) -> Incarnation | None:
    """Return the incarnation of a seat that counts in round `number`, or None."""
    return next(
        (incarnation for incarnation in incarnations if incarnation.is_member_in(number)), None
    )
