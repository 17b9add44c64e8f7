"""Requests of workers: between the events of a shard and the messages of protos/psfleet/v1/shard.proto.

Others may send these messages, so that each is declared there and as an event. A log holds the events.
"""

from psfleet.core.base.errors import FrameError
from psfleet.core.engine.interface import Gradient
from psfleet.core.engine.shard.events import Join, Leave, Push, Shrink
from psfleet.core.net.frame import encode, read_header, split
from psfleet.core.net.membership_messages import mode_fields, read_mode_fields
from psfleet.core.net.v1 import shard_pb2
from psfleet.core.net.v1.frame_pb2 import Header


def write_join(join: Join) -> shard_pb2.JoinRequest:
    """Return the message of a worker's incarnation that begins."""
    return shard_pb2.JoinRequest(
        worker=join.worker,
        incarnation=join.incarnation,
        switch=join.switch,
        last=join.last,
        **mode_fields(join.mode),
    )


def read_join(message: shard_pb2.JoinRequest) -> Join:
    """Return the event that a message asks for.

    Raises:
        FrameError: Its mode is unknown, or has no such settings.
    """
    mode = read_mode_fields(message)
    return Join(message.worker, message.incarnation, mode, message.switch, message.last)


def write_leave(leave: Leave) -> shard_pb2.LeaveRequest:
    """Return the message of a worker that leaves or rests."""
    return shard_pb2.LeaveRequest(
        worker=leave.worker, incarnation=leave.incarnation, last=leave.last, rest=leave.rest
    )


def read_leave(message: shard_pb2.LeaveRequest) -> Leave:
    """Return the event that a message asks for."""
    return Leave(message.worker, message.incarnation, message.last, message.rest)


def read_shrink(message: shard_pb2.ShrinkRequest) -> Shrink:
    """Return the event that a message asks for."""
    return Shrink(
        message.table,
        message.threshold if message.HasField("threshold") else None,
        message.unseen if message.HasField("unseen") else None,
        message.worker,
        message.incarnation,
        message.number,
    )


def write_withdrawal(request: bytes) -> bytes:
    """Return the message that takes back the push of a message: its number, without gradients and reads."""
    header = read_header(split(request)[1])
    for name in ("segments", "lane", "samples", "loss"):
        header.ClearField(name)
    header.withdrawn = True
    return encode(header)


def read_push(
    header: Header, gradients: tuple[Gradient, ...], cut: tuple[int, int] | None = None
) -> Push:
    """Return the push that a header tells of. One that was accepted is of no cut.

    Raises:
        FrameError: It withdraws a push and has gradients.
    """
    if header.withdrawn and gradients:
        raise FrameError("the header says that the push is withdrawn, and it has gradients")
    return Push(
        header.worker,
        header.incarnation,
        header.sequence,
        gradients,
        header.samples,
        header.loss if header.HasField("loss") else None,
        header.clock,
        cut,
        (header.leases, header.lease_samples) if header.leases or header.lease_samples else None,
        header.progress,
        header.skipped,
        tuple(header.addressed),
        header.withdrawn,
    )
