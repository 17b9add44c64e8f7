"""Views: who is in the fleet, decided by the coordinator and installed on every server.

See docs/protocol.md. A change of the view freezes every server first: it closes no round, takes
no push of the incarnations that are to end, and reports where it stands. From all reports the coordinator
decides in which rounds each incarnation counts; servers that have installed the decision go on. So every
server closes each round with the same incarnations, whoever died where.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Position = tuple[int, int]
"""Progress of an incarnation in its data (async modes): leases used up, and samples of the next one."""


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One incarnation of a seat and the rounds in which it counts: from `first` to `last`, None: and on.

    Incarnation 0: the seat is vacant and a worker is expected.
    """

    incarnation: int
    first: int = 1
    last: int | None = None

    def is_member_in(self, number: int) -> bool:
        """Return whether the incarnation is a member of that round."""
        return self.first <= number and (self.last is None or number <= self.last)


@dataclass(frozen=True, slots=True)
class SeatView:
    """A seat in a view.

    Attributes:
        incarnations: In order; those that are over only as long as a server may need them.
        rests: Collectives for which the present incarnation has rested at least.
        left: The present incarnation has left in order.
    """

    incarnations: tuple[Incarnation, ...]
    rests: int = 0
    left: bool = False

    @property
    def incarnation(self) -> Incarnation | None:
        """The present incarnation; None: the seat is removed."""
        return (
            self.incarnations[-1]
            if self.incarnations and self.incarnations[-1].last is None
            else None
        )


@dataclass(frozen=True, slots=True)
class PrepareView:
    """A new view is coming. Answered with a ViewReport.

    Attributes:
        ended: Incarnations that are to end: their pushes are not taken any more.
    """

    view: int
    ended: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class InstallView:
    """The new view. Also a record: it takes effect once.

    Attributes:
        closed: Last round that any server had closed; 0 in modes without rounds.
    """

    view: int
    seats: Mapping[int, SeatView]
    closed: int = 0


@dataclass(frozen=True)
class ViewReport:
    """State of a server when it is frozen.

    Attributes:
        mode: The fleet's mode here; empty: no worker has joined.
        closed: Last closed round.
        incarnations: Present incarnation of each seat.
        committed: By seat the last round that its present incarnation has committed or that was closed
            with its push: every server holds the push.
        rests: By seat the last rest of its present incarnation.
        left: Seats that have left in order.
        sequences: By seat the last push of its present incarnation (async modes).
        positions: By seat how far it is with its data after that push.
        progress: By seat what its present incarnation has said last of how far its script is.
        addressed: By seat, on server 0: of each server the last push that was sent to it, up to the last one
            here; nothing where that was sent to all.
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
        """`what` of this incarnation of the seat; 0: the server knows another incarnation of it."""
        return what.get(seat, 0) if self.incarnations.get(seat) == incarnation else 0


def member(incarnations: Iterable[Incarnation], number: int) -> Incarnation | None:
    """The incarnation of a seat that counts in a round."""
    return next(
        (incarnation for incarnation in incarnations if incarnation.is_member_in(number)), None
    )
