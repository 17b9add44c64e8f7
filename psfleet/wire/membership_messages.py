"""Between views, reports and plans and their protobuf messages."""

from psfleet.datasets.round_plan import PlanEntry
from psfleet.shard.membership_view import InstallView, ViewReport
from psfleet.wire.message_converter import Converter
from psfleet.wire.v1 import membership_pb2


def write_report(report: ViewReport) -> membership_pb2.Standing:
    """Return the message of a report."""
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
            for worker, incarnation in sorted(report.incarnations.items())
        ],
    )


def read_report(message: membership_pb2.Standing) -> ViewReport:
    """Return the report that a message brings."""
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


INSTALL = Converter(InstallView, membership_pb2.InstallRequest, others=("boot",))
PLAN_ENTRY = Converter(PlanEntry, membership_pb2.PlanEntry)
