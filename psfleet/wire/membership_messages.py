"""Between views, reports and plans and their protobuf messages."""

from collections.abc import Iterable, Sequence

from psfleet.data.assignment import PlanEntry, Range, RoundPlan
from psfleet.errors import FrameError
from psfleet.shard.membership_view import Incarnation, InstallView, Position, SeatView, ViewReport
from psfleet.wire.v1 import membership_pb2
from psfleet.wire.v1.frame_pb2 import Header

__all__ = [
    "read_install",
    "read_lives",
    "read_plan",
    "read_position",
    "read_ranges",
    "read_report",
    "write_install",
    "write_lives",
    "write_plan",
    "write_ranges",
    "write_report",
]


def write_report(report: ViewReport) -> membership_pb2.Standing:
    """The message of a report."""
    return membership_pb2.Standing(
        mode=report.mode,
        closed=report.closed,
        seats=[
            membership_pb2.SeatStanding(
                worker=worker,
                incarnation=incarnation,
                committed=report.committed.get(worker, 0),
                rests=report.rests.get(worker, 0),
                left=worker in report.left,
                sequence=report.sequences.get(worker, 0),
                leases=report.positions.get(worker, (0, 0))[0],
                samples=report.positions.get(worker, (0, 0))[1],
                progress=report.progress.get(worker, ""),
                addressed=report.addressed.get(worker, ()),
            )
            for worker, incarnation in sorted(report.lives.items())
        ],
    )


def read_report(message: membership_pb2.Standing) -> ViewReport:
    """The report that a message brings."""
    seats = {seat.worker: seat for seat in message.seats}
    return ViewReport(
        message.mode,
        message.closed,
        {worker: seat.incarnation for worker, seat in seats.items()},
        {worker: seat.committed for worker, seat in seats.items()},
        {worker: seat.rests for worker, seat in seats.items()},
        frozenset(worker for worker, seat in seats.items() if seat.left),
        {worker: seat.sequence for worker, seat in seats.items()},
        {worker: (seat.leases, seat.samples) for worker, seat in seats.items()},
        {worker: seat.progress for worker, seat in seats.items() if seat.progress},
        {worker: tuple(seat.addressed) for worker, seat in seats.items() if seat.addressed},
    )


def write_install(install: InstallView, boot: int = 0) -> membership_pb2.InstallRequest:
    """The message that installs a view on the process `boot`."""
    return membership_pb2.InstallRequest(
        boot=boot,
        view=install.view,
        seats=[
            membership_pb2.SeatView(
                worker=worker, lives=write_lives(seated.lives), rests=seated.rests, left=seated.left
            )
            for worker, seated in sorted(install.seats.items())
        ],
        closed=install.closed,
    )


def read_install(message: membership_pb2.InstallRequest) -> InstallView:
    """The view that a message brings."""
    return InstallView(
        message.view,
        {
            seat.worker: SeatView(read_lives(seat.lives), seat.rests, seat.left)
            for seat in message.seats
        },
        message.closed,
    )


def write_lives(lives: Iterable[Incarnation]) -> list[membership_pb2.LifeView]:
    """The messages of a seat's lives."""
    return [
        membership_pb2.LifeView(incarnation=life.incarnation, first=life.first, last=life.last)
        for life in lives
    ]


def read_lives(messages: Iterable[membership_pb2.LifeView]) -> tuple[Incarnation, ...]:
    """The lives that messages bring."""
    return tuple(
        Incarnation(life.incarnation, life.first, life.last if life.HasField("last") else None)
        for life in messages
    )


def read_position(header: Header) -> Position | None:
    """How far a push says that its worker is with its data; None: it says nothing."""
    said = (header.leases, header.lease_samples)
    return said if any(said) else None


def write_ranges(ranges: Iterable[Range]) -> list[int]:
    """Pairs of positions, one after the other."""
    return [end for pair in ranges for end in pair]


def read_ranges(ends: Sequence[int]) -> tuple[Range, ...]:
    """The ranges that `write_ranges` wrote.

    Raises:
        FrameError: They are no pairs.
    """
    if len(ends) % 2:
        raise FrameError(f"ranges are pairs of positions; there are {len(ends)} of them")
    return tuple(zip(ends[::2], ends[1::2], strict=True))


def write_plan(plan: RoundPlan) -> list[membership_pb2.PlanEntry]:
    """The entries of a plan."""
    return [
        membership_pb2.PlanEntry(
            first=entry.first, seats=entry.seats, stream=write_ranges(entry.stream)
        )
        for entry in plan.entries
    ]


def read_plan(size: int, batch: int, entries: Iterable[membership_pb2.PlanEntry]) -> RoundPlan:
    """The plan with these entries, of a dataset that the reader knows."""
    return RoundPlan(
        size,
        batch,
        tuple(
            PlanEntry(entry.first, tuple(entry.seats), read_ranges(entry.stream))
            for entry in entries
        ),
    )
