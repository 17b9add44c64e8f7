"""Converts the requests of workers (join, leave, push, shrink) to events of a shard and back.

The messages are declared in protos/psfleet/v1/shard.proto and the events in shard/events.py. Requests have
both forms because clients in other languages may send the messages, whereas the log stores the events.
"""

from psfleet.core.base.errors import FrameError
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.shard.events import Join, Leave, Push, Shrink
from psfleet.core.net.frame import encode, read_header, split
from psfleet.core.net.membership_messages import mode_fields, read_mode_fields
from psfleet.core.net.v1 import shard_pb2
from psfleet.core.net.v1.frame_pb2 import Header


def write_join(join: Join) -> shard_pb2.JoinRequest:
    """Return the message that a worker process sends to join, or to continue after waiting at a barrier."""
    return shard_pb2.JoinRequest(
        worker=join.worker,
        incarnation=join.incarnation,
        switch=join.switch,
        last=join.last,
        **mode_fields(join.mode),
    )


def read_join(message: shard_pb2.JoinRequest) -> Join:
    """Return the join event for a worker's message.

    Raises:
        FrameError: The message's mode is unknown, or does not have these settings.
    """
    mode = read_mode_fields(message)
    return Join(message.worker, message.incarnation, mode, message.switch, message.last)


def write_leave(leave: Leave) -> shard_pb2.LeaveRequest:
    """Return the message that a worker sends to leave for good, or to announce that it waits at a barrier."""
    return shard_pb2.LeaveRequest(
        worker=leave.worker, incarnation=leave.incarnation, last=leave.last, rest=leave.rest
    )


def read_leave(message: shard_pb2.LeaveRequest) -> Leave:
    """Return the leave event for a worker's message."""
    return Leave(message.worker, message.incarnation, message.last, message.rest)


def read_shrink(message: shard_pb2.ShrinkRequest) -> Shrink:
    """Return the event for a message that asks to remove rows from a table."""
    return Shrink(
        message.table,
        message.threshold if message.HasField("threshold") else None,
        message.unseen if message.HasField("unseen") else None,
        message.worker,
        message.incarnation,
        message.number,
    )


def write_withdrawal(request: bytes) -> bytes:
    """Return the message that withdraws a push: the push's message without its gradients and reads.

    It keeps the push's number, so that the worker's sequence of push numbers has no gap.
    """
    header = read_header(split(request)[1])
    for name in ("segments", "lane", "samples", "loss"):
        header.ClearField(name)
    header.withdrawn = True
    return encode(header)


def read_push(
    header: Header, gradients: tuple[Gradient, ...], cut: tuple[int, int] | None = None
) -> Push:
    """Return the push event for a worker's message.

    Args:
        cut: Pair of numbers: the last snapshot for which the worker has said which of its pushes is the last
            one in it, and that push. None if the message names no snapshot.

    Raises:
        FrameError: The header withdraws the push, but the message has gradients.
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
