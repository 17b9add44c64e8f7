"""The way of tensors to one server: shared memory where both ends are on one host, else messages.

The worker makes the memory and owns every place in it. A call names places: until its answer is
here, the server reads and writes those and no others, so neither side needs a lock. A call that
failed may still be under way at the server; then no place of that memory is dealt again. The call
goes on with its tensors in the message, and the next one gets other memory.
"""

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from psfleet.wire.shared import Blocks, Offer, SharedMemory

__all__ = ["Attach", "Held", "Lane"]

Attach = Callable[[int, Offer], bool]
"""Offers memory under a generation to the server; whether it is shared now."""

_FIRST_SIZE = 8 << 20
_LARGEST = 4 << 30
_SPARE = 4  # times what was missing: several calls may be under way


class Held:
    """One memory that is shared with the server.

    Attributes:
        generation: Its number on the wire.
        missing: Bytes of all tensors for which there was no place; 0: there always was one.
        lost: A call has failed in it: no place of it is dealt again.
    """

    def __init__(self, memory: SharedMemory, generation: int) -> None:
        self.generation = generation
        self.missing = 0
        self.lost = False
        self._memory = memory
        self._blocks = Blocks(len(memory))
        self._turn = 0

    def __len__(self) -> int:
        return len(self._memory)

    def take(self, shape: Sequence[int], dtype: DTypeLike) -> tuple[NDArray[Any], int] | None:
        """A new array in the memory and its offset; None: there is no room left."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        offset = self._blocks.take(size)
        if offset is None:
            self.missing += size
            return None
        return self._memory.array(offset, shape, dtype), offset

    def give(self, offset: int) -> None:
        """The array at `offset` is no longer used."""
        self._blocks.give(offset)

    def next_turn(self) -> int:
        """The number of the next call. Calls reach the server in the order of their numbers."""
        self._turn += 1
        return self._turn


class Lane:
    """Keeps the memory for one server: made when first wanted, larger when too small, anew when lost.

    Args:
        attach: Makes the server share it.
        is_idle: Whether a call to the server would be made at once. While it would have to wait
            behind another, which may itself wait for other workers, no new memory is offered.
        wanted: False: tensors always travel in messages.
    """

    def __init__(self, attach: Attach, is_idle: Callable[[], bool], wanted: bool) -> None:
        self._attach = attach
        self._is_idle = is_idle
        self._wanted = wanted
        self._held: Held | None = None

    def held(self) -> Held | None:
        """The memory to use for the next call, None: the message."""
        held = self._held
        if self._wanted and (held is None or held.lost or held.missing) and self._is_idle():
            self._held = held = self._make(held)
        return None if held is None or held.lost else held

    def _make(self, before: Held | None) -> Held | None:
        """Memory to follow `before`. What the server does not share once it is not asked again."""
        size = _FIRST_SIZE
        if before is not None:
            size = min(len(before) + _SPARE * before.missing, _LARGEST)
            if before.missing and not before.lost and len(before) >= size:
                before.missing = 0  # as large as it gets; what does not fit goes in messages
                return before
        made = SharedMemory.make(size)
        if made is None:
            self._wanted = False
            return None
        memory, offer = made
        generation = int.from_bytes(os.urandom(8), "little")
        try:
            self._wanted = self._attach(generation, offer)
        finally:
            os.close(offer.descriptor)
        return Held(memory, generation) if self._wanted else None
