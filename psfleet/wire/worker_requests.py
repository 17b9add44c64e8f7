"""Between what workers ask of a shard and its messages: in calls, and in records of a log."""

import math

from psfleet.errors import FrameError
from psfleet.runtime.interface import Gradient
from psfleet.shard.events import Correction, Join, Leave, Push, Shrink
from psfleet.wire.membership_messages import read_position
from psfleet.wire.mode_messages import mode_fields, read_mode_fields
from psfleet.wire.segments import OutgoingSegment, write_gradient
from psfleet.wire.v1 import shard_pb2
from psfleet.wire.v1.frame_pb2 import Header

__all__ = [
    "read_join",
    "read_leave",
    "read_push",
    "read_shrink",
    "write_join",
    "write_leave",
    "write_push",
    "write_shrink",
]


def write_push(push: Push) -> tuple[Header, list[OutgoingSegment]]:
    """The header of a push as it was accepted, and the pieces with its gradients."""
    pieces = [write_gradient(gradient) for gradient in push.gradients]
    leases, lease_samples = push.position or (0, 0)
    header = Header(
        worker=push.worker,
        incarnation=push.incarnation,
        sequence=push.sequence,
        segments=[piece.segment for piece in pieces],
        samples=push.samples,
        loss=push.loss,
        clock=push.clock,
        leases=leases,
        lease_samples=lease_samples,
        progress=push.progress,
        skipped=push.skipped,
        addressed=push.addressed,
    )
    return header, pieces


def read_push(
    header: Header, gradients: tuple[Gradient, ...], cut: tuple[int, int] | None = None
) -> Push:
    """The push that a header tells of. One that was accepted is of no cut."""
    return Push(
        header.worker,
        header.incarnation,
        header.sequence,
        gradients,
        header.samples,
        header.loss if header.HasField("loss") else None,
        header.clock,
        cut,
        read_position(header),
        _read_correction(header),
        header.progress,
        header.skipped,
        tuple(header.addressed),
    )


def _read_correction(header: Header) -> Correction | None:
    """How a call wants its push to be corrected. One that was accepted has been corrected.

    Raises:
        FrameError: By no number, or one below 0.
    """
    damping, compensation = header.staleness_damping, header.delay_compensation
    if not damping and not compensation:
        return None
    for name, value in ("staleness_damping", damping), ("delay_compensation", compensation):
        if not 0 <= value < math.inf:
            raise FrameError(f"the header says {name} = {value}; it must be a number from 0 on")
    return Correction(damping, compensation)


def write_join(join: Join) -> shard_pb2.JoinRequest:
    """The message of a join."""
    return shard_pb2.JoinRequest(
        worker=join.worker,
        incarnation=join.incarnation,
        switch=join.switch,
        last=join.last,
        **mode_fields(join.mode),
    )


def read_join(message: shard_pb2.JoinRequest) -> Join:
    """The join that a message asks for."""
    return Join(
        worker=message.worker,
        incarnation=message.incarnation,
        mode=read_mode_fields(message),
        switch=message.switch,
        last=message.last,
    )


def write_leave(leave: Leave) -> shard_pb2.LeaveRequest:
    """The message of a leave."""
    return shard_pb2.LeaveRequest(
        worker=leave.worker, incarnation=leave.incarnation, last=leave.last, rest=leave.rest
    )


def read_leave(message: shard_pb2.LeaveRequest) -> Leave:
    """The leave that a message asks for."""
    return Leave(message.worker, message.incarnation, message.last, message.rest)


def write_shrink(shrink: Shrink) -> shard_pb2.ShrinkRequest:
    """The message of a shrink."""
    return shard_pb2.ShrinkRequest(
        table=shrink.table,
        threshold=shrink.threshold,
        unseen=shrink.unseen,
        worker=shrink.worker,
        incarnation=shrink.incarnation,
        number=shrink.number,
    )


def read_shrink(message: shard_pb2.ShrinkRequest) -> Shrink:
    """The shrink that a message asks for."""
    return Shrink(
        table=message.table,
        threshold=message.threshold if message.HasField("threshold") else None,
        unseen=message.unseen if message.HasField("unseen") else None,
        worker=message.worker,
        incarnation=message.incarnation,
        number=message.number,
    )
