"""Layout of a call's segments: its gradients, its reads and the room for its response.

The segments of a small step mostly have the same bytes as those of the step before: the same tables, counts
and places in shared memory. Then the arrays are the same views of that memory, and are made once. Only
what follows from the segments alone is kept; the values that lie there now are looked at in each call.
"""

from collections.abc import Callable
from dataclasses import dataclass

from psfleet.runtime.interface import Read
from psfleet.wire.frame import ALIGNMENT, read_header
from psfleet.wire.segments import ELEMENTS, TensorRequest
from psfleet.wire.shared_memory import SharedMemory
from psfleet.wire.v1.frame_pb2 import PRECISION_FLOAT32, Header
from psfleet_server.rpc.pull_response import PullResponse, lay_out_in


@dataclass(slots=True)
class CallLayout:
    """A call's segments.

    Attributes:
        tensors: Gradients and reads of the call; shared between calls, so read-only.
        room: Room for the response, in the memory that the worker shares; None: its values go into the
            message.
    """

    tensors: TensorRequest
    room: PullResponse | None = None


def lay_out_call(
    tensors: TensorRequest, memory: SharedMemory | None, shape_of: Callable[[Read], tuple[int, ...]]
) -> CallLayout:
    """The layout of a call whose segments are these, in this memory or in its message."""
    if memory is None:
        return CallLayout(tensors)
    return CallLayout(tensors, lay_out_in(memory, tensors.places, tensors.reads, shape_of))


def is_lasting(layout: bytes, header: Header) -> bool:
    """Return whether all arrays of a call are views of its shared memory, and follow from this layout alone.

    Args:
        layout: The first part of its header.
        header: All of it.
    """
    part = read_header(layout)
    if len(part.ListFields()) != 1 or len(part.segments) != len(header.segments):
        return False
    return all(
        segment.precision == PRECISION_FLOAT32
        and segment.content != ELEMENTS
        and segment.offset % ALIGNMENT == 0
        for segment in part.segments
    )
