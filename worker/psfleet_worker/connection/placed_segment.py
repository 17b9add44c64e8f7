"""Segments of calls at their places in shared memory, remembered from one step to the next.

The small tensors of a call lie one after the other in one block. Where a step has the same tables and counts
as the one before, and gets the same block, each tensor lies where it lay, and its segment has the same bytes.
So the memory keeps a tree for each block: what was laid out first, and behind it what came next.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["PlacedSegment"]

_NO_IDS, _NO_VALUES = np.empty(0, np.int64), np.empty(0, np.float32)


class PlacedSegment:
    """One segment of a call, at its place.

    Attributes:
        segment: As a field of the header.
        ids: The part of its bytes that is for ids.
        values: The part that is for values, of their shape.
        arrays: All its bytes, for a message.
        answer: Where the values of a read are put; None: it is none, or they come in the message.
        answer_bytes: How many these are.
        end: Bytes of the block up to its end.
        next: What was laid out behind it, by what was asked for.
    """

    __slots__ = ("answer", "answer_bytes", "arrays", "end", "ids", "next", "segment", "values")

    def __init__(
        self,
        segment: bytes = b"",
        ids: NDArray[np.int64] = _NO_IDS,
        values: NDArray[np.float32] = _NO_VALUES,
        arrays: tuple[NDArray[np.uint8], ...] = (),
        answer: Any = None,
        answer_bytes: int = 0,
        end: int = 0,
    ) -> None:
        self.segment = segment
        self.ids = ids
        self.values = values
        self.arrays = arrays
        self.answer = answer
        self.answer_bytes = answer_bytes
        self.end = end
        self.next: dict[tuple[object, ...], PlacedSegment] = {}
