"""Between what workers ask of a shard and its messages: in calls, and in records of a log."""

from psfleet.core.base.errors import FrameError
from psfleet.core.engine.interface import Gradient
from psfleet.core.engine.shard.events import Join, Leave, Push, Shrink
from psfleet.core.net.frame import encode, read_header, split
from psfleet.core.net.membership_messages import MODE
from psfleet.core.net.message_converter import Converter
from psfleet.core.net.segments import OutgoingSegment, write_gradient
from psfleet.core.net.v1 import shard_pb2
from psfleet.core.net.v1.frame_pb2 import Header

JOIN = Converter(Join, shard_pb2.JoinRequest, MODE)
LEAVE = Converter(Leave, shard_pb2.LeaveRequest)
SHRINK = Converter(Shrink, shard_pb2.ShrinkRequest)


def write_push(push: Push) -> tuple[Header, list[OutgoingSegment]]:
    """Return the header of a push as it was accepted, and the pieces with its gradients."""
    segments = [write_gradient(gradient) for gradient in push.gradients]
    leases, lease_samples = push.position or (0, 0)
    header = Header(
        worker=push.worker,
        incarnation=push.incarnation,
        sequence=push.sequence,
        segments=[segment.segment for segment in segments],
        samples=push.samples,
        loss=push.loss,
        clock=push.clock,
        leases=leases,
        lease_samples=lease_samples,
        progress=push.progress,
        skipped=push.skipped,
        addressed=push.addressed,
        withdrawn=push.withdrawn,
    )
    return header, segments


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
