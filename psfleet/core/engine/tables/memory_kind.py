"""MemoryKind: interface of a kind of memory (host memory, disk, GPU) that can store tables.

memory_choice.py implements the kinds and decides which table is stored where. To add a kind of memory, write
a class like those. DenseMemory, the storage of a dense table's values, is here with its implementation for
host memory.
"""

import math
from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ShapeError
from psfleet.core.engine.kernels.generate import dense_kernels
from psfleet.core.engine.kernels.initial_values import address_of, copy_over
from psfleet.core.engine.kernels.rule_source import scratch_for
from psfleet.core.engine.schema.table import MAX_DIM, Device, TableSpec
from psfleet.core.engine.tables.budget import MemoryBudget
from psfleet.core.engine.tables.row_memory import RowMemory
from psfleet.core.engine.tables.row_update import RowUpdate

Floats = NDArray[np.float32]

_SHORT = 1 << 24  # up to this many weights a GPU has two buffers for gradients (gradient_places)


class DenseMemory(Protocol):
    """Weights and optimizer state of one server's part of a dense table, as several arrays called planes.

    Plane 0 holds the weights, and each other plane one value of optimizer state. A plane is float32, with one
    value for each weight, or one for each unit: the group of weights for which a rule has a common state
    (psfleet.core.engine.rules.rule.Slot). Not thread-safe. The memory is freed with the object.

    Attributes:
        lengths: Length of each plane.
        bytes: Bytes that the planes take.
    """

    lengths: list[int]
    bytes: int

    def push(self, gradient: Floats, scalars: Floats, step: int) -> None:
        """Apply the table's optimizer rule to all weights.

        Args:
            gradient: float32 [m], contiguous, of any alignment.
            scalars: Learning rate and other numbers of this update, made by
                psfleet.core.engine.kernels.rule_source.scalars_of.
            step: Number of this update, from 1.
        """

    def pull_into(self, out: Floats) -> None:
        """Write the weights to `out`, float32 [m], contiguous."""

    def read(self, plane: int, start: int = 0, end: int | None = None) -> Floats:
        """Return a copy of values `start` to `end` - 1 of a plane (0 for the weights, else state)."""

    def write(self, plane: int, start: int, values: Floats) -> None:
        """Overwrite values of a plane (0 for the weights, else state), beginning at position `start`."""


class HostDenseMemory:
    """Weights and optimizer state of a dense table, in host memory. `MemoryKind.dense` has the arguments."""

    def __init__(self, spec: TableSpec, value: Floats, width: int) -> None:
        rule, decay, count = spec.rule, spec.decay, len(value)
        self._planes = [np.array(value, np.float32)]
        self._planes += [
            np.full(size, slot.initial, np.float32)
            for slot, size in zip(rule.slots, slot_sizes(spec, count, width), strict=True)
        ]
        self.lengths = [len(plane) for plane in self._planes]
        self.bytes = sum(plane.nbytes for plane in self._planes)
        self._units = count // width if width else 0
        self._width = width
        self._turns = rule.turns
        constant = width if rule.unit == "row" and width <= MAX_DIM else 0
        self._kernels = dense_kernels(rule, bool(decay.l1), bool(decay.l2), constant)
        self._scratch = scratch_for(rule)
        # Keep the addresses: arrays never move, and asking NumPy for one costs as much as a short update.
        self._scratch_place = address_of(self._scratch)
        self._places = [address_of(plane) for plane in self._planes]

    def push(self, gradient: Floats, scalars: Floats, step: int) -> None:
        addresses = self._places
        if self._turns:
            fixed = len(addresses) - self._turns
            addresses = [*addresses[:fixed], addresses[fixed + (step - 1) % self._turns]]
        self._kernels.push(
            self._units,
            self._width,
            address_of(scalars),
            address_of(gradient),
            self._scratch_place,
            *addresses,
        )

    def pull_into(self, out: Floats) -> None:
        copy_over(out, self._planes[0])

    def read(self, plane: int, start: int = 0, end: int | None = None) -> Floats:
        return self._planes[plane][start:end].copy()

    def write(self, plane: int, start: int, values: Floats) -> None:
        self._planes[plane][start : start + len(values)] = values


