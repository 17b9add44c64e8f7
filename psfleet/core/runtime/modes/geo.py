"""geo: a worker trains on copies of its own and now and then adds what it has learned.

As in the reference's geo mode: after `k_steps` steps a worker sends for each weight

    delta = (its copy - the base that it knows) / number of workers,

which the server adds, and the base grows by delta. When it reads the server's value anew, the base
becomes that value and the copy that value plus what was not yet sent of its own (copy - base). So the
worker's own progress stays in its copy, and all of it reaches the servers over time; `flush`, collectives and
the end send the whole rest at once.

Where it differs: the reference keeps a copy of every row on every worker; here rows are copied when
they are first read, refreshed when they are first read after an exchange, and beyond `copied_rows`
their rest is sent and the copies are forgotten, with their optimizer state.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.engine.interface import CompletedPush, Gradient, Read, Runtime, TableState
from psfleet.core.engine.kernels.dedup import dedup
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.schema.table import DecaySpec, TableSpec
from psfleet.core.engine.tables.assigned_weights import set_rows, set_values, values_of, weights_of
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.core.engine.tables.sparse import SparseTable
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.runtime_bases import ForwardingRuntime
from psfleet.core.runtime.strategy import ConsistencySettings

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


_NONE = np.zeros(0, np.int64)


class LocalTable(Protocol):
    """A copy of one table."""

    @property
    def owes(self) -> bool:
        """True if the copies hold updates that the servers do not have."""

    def __len__(self) -> int:
        """Return rows that are copied; 0 of a dense table."""

    def touch(self, ids: Ids) -> None:
        """Note ids that a push has named."""

    def take(self, share: float) -> tuple[Floats, Ids | None]:
        """Return this share of the unsent updates, and the ids of their rows."""

    def expire(self) -> None:
        """Read it anew: the servers may hold something else."""

    def settle(self) -> None:
        """Owe nothing: the copy is what the servers hold."""

    def forget(self) -> None:
        """Drop the copies, of which nothing is owed."""


class LocalDenseTable:
    """A dense table and the base of what it has learned."""

    def __init__(self, table: DenseTable) -> None:
        self._table = table
        self._base = values_of(table)

    @property
    def owes(self) -> bool:
        return bool((values_of(self._table) != self._base).any())

    def __len__(self) -> int:
        return 0

    def touch(self, ids: Ids) -> None:
        pass

    def take(self, share: float) -> tuple[Floats, Ids | None]:
        delta = (values_of(self._table) - self._base) * np.float32(share)
        self._base = values_of(self._table) if share == 1.0 else self._base + delta
        return delta.reshape(self._table.spec.shape), None

    def refresh(self, value: Floats) -> None:
        """Take the value that the servers hold, float32 [m]."""
        set_values(self._table, value + (values_of(self._table) - self._base))
        self._base = value.copy()

    def expire(self) -> None:
        pass

    def settle(self) -> None:
        self._base = values_of(self._table)

    def forget(self) -> None:
        pass


class LocalSparseTable:
    """Rows of a sparse table, the base of what they have learned, and which of them are up to date."""

    def __init__(self, local: EmbeddedRuntime, spec: TableSpec) -> None:
        self._local = local
        self._spec = spec
        self._bases = dataclasses.replace(
            spec, rule=make_rule("sgd", {}), decay=DecaySpec(), every_row=False
        )
        self._base = SparseTable(self._bases)
        self._fresh = _NONE  # ascending
        self._touched: list[Ids] = []
        self._owing = _NONE  # of earlier exchanges

    @property
    def _table(self) -> SparseTable:
        table = self._local.table(self._spec.key)
        assert isinstance(table, SparseTable)
        return table

    @property
    def owes(self) -> bool:
        return bool(self._touched) or len(self._owing) > 0

    def __len__(self) -> int:
        return max(len(self._base), len(self._table))

    def touch(self, ids: Ids) -> None:
        self._touched.append(_distinct(ids))

    def stale(self, ids: Ids) -> Ids:
        """Return those of the ids, each once, that have not been read since the last exchange."""
        ids = _distinct(ids)
        if not len(self._fresh):
            return ids
        at = np.minimum(np.searchsorted(self._fresh, ids), len(self._fresh) - 1)
        unread: Ids = ids[self._fresh[at] != ids]
        return unread

    def refresh(self, ids: Ids, rows: Floats) -> None:
        """Take the rows [n, dim] that the servers hold, of the ids [n], each once."""
        base, mine = weights_of(self._base, ids), weights_of(self._table, ids)
        differs = (rows != base).any(axis=1)
        if differs.any():
            set_rows(self._table, ids[differs], rows[differs] + (mine[differs] - base[differs]))
            set_rows(self._base, ids[differs], rows[differs])
        # Two ascending runs, which a stable sort merges.
        self._fresh = np.sort(np.concatenate([self._fresh, np.sort(ids)]), kind="stable")

    def take(self, share: float) -> tuple[Floats, Ids | None]:
        """A part of it of rows pushed since the last exchange, all of it of any rows."""
        batches = [*self._touched, *([self._owing] if share == 1.0 else [])]
        if self._spec.every_row and batches:
            batches = [self._table.ids()]
        ids = _distinct(np.concatenate(batches)) if batches else _NONE
        base, mine = weights_of(self._base, ids), weights_of(self._table, ids)
        delta = (mine - base) * np.float32(share)
        differs = (delta != 0).any(axis=1)
        ids, delta, base, mine = ids[differs], delta[differs], base[differs], mine[differs]
        if len(ids):
            set_rows(self._base, ids, mine if share == 1.0 else base + delta)
        self._owing = _NONE if share == 1.0 else _distinct(np.concatenate([self._owing, ids]))
        self._touched.clear()
        self._fresh = _NONE
        return delta, ids

    def expire(self) -> None:
        self._fresh = _NONE

    def settle(self) -> None:
        self._base = SparseTable(self._bases)
        ids = self._table.ids()
        set_rows(self._base, ids, weights_of(self._table, ids))
        self._fresh, self._owing = _NONE, _NONE
        self._touched.clear()

    def forget(self) -> None:
        self._table.remove(self._table.ids())
        self._base = SparseTable(self._bases)
        self._fresh, self._owing = _NONE, _NONE


def _distinct(ids: Ids) -> Ids:
    """Return each id once."""
    unique: Ids = dedup(np.ascontiguousarray(ids, np.int64), 1).unique[0]
    return unique


class GeoRuntime(ForwardingRuntime):
    """A runtime that trains on copies of a cluster's tables.

    Optimizer state is each worker's own; the servers hold weights, and optimizer state as it was before
    geo mode.

    Args:
        fleet: The cluster, in geo mode.
        settings: Exchange interval and number of rows to copy.
    """

    def __init__(self, fleet: Runtime, settings: ConsistencySettings) -> None:
        super().__init__(fleet)
        self._settings = settings
        self._local = EmbeddedRuntime(watch=getattr(fleet, "watch", None))
        self._copies: dict[int, LocalTable] = {}
        self._steps = 0  # since the last exchange
        self._samples = 0
        self._loss: float | None = None
        for spec in fleet.specs().values():
            self._copy(spec)

    # -- training ------------------------------------------------------------------------------

    @override
    def create(self, spec: TableSpec, value: Floats | None = None) -> int:
        if spec.pushed_scores:
            raise ConfigError(
                f"table {spec.name!r} counts shows and clicks, which do not travel in geo mode; "
                "use another mode or another entry"
            )
        key = self._fleet.create(spec, value)
        self._copy(spec)
        return key

    @override
    def open(self, name: str) -> TableSpec:
        spec = self._fleet.open(name)
        self._copy(spec)
        return spec

    def _copy(self, spec: TableSpec) -> None:
        """Begin with what the servers hold, of rows without their optimizer state."""
        if spec.key in self._copies or spec.rule.counts:
            return  # what is counted goes straight to the servers
        mine = dataclasses.replace(spec, entry=None, device=None, precision="float32")
        if spec.kind == "dense":
            state = self._fleet.read_table(spec.key)
            self._local.create(mine, state.values[0])
            self._local.write_table(spec.key, state)
            table = self._local.table(spec.key)
            assert isinstance(table, DenseTable)
            self._copies[spec.key] = LocalDenseTable(table)
        else:
            self._local.create(mine)
            self._copies[spec.key] = LocalSparseTable(self._local, mine)

    def pull(self, reads: Sequence[Read]) -> list[Floats]:
        """Rows come from the servers when they are first read after an exchange."""
        ids_by_table: dict[int, list[Ids]] = {}
        for read in reads:
            if read.ids is not None and read.table in self._copies:
                ids_by_table.setdefault(read.table, []).append(np.asarray(read.ids).reshape(-1))
        self._refresh(ids_by_table)
        return self._local.pull(reads)

    def _refresh(self, ids_by_table: dict[int, list[Ids]]) -> None:
        stale = {
            key: self._rows(key).stale(np.concatenate(ids)) for key, ids in ids_by_table.items()
        }
        reads = [Read(key, ids) for key, ids in stale.items() if len(ids)]
        if reads:
            for read, rows in zip(reads, self._fleet.pull(reads), strict=True):
                assert read.ids is not None
                self._rows(read.table).refresh(read.ids, rows)

    def _rows(self, key: int) -> LocalSparseTable:
        copy = self._copies[key]
        assert isinstance(copy, LocalSparseTable)
        return copy

    def push(
        self, gradients: Sequence[Gradient], *, samples: int = 0, loss: float | None = None
    ) -> CompletedPush:
        """Updates the copies; every k-th exchanges."""
        self._local.push([gradient.untravelled() for gradient in gradients], loss=loss)
        for gradient in gradients:
            if gradient.ids is not None:
                self._copies[gradient.table].touch(np.asarray(gradient.ids).reshape(-1))
        self._samples, self._loss = self._samples + samples, loss
        self._steps += 1
        if self._steps >= self._settings.k_steps:
            self._exchange(1.0 / self.worker_num)
        return CompletedPush()

    # -- exchanging ----------------------------------------------------------------------------

    def _exchange(self, share: float) -> None:
        """Send this share of what was learned, then read dense tables anew."""
        full = [copy for copy in self._copies.values() if len(copy) > self._settings.copied_rows]
        gradients = [
            Gradient(key, *copy.take(1.0 if copy in full else share))
            for key, copy in self._copies.items()
        ]
        refusal = None
        try:
            self._fleet.push(gradients, samples=self._samples, loss=self._loss)
        except (
            UsageError
        ) as error:  # a server has refused an earlier one, and this one has not left
            refusal = error
            self._fleet.push(gradients, samples=self._samples, loss=self._loss)
        self._steps = self._samples = 0
        try:
            self._read_dense()
        finally:
            for copy in full:
                copy.forget()
        if refusal is not None:
            raise refusal

    def _read_dense(self) -> None:
        dense = {
            key: copy for key, copy in self._copies.items() if isinstance(copy, LocalDenseTable)
        }
        values = self._fleet.pull([Read(key) for key in dense]) if dense else []
        for copy, value in zip(dense.values(), values, strict=True):
            copy.refresh(value.reshape(-1))

    def flush(self, timeout: float | None = None) -> None:
        """Sends the whole rest."""
        if any(copy.owes for copy in self._copies.values()):
            self._exchange(1.0)
        self._fleet.flush(timeout)

    def barrier(self, timeout: float | None = None) -> None:
        """Afterwards every worker's copies are what the servers hold."""
        self.flush(timeout)
        self._fleet.barrier(timeout)
        self._read_all()

    @override
    def all_reduce(self, value: NDArray[Any], mode: str = "sum") -> NDArray[Any]:
        self.flush()
        result = self._fleet.all_reduce(value, mode)
        self._read_all()
        return result

    def _read_all(self) -> None:
        self._read_dense()
        for copy in self._copies.values():
            copy.expire()

    # -- whole tables --------------------------------------------------------------------------

    @override
    def read_table(self, table: int) -> TableState:
        self.flush()
        return self._fleet.read_table(table)

    @override
    def save(self, path: str, *, delta: bool = False, base: bool = False) -> str:
        self.flush()
        return self._fleet.save(path, delta=delta, base=base)

    @override
    def write_table(self, table: int, state: TableState) -> None:
        """Set a table; the other workers read it at their next exchange."""
        self.flush()
        self._fleet.write_table(table, state)
        self._local.write_table(table, state)
        self._copies[table].settle()

    @override
    def load(self, path: str) -> None:
        """Load all tables; the other workers read them at their next exchange."""
        self.flush()
        self._fleet.load(path)
        self._local.close()
        self._local, self._copies = EmbeddedRuntime(watch=getattr(self._fleet, "watch", None)), {}
        for spec in self._fleet.specs().values():
            self._copy(spec)

    @override
    def shrink(
        self, table: int = 0, threshold: float | None = None, unseen: int | None = None
    ) -> int:
        self.flush()
        count = self._fleet.shrink(table, threshold, unseen)
        self._read_all()
        return count

    def release(self) -> None:
        """Let go of the copies; the fleet goes on. Flush before."""
        self._local.close()

    @override
    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._fleet.close()
            self.release()
