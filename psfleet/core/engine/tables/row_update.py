"""Pulls and pushes of a sparse table's rows: calls the kernels that are generated from the table's rule.

RowUpdate is the interface. HostRowUpdate implements it for rows in host memory; tables/device has the
implementation for rows on a GPU. PlacedRows makes the same kernel calls for plain calls. It takes addresses
instead of NumPy arrays, because converting arrays takes longer than a small update.
"""

import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.device_arrays import DeviceArray
from psfleet.core.engine.kernels.dedup import BagSums, first_repeat, merge_pushes
from psfleet.core.engine.kernels.generate import (
    address_of_kernel,
    pull_kernels,
    sparse_kernels,
    static_kernels,
)
from psfleet.core.engine.kernels.initial_values import address_of, initializer_arguments, int64s_at
from psfleet.core.engine.kernels.row_format import RowFormat
from psfleet.core.engine.kernels.rule_source import scalars_of, scratch_for, with_decay
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.tables.budget import MemoryAccount
from psfleet.core.engine.tables.host_rows import HostRowMemory
from psfleet.core.engine.tables.row_expiry import RowLifetime
from psfleet.core.engine.tables.row_memory import RowMemory, RowTraffic

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]

_FEW = 64  # up to this many ids, repeats are found by comparing each id with all others
# Up to this many ids, kernels keep the GIL: at 35 to 60 ns an id, 20 to 30 us, about as long as the rest of a
# call takes. All other threads wait for that long, so kernels of more ids release the GIL.
_SHORT = 512


class DeviceValues(Protocol):
    """Rows of values on a device: float32 [n, width]."""

    def __getitem__(self, mask: NDArray[np.bool_]) -> "DeviceValues":
        """Return the rows that the mask selects. The original array must not be used afterwards."""

    def to_host(self) -> Floats:
        """Return a copy of the rows in host memory."""


RowValues = Floats | DeviceValues | BagSums
"""Values of a push: one row for each id, in host memory or on a device, or sums that are not yet computed."""


class RowUpdate(Protocol):
    """Pulls and pushes of one table's rows. Not thread-safe."""

    def pull_into(self, ids: Ids, out: Floats) -> int:
        """Write the weights of these ids to `out`, float32 [n, dim].

        Ids without a row get their initial values.

        Returns:
            Number of ids without a row.
        """

    def can_share(self, count: int) -> bool:
        """Return whether a push of `count` ids may now have its arrays on the GPU (DeviceSums)."""
        return False

    def pull_to_device(self, ids: DeviceArray, out: DeviceArray) -> bool:
        """Write the weights of these ids to `out` as `pull_into` does, or return False (see DeviceReader)."""
        return False

    def mean(self, parts: Sequence[tuple[Ids, Floats]]) -> tuple[Ids, RowValues]:
        """Return the ids of several pushes, in order of first occurrence, and the means of their gradients.

        Gradients are summed in the order of the pushes. Shows and clicks are summed and not averaged. The
        result is valid until the next call of `push`.

        Args:
            parts: Ids and gradients of each push. A push has each id at most once.
        """

    def push(self, ids: Ids, gradients: RowValues, scalars: Floats, step: int) -> None:
        """Apply the optimizer rule to the rows of these ids. Ids without a row get one first.

        Args:
            ids: int64 [n], without repeats, any alignment.
            gradients: float32 [n, TableSpec.push_width], contiguous, any alignment. `BagSums` only if this
                is a HostRowUpdate itself, `DeviceSums` only if `can_share`.
            scalars: Learning rate and other numbers of this update, made by
                psfleet.core.engine.kernels.rule_source.scalars_of.
            step: Number of this update, from 1.
        """

    def update_other_rows(self, scalars: Floats, step: int) -> None:
        """Update every row that the push of this step did not update, with a zero gradient.

        For optimizers that change every row in each step, such as Adam without `lazy_mode`.
        """


def host_pull_kernels(spec: TableSpec) -> ModuleType:
    """Return the compiled kernels that read a table's rows in host memory."""
    form = RowFormat(spec.rule, spec.dim, spec.precision)
    return pull_kernels(spec.dim, form.plain, 4 * (form.words + spec.scores))


def host_kernels(spec: TableSpec, rests: bool, pad: int) -> ModuleType:
    """Return the compiled kernel of a table's rule for rows in host memory.

    Args:
        spec: Definition of the table.
        rests: False for the kernel that updates the rows of a push, True for the kernel that updates all
            other rows.
        pad: Unused bytes behind each row.
    """
    return sparse_kernels(
        spec.rule,
        bool(spec.decay.l1),
        bool(spec.decay.l2),
        spec.dim,
        rests,
        spec.pushed_scores,
        spec.counts_frequency,
        spec.precision,
        pad,
    )