def dense_bytes(spec: TableSpec, count: int, gradients: int = 0) -> int:
    """Return the bytes of `count` weights with optimizer state and buffers for `gradients` gradients."""
    return 4 * ((1 + gradients) * count + sum(slot_sizes(spec, count, unit_width(spec, count))))


def gradient_places(count: int) -> int:
    """Return the number of gradient buffers that a GPU keeps for a part of a table with `count` weights.

    Two buffers let the next gradient be copied while the first is applied; very large tables have only one.
    """
    return 2 if count <= _SHORT else 1


def unit_width(spec: TableSpec, count: int) -> int:
    """Return the number of weights that the rule updates together: a row's, or else `count`.

    Raises:
        ShapeError: The rule updates whole rows, and `count` is not a multiple of the row length.
    """
    if spec.rule.unit != "row":
        return count
    width = math.prod(spec.shape[1:])
    if width and count % width:
        raise ShapeError(f"table {spec.name!r}: {count} values are no whole rows of {width}")
    return width


def slot_sizes(spec: TableSpec, count: int, width: int) -> list[int]:
    """Return the number of values in each optimizer state array, for a part of `count` weights.

    Args:
        spec: Definition of the table.
        count: Number of weights.
        width: Number of weights that the rule updates together (result of `unit_width`).
    """
    units = count // width if width else 0
    return [units if slot.per_unit else count for slot in spec.rule.slots]


class MemoryKind(ABC):
    """Kind of memory that can store tables. It checks which tables are possible, and makes their storage.

    The library of a device is loaded only when a table is made or `why_missing` is called.

    Attributes:
        name: Name in settings and table definitions (psfleet/core/base/settings/kinds.py).
        label: Name of the memory in messages.
        setting: Name of the setting that limits the bytes of all tables, or empty if there is none.
        is_host: True if CPU kernels can access this memory and every process has it.
        needs_folder: True if this memory is in files.
    """

    name: Device
    label: ClassVar[str]
    setting: ClassVar[str] = ""
    is_host: ClassVar[bool] = False
    needs_folder: ClassVar[bool] = False

    def why_missing(self) -> str:
        """Return the reason why this process cannot use the memory, or "" if it can.

        The reason is worded as the end of a sentence.
        """
        return ""

    def why_not(self, spec: TableSpec) -> str:
        """Return the reason why this memory can never store the table, or "" if it can.

        The reason is worded as the end of a sentence.
        """
        return ""

    def limit(self, most: int) -> int | None:
        """Return the number of bytes that all tables may take, or None for no limit.

        Call it before tables are made.

        Args:
            most: Limit by the setting in bytes, or 0 for none.
        """
        return most or None

    def budget(self) -> MemoryBudget:
        """Return a new budget that all tables of a server share. The caller sets its limit."""
        flag = f", or give tables more of it (--{self.setting.replace('_', '-')})"
        advice = f"Use device='cpu' or more servers{flag if self.setting else ''}"
        return MemoryBudget(place=self.label, advice=advice)

    def dense_bytes(self, spec: TableSpec, count: int) -> int:
        """Return the bytes of `count` weights of a dense table with optimizer state and gradient buffers."""
        return dense_bytes(spec, count)

    @abstractmethod
    def dense(self, spec: TableSpec, value: Floats, width: int) -> DenseMemory:
        """Allocate the weights and optimizer state of a part of a dense table.

        Args:
            spec: Definition of the table.
            value: Initial weights of the part: float32 [m].
            width: Number of weights that the rule updates together (result of `unit_width`).

        Raises:
            UsageError: There is too little memory.
        """

    @abstractmethod
    def sparse(
        self, spec: TableSpec, max_rows: int, host: MemoryBudget, own: MemoryBudget
    ) -> tuple[RowMemory, RowUpdate, MemoryBudget]:
        """Make the storage of a sparse table's rows.

        Args:
            spec: Definition of the table.
            max_rows: Largest number of rows.
            host: Budget of host memory.
            own: Budget of this memory.

        Returns:
            The storage of the rows, the object that pulls and updates these rows, and the budget that is
            charged for them: `host` or `own`.

        Raises:
            UsageError: There is too little memory, or `max_rows` is 0.
        """
