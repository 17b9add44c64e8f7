"""Layout of a call's segments: its gradients, its reads and the room for its response.

The segments of a small step mostly have the same bytes as those of the step before: the same tables, counts
and places in shared memory. Then the arrays are the same views of that memory, and are made once. Only
what follows from the segments alone is kept; the values that lie there now are looked at in each call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.runtime.interface import Gradient, Read
from psfleet.wire.frame import ALIGNMENT, read_header
from psfleet.wire.segments import ELEMENTS, TensorRequest
from psfleet.wire.shared_memory import SharedMemory
from psfleet.wire.v1.frame_pb2 import PRECISION_FLOAT32, Header
from psfleet_server.rpc.call_plan import CallPlan
from psfleet_server.rpc.pull_response import PullResponse, lay_out_in


@dataclass(slots=True)
class CallLayout:
    """A call's segments.

    Attributes:
        tensors: Gradients and reads of the call; shared between calls, so read-only.
        room: Room for the response, in the memory that the worker shares; None: its values go into the
            message.
        plan: For calls like it; None: they have none.
    """

    tensors: TensorRequest
    room: PullResponse | None = None
    plan: CallPlan | None = None


_MOST_LAYOUTS = 64
_LONGEST = 64 << 10  # bytes of a payload; beyond, to parse the segments takes next to nothing
_Place = tuple[np.dtype[Any], int, int]
"""Type of an array's elements, their number, and the place of the first one in the payload."""


class MessageLayouts:
    """Layouts of calls with their tensors in the message, by the bytes of their segments.

    Each message is other memory, so each call gets arrays of its own, at the places of those before. Any
    thread may call.
    """

    def __init__(self) -> None:
        self._layouts: dict[bytes, _MessageLayout] = {}

    def known(self, header: Header, layout: bytes, payload: memoryview) -> CallLayout | None:
        """Return the layout of a call, made as for an earlier one with these bytes; None: there was none."""
        known = self._layouts.get(layout)
        if known is None or known.size != len(payload) or header.HasField("lane"):
            return None
        return CallLayout(known.over(payload))

    def plan(self, layout: bytes, size: int) -> CallPlan | None:
        """Return the plan of calls with these bytes and a payload of this size, if there is one."""
        known = self._layouts.get(layout)
        return None if known is None or known.size != size else known.plan

    def keep(
        self,
        layout: bytes,
        payload: memoryview,
        tensors: TensorRequest,
        plan: CallPlan | None = None,
    ) -> None:
        """Calls may come with the same bytes as this one again."""
        if 0 < len(payload) <= _LONGEST:
            if len(self._layouts) >= _MOST_LAYOUTS:
                self._layouts.clear()
            self._layouts[layout] = _MessageLayout(payload, tensors, plan)

    def forget(self) -> None:
        """Tables are others: calls with the same bytes are laid out anew."""
        self._layouts.clear()


class _MessageLayout:
    """Places of the arrays of a call in its payload, and what its segments say of them.

    Attributes:
        size: Bytes of the payload.
        plan: For calls of this layout; None: there is none.
    """

    def __init__(self, payload: memoryview, tensors: TensorRequest, plan: CallPlan | None) -> None:
        self.size = len(payload)
        self.plan = plan
        at = 0

        def next_place(array: NDArray[Any]) -> _Place:
            nonlocal at
            place = array.dtype, array.size, at
            at += array.nbytes
            return place

        self._gradients = []
        for one in tensors.gradients:
            at += -at % ALIGNMENT
            ids = None if one.ids is None else next_place(one.ids)
            values = next_place(one.values)
            self._gradients.append((one.table, ids, values, one.values.shape, one.learning_rate))
        self._reads = []
        for read in tensors.reads:
            at += -at % ALIGNMENT
            self._reads.append((read.table, None if read.ids is None else next_place(read.ids)))

    def over(self, payload: memoryview) -> TensorRequest:
        """Return the request of a call whose arrays lie in this payload."""
        request = TensorRequest()
        for table, ids, values, shape, rate in self._gradients:
            rows = None if ids is None else _array(payload, *ids)
            gradient = _array(payload, *values).reshape(shape)
            request.gradients.append(Gradient(table, gradient, rows, rate))
        for table, ids in self._reads:
            request.reads.append(Read(table, None if ids is None else _array(payload, *ids)))
        return request


def _array(payload: memoryview, dtype: np.dtype[Any], count: int, at: int) -> NDArray[Any]:
    array = np.frombuffer(payload, dtype, count, at)
    return array if array.flags.aligned else array.copy()


def lay_out_call(
    tensors: TensorRequest, memory: SharedMemory | None, shape_of: Callable[[Read], tuple[int, ...]]
) -> CallLayout:
    """The layout of a call whose segments are these, in this memory or in its message."""
    if memory is None:
        return CallLayout(tensors)
    return CallLayout(tensors, lay_out_in(memory, tensors.places, tensors.reads, shape_of))


def is_lasting(layout: bytes, header: Header) -> bool:
    """Return whether all arrays of a call are as they travel, and follow from this layout alone.

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