class HostRowUpdate(RowUpdate):
    """Updates rows in host memory. Implements RowUpdate."""

    def __init__(self, spec: TableSpec, index: HostRowMemory) -> None:
        rule = spec.rule
        self._index = index
        self._dim = spec.dim
        self._turns = rule.turns
        self._push = host_kernels(spec, False, index.pad).push
        self._pull = host_pull_kernels(spec).pull
        self._rest = host_kernels(spec, True, index.pad).rest if spec.every_row else None
        self._initial = initializer_arguments(spec.initializer, spec.seed, spec.name)
        self._ring = np.empty(192, np.int64)  # 3 * RING words (kernels/sources/push.txt)
        form = RowFormat(rule, spec.dim, spec.precision)
        self._scratch, self.is_plain = scratch_for(rule, form.width), form.plain
        self._zeros = np.zeros(spec.dim, np.float32)

    def pull_into(self, ids: Ids, out: Floats) -> int:
        return self.pull_at(address_of(ids), len(ids), address_of(out))

    def pull_at(self, ids: int, count: int, out: int) -> int:
        """Pull as `pull_into` does, with the addresses of `count` ids and of their weights."""
        unknown: int = self._pull(
            self._index.address, ids, count, out, *self._initial, address_of(self._ring)
        )
        return unknown

    def addresses(self, ids: Ids) -> tuple[Ids, int]:
        """Return the address of each id's weights, int64 [n], and the number of ids without a row.

        Only for plain rows. Ids without a row get the address of their initial values. The addresses are
        valid until the next update, or the next call of this method.
        """
        slots, unknown = self._index.locate(ids)
        slots *= self._index.stride
        slots += self._index.rows_address
        if unknown:
            missing = np.flatnonzero(slots == self._index.rows_address)
            self._first = np.empty((unknown, self._dim), np.float32)
            new_ids = ids[missing]
            static_kernels("row_weights", "fill").fill(
                *(address_of(new_ids), unknown, self._dim, *self._initial, address_of(self._first))
            )
            slots[missing] = address_of(self._first) + np.arange(unknown) * 4 * self._dim
        return slots, unknown

    def mean(self, parts: Sequence[tuple[Ids, Floats]]) -> tuple[Ids, Floats]:
        ids, rows = merge_pushes(parts, 1.0 / len(parts))
        if rows.shape[1] > self._dim:
            counts = [(ids, values[:, self._dim :]) for ids, values in parts]
            rows[:, self._dim :] = merge_pushes(counts, 1.0)[1]
        return ids, rows

    def push(self, ids: Ids, gradients: RowValues, scalars: Floats, step: int) -> None:
        self._index.expect(len(ids))
        ids_at, scalars_at = address_of(ids), address_of(scalars)
        for rows in gradients.blocks() if isinstance(gradients, BagSums) else [gradients]:
            assert isinstance(rows, np.ndarray)
            self.push_at(ids_at, len(rows), address_of(rows), scalars_at, step)
            ids_at += ids.itemsize * len(rows)

    def push_at(self, ids: int, count: int, gradients: int, scalars: int, step: int) -> None:
        """Push as `push` does, with the addresses of `count` ids, their gradients and the scalars.

        The caller has called `HostRowMemory.expect`, if some ids may be new.
        """
        turn = (step - 1) % self._turns if self._turns else 0
        rows = self._index.address, ids, count, gradients
        scratch = address_of(self._ring), address_of(self._scratch)
        self._push(*rows, scalars, turn, step, *self._initial, *scratch)

    def update_other_rows(self, scalars: Floats, step: int) -> None:
        assert self._rest is not None
        self._rest(
            self._index.address,
            address_of(scalars),
            (step - 1) % self._turns if self._turns else 0,
            step,
            address_of(self._zeros),
            self._initial[-1],
            address_of(self._scratch),
        )

    def block(self) -> NDArray[np.int64]:
        """Return the constant arguments of a small call as int64s (layout: kernels/sources/plain_call.py).

        A call passes the address of this block instead of nine numbers.
        """
        kind, low, span, stream = self._initial
        kernels = address_of_kernel(self._push), address_of_kernel(self._pull), self._index.address
        floats, last = np.array([low, span]).view(np.int64), np.array([stream]).view(np.int64)
        arrays = address_of(self._ring), address_of(self._scratch)
        return np.concatenate([[*kernels, kind], floats, last, arrays]).astype(np.int64)


