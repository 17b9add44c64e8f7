"""A server's part of one dense array, with its optimizer state."""

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import ShapeError
from psfleet.kernels.generate import dense_kernels
from psfleet.kernels.initial_values import address_of
from psfleet.kernels.rule_text import scalars_of, scratch_for
from psfleet.kernels.streaming import copy_over
from psfleet.schema.table import MAX_DIM, TableSpec
from psfleet.tables.copy_on_write import FrozenArrays
from psfleet.tables.row_snapshot import FrozenDenseTable

__all__ = ["DenseTable"]

Floats = NDArray[np.float32]


class DenseTable:
    """A slice of a dense array under the table's rule.

    Attributes:
        spec: The table's definition.
        step: How many updates it has had.
    """

    def __init__(self, spec: TableSpec, value: Floats) -> None:
        """The slice starts as a copy of `value`, float32 [m]."""
        if value.ndim != 1:
            raise ShapeError(f"table {spec.name!r}: a server's part is flat, not {value.shape}")
        self.spec = spec
        self.step = 0
        self._weights = np.array(value, np.float32)
        self._width = self._unit_width()
        self._slots = [
            np.full(self._slot_size(slot.per_unit), slot.initial, np.float32)
            for slot in spec.rule.slots
        ]
        constant = self._width if spec.rule.unit == "row" and self._width <= MAX_DIM else 0
        self._kernels = dense_kernels(spec.rule, bool(spec.decay.l1), bool(spec.decay.l2), constant)
        self._scratch = scratch_for(spec.rule)
        # They never move, and asking NumPy where an array lies costs as much as a short update.
        self._scratch_place = address_of(self._scratch)
        self._weights_place, *self._slot_places = map(address_of, (self._weights, *self._slots))
        self._views: list[FrozenArrays] = []
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """How many weights the slice has."""
        return len(self._weights)

    @property
    def bytes(self) -> int:
        """Memory of weights and state."""
        return self._weights.nbytes + sum(slot.nbytes for slot in self._slots)

    def pull_into(self, out: Floats) -> None:
        """Write the weights to `out`, float32 [m]."""
        with self._lock:
            copy_over(out, self._weights)

    def push(self, gradient: Floats, learning_rate: float) -> None:
        """Update every weight.

        Args:
            gradient: float32 [m], of any alignment.
            learning_rate: Of this push.
        """
        if gradient.shape != self._weights.shape or gradient.dtype != np.float32:
            raise ShapeError(
                f"table {self.spec.name!r}: the gradient is {gradient.dtype} "
                f"{gradient.shape}, it must be float32 {self._weights.shape}"
            )
        gradient = np.ascontiguousarray(gradient)
        with self._lock:
            self._keep()
            scalars = scalars_of(self.spec.rule, self.spec.decay, learning_rate, self.step + 1)
            self.step += 1
            units = self.count // self._width if self._width else 0
            self._kernels.push(
                units,
                self._width,
                address_of(scalars),
                address_of(gradient),
                self._scratch_place,
                *self._places(),
            )

    def state(self) -> list[Floats]:
        """Copies of the weights and then of each state slot, float32 [m] each.

        A value that a whole unit shares is repeated for each of its weights.
        """
        with self._lock:
            return [self._weights.copy(), *(self._spread(slot) for slot in self._slots)]

    def part(self, start: int, end: int) -> tuple[int, Floats]:
        """How many updates there were, and values start to end - 1 of each plane of `state`.

        float32 [1 + slots, end - start]; less where the slice ends before.
        """
        with self._lock:
            slots = (
                slot[start:end] if len(slot) == self.count else self._spread(slot)[start:end]
                for slot in self._slots
            )
            return self.step, np.stack([self._weights[start:end], *slots])

    def restore(self, step: int, values: Sequence[Floats], start: int = 0) -> None:
        """Set weights, state and step from what `state` gave, or from `start` on what `part` gave.

        Parts are for rules that update each weight by itself.
        """
        self.check_part(start, [len(value) for value in values])
        end = start + len(values[0])
        with self._lock:
            self._keep()
            self.step = step
            self._weights[start:end] = values[0]
            for slot, value in zip(self._slots, values[1:], strict=True):
                if len(slot) == self.count:
                    slot[start:end] = value
                else:
                    slot[:] = value[:: self.count // max(len(slot), 1) or 1]

    def check_part(self, start: int, lengths: Sequence[int]) -> None:
        """Refuse planes of these lengths that `restore` cannot set from `start` on."""
        count = lengths[0] if lengths else -1
        whole = (start, count) == (0, self.count)
        in_parts = all(len(slot) == self.count for slot in self._slots)
        fits = 0 <= start <= self.count - count and (whole or in_parts)
        if list(lengths) != [count] * (1 + len(self._slots)) or not fits:
            raise ShapeError(
                f"table {self.spec.name!r}: its state is {1 + len(self._slots)} arrays of "
                f"{self.count} values, not of {list(lengths)} from {start} on"
            )

    def freeze(self) -> FrozenDenseTable:
        """The slice as it is now, to be read while the table goes on; see psfleet.tables.copy_on_write."""
        with self._lock:
            arrays = FrozenArrays([self._weights, *self._slots], self._lock)
            self._views.append(arrays)
        return FrozenDenseTable(
            self.spec, self.step, self.count, arrays, self._spread, self._views.remove
        )

    def _keep(self) -> None:
        """The slice is about to change."""
        for view in self._views:
            view.keep()

    def _unit_width(self) -> int:
        """How many weights one update spans, see Rule.unit."""
        if self.spec.rule.unit != "row":
            return self.count
        width = 1
        for extent in self.spec.shape[1:]:
            width *= extent
        if width and self.count % width:
            raise ShapeError(
                f"table {self.spec.name!r}: {self.count} values are no whole rows of {width}"
            )
        return width

    def _slot_size(self, per_unit: bool) -> int:
        if not per_unit:
            return self.count
        return self.count // self._width if self._width else 0

    def _places(self) -> list[int]:
        """Addresses of the weights and of the slots that this step's update uses."""
        turns, places = self.spec.rule.turns, self._slot_places
        if turns:
            fixed = len(places) - turns
            places = [*places[:fixed], places[fixed + (self.step - 1) % turns]]
        return [self._weights_place, *places]

    def _spread(self, slot: Floats) -> Floats:
        return slot.copy() if len(slot) == self.count else np.repeat(slot, self._width)
