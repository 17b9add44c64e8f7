"""A server's part of one sparse table: rows of weights and optimizer state by 64-bit id."""

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import ShapeError, UsageError
from psfleet.kernels.generate import sparse_kernels
from psfleet.kernels.hashing import drawn
from psfleet.kernels.initial import address_of, initializer_arguments
from psfleet.kernels.rule_text import RuleText, scalars_of, scratch_for
from psfleet.tables.entry import Entry
from psfleet.tables.index import Index
from psfleet.tables.spec import TableSpec

__all__ = ["SparseTable"]

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


class SparseTable:
    """Rows that appear when they are first updated.

    Attributes:
        spec: The table's definition.
        step: How many updates the table has had.
    """

    def __init__(self, spec: TableSpec, max_rows: int = 2**28) -> None:
        rule, decay = spec.rule, spec.decay
        self.spec = spec
        self.step = 0
        self._index = Index(
            RuleText(rule, False, False, spec.dim).row_width(), max_rows, marks=spec.every_row
        )
        self._kernels = sparse_kernels(
            rule, bool(decay.l1), bool(decay.l2), spec.dim, spec.every_row
        )
        self._initial = initializer_arguments(spec.initializer, spec.seed, spec.name)
        self._ring = np.empty(128, np.int64)
        self._scratch = scratch_for(rule, spec.dim)
        self._zeros = np.zeros(spec.dim, np.float32)
        self._entries: tuple[Ids, NDArray[np.int64]] | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def bytes(self) -> int:
        """Memory of rows, state and index."""
        return self._index.bytes

    def pull_into(self, ids: Ids, out: Floats) -> None:
        """Write the weights of ids to `out`; of an unknown id its first values. Adds no row.

        Args:
            ids: int64 [n], repeats allowed, any alignment.
            out: float32 [n, dim], any alignment.
        """
        ids = self._checked(ids, out)
        if not out.flags.c_contiguous:
            raise ShapeError(f"table {self.spec.name!r}: the rows of `out` must lie side by side")
        with self._lock:
            self._kernels.pull(
                self._index.address,
                address_of(ids),
                len(ids),
                address_of(out),
                *self._initial,
                address_of(self._ring),
            )

    def push(self, ids: Ids, gradients: Floats, learning_rate: float) -> None:
        """Update rows, adding those of unknown ids (that the entry admits) with their first values.

        Args:
            ids: int64 [n], no id twice, any alignment.
            gradients: float32 [n, dim], any alignment.
            learning_rate: Of this push.

        Raises:
            UsageError: The table is full; nothing was changed.
        """
        ids = self._checked(ids, gradients)
        gradients = np.ascontiguousarray(gradients)
        with self._lock:
            if self.spec.entry is not None:
                ids, gradients = self._admitted(self.spec.entry, ids, gradients)
            self._check_room([ids])
            rule = self.spec.rule
            scalars = scalars_of(rule, self.spec.decay, learning_rate, self.step + 1)
            turn = self.step % rule.turns if rule.turns else 0
            self.step += 1
            self._kernels.push(
                self._index.address,
                address_of(ids),
                len(ids),
                address_of(gradients),
                address_of(scalars),
                turn,
                self.step,
                *self._initial,
                address_of(self._ring),
                address_of(self._scratch),
            )
            self._index.keep_ahead()
            if self.spec.every_row:
                self._kernels.rest(
                    self._index.address,
                    address_of(scalars),
                    turn,
                    self.step,
                    address_of(self._zeros),
                    address_of(self._scratch),
                )

    def check_room(self, parts: Sequence[Ids]) -> None:
        """Refuse ids that the table cannot all take; each counts once, known ones not at all.

        Where the table has an entry: as if it admitted all of them.

        Raises:
            UsageError: The table would be full.
        """
        if sum(map(len, parts)) > self._index.spare:  # else there is no need to wait for a pull
            with self._lock:
                self._check_room(parts)

    def reserve(self, rows: int) -> None:
        """Have memory for so many rows in all made now, so that no push waits for it."""
        with self._lock:
            self._index.reserve(rows)

    def remove(self, ids: Ids) -> int:
        """Forget rows; returns how many were there. Their ids start anew when next updated."""
        with self._lock:
            self._entries = None
            return self._index.remove(np.ascontiguousarray(ids))

    def state(self, offset: int, limit: int) -> tuple[Ids, Floats]:
        """A page of the table in ascending order of id.

        Returns:
            ids int64 [n] and rows float32 [n, dim * (1 + slots)]: the weights, then each state slot.
            A value that a whole row shares is repeated for each of its weights.
        """
        with self._lock:
            if self._entries is None or len(self._entries[0]) != len(self._index):
                self._entries = self._index.entries()
            ids, slots = (array[offset : offset + limit] for array in self._entries)
            rows = self._index.gather(slots)
        return ids.copy(), self._spread(rows)

    def restore(self, ids: Ids, rows: Floats) -> None:
        """Set rows from what `state` gave, adding unknown ids and leaving other rows alone."""
        width = self.spec.dim * (1 + len(self.spec.rule.slots))
        if rows.shape != (len(ids), width) or rows.dtype != np.float32:
            raise ShapeError(
                f"table {self.spec.name!r}: rows are {rows.dtype} {rows.shape}, they must "
                f"be float32 {(len(ids), width)}"
            )
        ids, rows = np.ascontiguousarray(ids, np.int64), np.ascontiguousarray(self._packed(rows))
        with self._lock:
            self._check_room([ids])
            slots, _ = self._index.locate(ids, add=True)
            self._index.scatter(slots, rows)

    def restore_step(self, step: int) -> None:
        """Set how many updates the table has had."""
        self.step = step

    def _checked(self, ids: Ids, rows: Floats) -> Ids:
        if ids.ndim != 1 or ids.dtype != np.int64:
            raise ShapeError(
                f"table {self.spec.name!r}: ids are {ids.dtype} {ids.shape}, they must be int64 [n]"
            )
        if rows.shape != (len(ids), self.spec.dim) or rows.dtype != np.float32:
            raise ShapeError(
                f"table {self.spec.name!r}: rows are {rows.dtype} {rows.shape}, they must "
                f"be float32 {(len(ids), self.spec.dim)}"
            )
        return np.ascontiguousarray(ids)

    def _admitted(self, entry: Entry, ids: Ids, gradients: Floats) -> tuple[Ids, Floats]:
        """What is left of a push without the unknown ids that get no row."""
        slots, unknown = self._index.locate(ids, add=False)
        if not unknown:
            return ids, gradients
        kept = (slots != 0) | drawn(ids, entry.probability, int(self._initial[3]), self.step + 1)
        return ids[kept], gradients[kept]

    def _check_room(self, parts: Sequence[Ids]) -> None:
        asked = sum(map(len, parts))
        if asked <= self._index.spare:
            return
        room = self._index.max_rows - len(self._index)
        if asked <= room:  # removed rows leave room beyond the spare slots
            return
        _, unknown = self._index.locate(np.unique(np.concatenate(parts)), add=False)
        if unknown > room:
            raise UsageError(
                f"table {self.spec.name!r} is full: it holds {len(self._index)} rows of "
                f"at most {self._index.max_rows} and was asked to add {unknown}"
            )

    def _columns(self) -> list[tuple[int, int]]:
        """(start, width) of weights and each slot within a stored row."""
        dim, start, columns = self.spec.dim, 0, []
        for width in [dim, *(1 if slot.per_unit else dim for slot in self.spec.rule.slots)]:
            columns.append((start, width))
            start += width
        return columns

    def _spread(self, rows: Floats) -> Floats:
        """Stored rows -> rows in which every slot has dim columns."""
        dim = self.spec.dim
        if all(width == dim for _, width in self._columns()):
            return rows
        parts = [
            np.broadcast_to(rows[:, start : start + width], (len(rows), dim))
            for start, width in self._columns()
        ]
        return np.concatenate(parts, axis=1)

    def _packed(self, rows: Floats) -> Floats:
        """The opposite of `_spread`."""
        dim = self.spec.dim
        parts = [rows[:, i * dim : i * dim + width] for i, (_, width) in enumerate(self._columns())]
        return np.concatenate(parts, axis=1)
