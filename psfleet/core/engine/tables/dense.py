"""DenseTable: one server's part of a dense table. It stores a range of its weights and their optimizer state.

A lock makes pulls, pushes and snapshots take turns. The values are in a DenseMemory (memory_kind.py), in host
memory or on a GPU. A snapshot copies the arrays only before they change for the first time
(row_snapshot.FrozenArrays).
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
    """Part of a dense table on one server, updated by the table's optimizer rule. Thread-safe.

    Attributes:
        spec: Definition of the table.
        step: Number of updates of the table so far.
        count: Number of weights in this part.
        device: Kind of memory that stores the part.
        bytes: Bytes of weights and optimizer state.
        changed: Function that is called before each change.
        device_bytes: The part of `bytes` that is on a GPU.
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
        """Apply the table's optimizer rule to every weight.

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
        """Return copies of the weights and then of each optimizer state array, float32 [m] each.

        State that several weights share, such as one value per row, is repeated for each weight.
        """
        with self._lock:
            return [self._spread(plane) for plane in self._planes()]

    def part(self, start: int, end: int) -> tuple[int, Floats]:
        """Return the number of updates so far, and the weights and state of elements `start` to `end` - 1.

        The values are float32 [1 + state values, end - start]. There are fewer columns if this server's part
        of the table ends before `end`.
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
        """Restore weights and optimizer state, or a part of them, and set the number of updates.

        A table whose rule shares state between weights can only be restored as a whole.

        Args:
            step: Number of updates.
            values: Weights, then each array of state, as `state` or `part` has returned them.
            start: Position of the first weight in this server's range, for a part.

        Raises:
            ShapeError: The arrays do not fit.
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
        """Raise ShapeError if `restore` cannot write arrays of these lengths from position `start` on."""
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
        """Return an image of the part as it is now, for a snapshot. It can be read while training goes on."""
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
        """Notify followers and images of snapshots before the part changes."""
        self.changed()
        for view in self._views:
            view.keep()

    def _planes(self) -> list[Floats]:
        """Return copies of the arrays as they are stored: weights, then optimizer state."""
        return [self._memory.read(plane) for plane in range(len(self._memory.lengths))]

    def _spread(self, plane: Floats) -> Floats:
        return plane if len(plane) == self.count else np.repeat(plane, self._width)
