"""DenseTable: one server's part of a dense table, the weights of a range and their optimizer state.

A lock makes pulls, pushes and snapshots take turns. The values are in a DenseMemory (memory_kind.py), in host
memory or on a GPU. A snapshot copies the arrays when they first change (row_snapshot.FrozenArrays).
"""

import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ShapeError
from psfleet.core.engine.kernels.rule_source import scalars_of
from psfleet.core.engine.schema.table import Device, TableSpec
from psfleet.core.engine.tables.memory_choice import KINDS
from psfleet.core.engine.tables.memory_kind import unit_width
from psfleet.core.engine.tables.row_snapshot import FrozenArrays, FrozenDenseTable

Floats = NDArray[np.float32]


class DenseTable:
    """Part of a dense table on one server, updated by the table's rule. Thread-safe.

    Attributes:
        spec: Definition of the table.
        step: Number of updates that the table has had.
        count: Number of weights in this part.
        device: Name of the memory that holds the part.
        bytes: Bytes of weights and state in that memory.
        changed: Callback that is called before each change.
        device_bytes: The part of `bytes` that is in a device's memory.
    """

    def __init__(self, spec: TableSpec, value: Floats, device: Device = "cpu") -> None:
        """Make a part whose weights are a copy of `value`, float32 [m]."""
        if value.ndim != 1:
            raise ShapeError(f"table {spec.name!r}: a server's part is flat, not {value.shape}")
        self.spec = spec
        self.step = 0
        self.count = len(value)
        self._width = unit_width(spec, len(value))
        kind = KINDS[device]
        self._memory = kind.dense(spec, value, self._width)
        self.device = device
        self.bytes = self._memory.bytes
        self.device_bytes = 0 if kind.is_host else self.bytes
        self._views: list[FrozenArrays] = []
        self.changed: Callable[[], None] = lambda: None
        self._lock = threading.Lock()

    def pull_into(self, out: Floats) -> None:
        """Write the weights to `out`, float32 [m]."""
        with self._lock:
            self._memory.pull_into(out)

    def push(self, gradient: Floats, learning_rate: float) -> None:
        """Update every weight.

        Args:
            gradient: float32 [m], of any alignment.
            learning_rate: Learning rate of this push.
        """
        gradient = np.ascontiguousarray(gradient)
        with self._lock:
            self._keep()
            scalars = scalars_of(self.spec.rule, self.spec.decay, learning_rate, self.step + 1)
            self.step += 1
            self._memory.push(gradient, scalars, self.step)

    def state(self) -> list[Floats]:
        """Return copies of the weights and then of each state slot, float32 [m] each.

        A state value that a whole unit shares is repeated for each of its weights.
        """
        with self._lock:
            return [self._spread(plane) for plane in self._planes()]

    def part(self, start: int, end: int) -> tuple[int, Floats]:
        """Return the number of updates, and values `start` to `end` - 1 of each array of `state`.

        The values are float32 [1 + slots, end - start], or fewer if the part ends before `end`.
        """
        with self._lock:
            return self.step, np.stack(
                [
                    self._memory.read(plane, start, end)
                    if length == self.count
                    else self._spread(self._memory.read(plane))[start:end]
                    for plane, length in enumerate(self._memory.lengths)
                ]
            )

    def restore(self, step: int, values: Sequence[Floats], start: int = 0) -> None:
        """Set the step, and the weights and state from arrays of `state`, or of `part` from `start` on.

        Only tables whose rule updates each weight by itself can be set in parts.
        """
        self.check_part(start, [len(value) for value in values])
        with self._lock:
            self._keep()
            self.step = step
            for plane, (length, value) in enumerate(zip(self._memory.lengths, values, strict=True)):
                if length == self.count:
                    self._memory.write(plane, start, value)
                else:
                    self._memory.write(plane, 0, value[:: self._width or 1])

    def check_part(self, start: int, lengths: Sequence[int]) -> None:
        """Refuse arrays of these lengths if `restore` cannot set them from `start` on."""
        count = lengths[0] if lengths else -1
        whole = (start, count) == (0, self.count)
        in_parts = all(length == self.count for length in self._memory.lengths)
        fits = 0 <= start <= self.count - count and (whole or in_parts)
        if list(lengths) != [count] * len(self._memory.lengths) or not fits:
            raise ShapeError(
                f"table {self.spec.name!r}: its state is {len(self._memory.lengths)} arrays of "
                f"{self.count} values, not of {list(lengths)} from {start} on"
            )

    def freeze(self) -> FrozenDenseTable:
        """Return an image of the part as it is now, to be read while training goes on (row_snapshot.py)."""
        with self._lock:
            arrays, step = FrozenArrays(self._planes, self._lock), self.step
            self._views.append(arrays)
        return FrozenDenseTable(
            self.spec, step, self.count, arrays, self._spread, self._release_view
        )

    def _release_view(self, view: FrozenArrays) -> None:
        # Under the lock: a change may be iterating over the views, and would skip one if another is removed.
        with self._lock:
            self._views.remove(view)

    def _keep(self) -> None:
        """Tell followers and images that the part is about to change."""
        self.changed()
        for view in self._views:
            view.keep()

    def _planes(self) -> list[Floats]:
        """Return copies of the planes as the memory holds them."""
        return [self._memory.read(plane) for plane in range(len(self._memory.lengths))]

    def _spread(self, plane: Floats) -> Floats:
        return plane if len(plane) == self.count else np.repeat(plane, self._width)