class SteppedTable(Protocol):
    """Attributes of a SparseTable that PlacedRows reads and changes."""

    spec: TableSpec
    step: int
    traffic: RowTraffic


def placed_rows(
    table: SteppedTable,
    lock: threading.Lock,
    rule: RowUpdate,
    index: RowMemory,
    account: MemoryAccount,
    lifetime: RowLifetime,
) -> "PlacedRows | None":
    """Return fast small pulls and pushes of a table, or None if some of its rows are not in host memory."""
    # `type`, not isinstance: derived classes have rows on disk, and would have to read them first.
    if type(rule) is HostRowUpdate and type(index) is HostRowMemory:
        return PlacedRows(table, lock, rule, index, account, lifetime)
    return None


class PlacedRows:
    """Fast pulls and pushes of plain calls. Methods take the addresses of arrays instead of the arrays.

    Calls of few ids keep the GIL, because releasing it takes longer than the call. Call `can_push` before
    each `push`; between the two, nothing else may change the table. A push here is not recorded for
    followers, so use it only while the table has none.

    Args:
        table: The table; its `step` and `traffic` are updated here.
        lock: Lock of the table.
        rule: Pulls and pushes of the rows.
        index: Storage of the rows.
        account: Memory account of the table.
        lifetime: Expiry of the rows.
    """

    def __init__(
        self,
        table: SteppedTable,
        lock: threading.Lock,
        rule: HostRowUpdate,
        index: HostRowMemory,
        account: MemoryAccount,
        lifetime: RowLifetime,
    ) -> None:
        kernels, spec = static_kernels("plain_call"), table.spec
        self._push, self._pull, self._unknown = kernels.push, kernels.pull, kernels.unknown
        self._table, self._lock, self._index = table, lock, index
        self._account, self._lifetime = account, lifetime
        self._rule = rule  # keeps the arrays alive whose addresses are in the block
        self._block = rule.block()
        self._place = address_of(self._block)
        # Only the length of this array matters: each push overwrites all its numbers.
        self._scalars = scalars_of(spec.rule, spec.decay, 0.1, 1)
        self._scalars_at = address_of(self._scalars)
        self._words: Any = self._scalars.data
        self._grows = False

    def can_push(self, ids: int, count: int) -> bool:
        """Return whether these ids have no repeats, and the table certainly has room for the new ids.

        Args:
            ids: Address of the ids, int64.
            count: Number of ids.
        """
        # For few ids a kernel finds repeats and counts ids without a row in one pass: -1 means a repeat. For
        # many ids, assume that every id is new, which saves the look-up.
        if count <= _FEW:
            unknown = self._unknown(self._place, ids, count)
        else:
            unknown = -1 if first_repeat(int64s_at(ids, count)) is not None else count
        self._grows = unknown > 0
        return unknown == 0 or (unknown > 0 and self._account.can_surely_add(count))

    def growth_bound(self, count: int) -> float:
        """Return an upper bound of the bytes that the push which `can_push` has just accepted adds."""
        return self._account.growth_bound(count, counts_rows=False) if self._grows else 0.0

    def push(self, ids: int, count: int, gradients: int, learning_rate: float) -> None:
        """Update the rows of ids that `can_push` has accepted.

        Args:
            ids: Address of the ids, int64.
            count: Number of ids.
            gradients: Address of the gradients, float32.
            learning_rate: Learning rate of this push.
        """
        table, words, position = self._table, self._words, 0
        with self._lock:
            # The same steps as SparseTable.push: huge pages before new rows, images before a change.
            if self._grows:
                self._index.expect(count)
            if self._index.views:
                self._index.keep(int64s_at(ids, count))
            step = table.step = table.step + 1
            spec, turns = table.spec, table.spec.rule.turns
            for number in with_decay(spec.rule.scalars(learning_rate, step), spec.decay):
                words[position] = number
                position += 1  # a plain loop is the fastest way to fill the array
            table.traffic.updated += count
            if count <= _SHORT:
                turn = (step - 1) % turns if turns else 0
                self._push(self._place, ids, count, gradients, self._scalars_at, turn, step)
            else:
                self._rule.push_at(ids, count, gradients, self._scalars_at, step)
            if self._grows:
                self._account.charge_budget()
            self._lifetime.age(step)

    def pull(self, ids: int, count: int, out: int) -> None:
        traffic = self._table.traffic
        with self._lock:
            if count <= _SHORT:
                traffic.unknown += self._pull(self._place, ids, count, out)
            else:
                traffic.unknown += self._rule.pull_at(ids, count, out)
            traffic.pulled += count
