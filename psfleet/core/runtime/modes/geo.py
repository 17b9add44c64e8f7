"""Geo mode: each worker trains on local copies of the tables and adds its changes to the servers' tables.

As in the geo mode of Paddle, a worker sends after every `k_steps` steps, for each weight,

    delta = (copy - base) / number of workers

The copy is the weight in the worker, and the base is the worker's knowledge of the weight on the server. The
server adds delta to its weight, and the worker adds delta to the base. When the worker later reads the
server's value,

    copy = value + (copy - base)        base = value

so that changes that were not sent yet stay in the copy. Over time all changes reach the servers; `flush`,
collectives and the end of the script send the remainder (copy - base) at once, undivided.

One thing differs from Paddle, where every worker has a copy of every row. Here a row is copied when it is
first read, and refreshed when it is first read after an exchange. When a table has more than `copied_rows`
copies, its remainders are sent and all its copies are dropped, including their optimizer state.

Everything runs in the thread that trains. `half_async.py` is a mode with a thread of its own.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.base.errors import ConfigError, UsageError, joined_refusals
from psfleet.core.engine.gradient_checks import check_gradients
from psfleet.core.engine.kernels.dedup import dedup
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import CompletedPush, Gradient, Read, TableState
from psfleet.core.engine.schema.table import DecaySpec, TableSpec
from psfleet.core.engine.tables.assigned_weights import set_rows, set_values, values_of, weights_of
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.core.engine.tables.sparse import SparseTable
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.runtime_bases import ForwardingRuntime, pull_parts
from psfleet.core.runtime.script_runtime import ClusterLike
from psfleet.core.runtime.strategy import ConsistencySettings

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


_NONE = np.zeros(0, np.int64)


class LocalTable(Protocol):
    """A worker's copy of one table, and its base: the servers' values as far as the worker knows."""

    @property
    def owes(self) -> bool:
        """True if the copies contain updates that the servers do not have."""

    def __len__(self) -> int:
        """Return the number of copied rows, which is 0 for a dense table."""

    def touch(self, ids: Ids) -> None:
        """Record the ids of a push, because only rows that were pushed can differ from their base."""

    def delta(self, share: float) -> "Delta":
        """Return a share (0 to 1) of the unsent updates. They count as unsent until `commit`."""

    def commit(self, delta: "Delta") -> None:
        """Add a delta that was pushed to the base. The copies must not have changed since `delta()`."""

    def expire(self) -> None:
        """Mark the copies as out of date, so that the next read of a row pulls it from the servers."""

    def rebase(self) -> None:
        """Set the base to the copies, because the servers and the copies were just set to the same values."""

    def drop_copies(self) -> None:
        """Drop the copies.

        Call it only after a commit of `delta(1.0)`, because unsent updates would be lost.
        """


@dataclasses.dataclass(frozen=True)
class Delta:
    """Updates of one table to send to the servers.

    Attributes:
        values: Difference between the copy and its base, times the share; rows [n, dim] of a sparse table.
        ids: int64 [n], or None for a dense table.
        base: New base, once the servers have added the values: float32 of the same shape.
        is_full: True if no update remains unsent.
    """

    values: Floats
    ids: Ids | None
    base: Floats
    is_full: bool


class LocalDenseTable:
    """Copy of a dense table, and its base: the servers' values as far as the worker knows (float32, flat)."""

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

    def delta(self, share: float) -> Delta:
        weights = values_of(self._table)
        values = (weights - self._base) * np.float32(share)
        # base + (copy - base) may be rounded to another number than copy; `owes` would then stay true.
        base = weights if share == 1.0 else self._base + values
        return Delta(values.reshape(self._table.spec.shape), None, base, share == 1.0)

    def commit(self, delta: Delta) -> None:
        self._base = delta.base

    def refresh(self, value: Floats) -> None:
        """Set the copy to the servers' value, float32 [m], plus the changes that were not sent yet."""
        set_values(self._table, value + (values_of(self._table) - self._base))
        self._base = value.copy()

    def expire(self) -> None:
        pass

    def rebase(self) -> None:
        self._base = values_of(self._table)

    def drop_copies(self) -> None:
        pass


class LocalSparseTable:
    """Copied rows of a sparse table, their bases, and the ids that were read since the last exchange.

    An exchange sends changes to the servers, and happens every `k_steps` steps. The base of a row is the
    servers' value as far as the worker knows. Bases are a second sparse table with
    the same initializer. An id without a row therefore has the same value in both tables, and a delta of 0.

    Args:
        local: Runtime that trains the copies.
    """

    def __init__(self, local: EmbeddedRuntime, spec: TableSpec) -> None:
        self._local = local
        self._spec = spec
        self._bases = dataclasses.replace(
            spec, rule=make_rule("sgd", {}), decay=DecaySpec(), every_row=False
        )
        self._base = SparseTable(self._bases)
        self._fresh = _NONE  # ids read since the last exchange, ascending
        self._touched: list[Ids] = []
        self._owing = _NONE  # ids of which an earlier exchange has sent only a share

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
        """Return the ids, each once, that have not been read since the last exchange with the servers."""
        ids = _distinct(ids)
        if not len(self._fresh):
            return ids
        # Binary search in the ascending ids. An id above the last one gets the last position, and differs.
        at = np.minimum(np.searchsorted(self._fresh, ids), len(self._fresh) - 1)
        unread: Ids = ids[self._fresh[at] != ids]
        return unread

    def refresh(self, ids: Ids, rows: Floats) -> None:
        """Set copies to the servers' rows [n, dim] of distinct ids [n], plus changes not sent yet."""
        # A row that equals its base needs no write. So ids that only have initial values get no row.
        base, local_rows = weights_of(self._base, ids), weights_of(self._table, ids)
        differs = (rows != base).any(axis=1)
        if differs.any():
            set_rows(
                self._table, ids[differs], rows[differs] + (local_rows[differs] - base[differs])
            )
            set_rows(self._base, ids[differs], rows[differs])
        # Both parts are ascending, and a stable sort merges them fast.
        self._fresh = np.sort(np.concatenate([self._fresh, np.sort(ids)]), kind="stable")

    def delta(self, share: float) -> Delta:
        # Send a share of the rows pushed since the last exchange. Only a full exchange also sends the
        # remainders of earlier exchanges: otherwise each row would be sent in every exchange after its push.
        batches = [*self._touched, *([self._owing] if share == 1.0 else [])]
        if self._spec.every_row and batches:
            batches = [self._table.ids()]
        ids = _distinct(np.concatenate(batches)) if batches else _NONE
        base, local_rows = weights_of(self._base, ids), weights_of(self._table, ids)
        values = (local_rows - base) * np.float32(share)
        differs = (values != 0).any(axis=1)
        ids, values, base, local_rows = (
            ids[differs],
            values[differs],
            base[differs],
            local_rows[differs],
        )
        return Delta(values, ids, local_rows if share == 1.0 else base + values, share == 1.0)

    def commit(self, delta: Delta) -> None:
        assert delta.ids is not None
        if len(delta.ids):
            set_rows(self._base, delta.ids, delta.base)
        self._owing = (
            _NONE if delta.is_full else _distinct(np.concatenate([self._owing, delta.ids]))
        )
        self._touched.clear()
        self._fresh = _NONE

    def expire(self) -> None:
        self._fresh = _NONE

    def rebase(self) -> None:
        self._base = SparseTable(self._bases)
        ids = self._table.ids()
        set_rows(self._base, ids, weights_of(self._table, ids))
        self._fresh, self._owing = _NONE, _NONE
        self._touched.clear()

    def drop_copies(self) -> None:
        self._table.remove(self._table.ids())
        self._base = SparseTable(self._bases)
        self._fresh, self._owing = _NONE, _NONE


def _distinct(ids: Ids) -> Ids:
    unique: Ids = dedup(np.ascontiguousarray(ids, np.int64), 1).unique[0]
    return unique


class GeoRuntime(ForwardingRuntime):
    """Runtime of geo mode, which trains on copies of a cluster's tables.

    Each worker has its own optimizer state. The servers store weights; their optimizer state does not change
    in geo mode.

    Args:
        settings: Number of steps between exchanges, and the number of copied rows above which a table drops
            its copies.
    """

    def __init__(self, fleet: ClusterLike, settings: ConsistencySettings) -> None:
        super().__init__(fleet)
        self._settings = settings
        self._watch = fleet.watch
        self._local = EmbeddedRuntime(watch=self._watch)
        self._copies: dict[int, LocalTable] = {}
        self._steps = 0  # since the last exchange
        self._samples = 0
        self._loss: float | None = None
        self._refusals: list[UsageError] = []  # of servers, not raised yet
        for spec in fleet.specs().values():
            self._copy(spec)

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
        """Make the local copy of a table.

        A dense table is copied at once, with its optimizer state. Rows of a sparse table are copied when they
        are first read, without the servers' optimizer state.
        """
        if spec.key in self._copies or spec.rule.counts:
            return  # counts are pushed to the servers directly
        # Admission, devices and storage precision only matter on the servers; copies are plain float32 rows.
        local_spec = dataclasses.replace(spec, entry=None, device=None, precision="float32")
        if spec.kind == "dense":
            state = self._fleet.read_table(spec.key)
            self._local.create(local_spec, state.values[0])
            self._local.write_table(spec.key, state)
            table = self._local.table(spec.key)
            assert isinstance(table, DenseTable)
            self._copies[spec.key] = LocalDenseTable(table)
        else:
            self._local.create(local_spec)
            self._copies[spec.key] = LocalSparseTable(self._local, local_spec)

    @override
    def pull(self, reads: Sequence[Read]) -> list[Floats]:
        """Return values of the copies. Rows not read since the last exchange with the servers are pulled.

        Tables of counts (metrics) have no copies and are pulled from the servers.
        """
        ids_by_table: dict[int, list[Ids]] = {}
        for read in reads:
            if read.ids is not None and read.table in self._copies:
                ids_by_table.setdefault(read.table, []).append(np.asarray(read.ids).reshape(-1))
        self._refresh(ids_by_table)
        return pull_parts(reads, self._local, self._fleet)

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

    @override
    def push(
        self, gradients: Sequence[Gradient], *, samples: int = 0, loss: float | None = None
    ) -> CompletedPush:
        """Update the copies, and exchange with the servers at every `k_steps`-th push."""
        # All checks come before the first change, so a push that raises has changed nothing.
        check_gradients(self._spec_of, gradients)
        self._raise_refusals()
        counts = [gradient for gradient in gradients if gradient.table not in self._copies]
        if counts:
            self._fleet.push(counts)
        gradients = [gradient for gradient in gradients if gradient.table in self._copies]
        self._local.push([gradient.untravelled() for gradient in gradients], loss=loss)
        for gradient in gradients:
            if gradient.ids is not None:
                self._copies[gradient.table].touch(np.asarray(gradient.ids).reshape(-1))
        self._samples, self._loss = self._samples + samples, loss
        self._steps += 1
        if self._steps >= self._settings.k_steps:
            self._exchange(1.0 / self.worker_num)
        return CompletedPush()

    def _exchange(self, share: float) -> None:
        """Send this share of the unsent changes of all tables, then read the dense tables.

        A table with more than `copied_rows` copies sends all of its changes, and its copies are dropped.
        """
        full = [copy for copy in self._copies.values() if len(copy) > self._settings.copied_rows]
        deltas = {
            key: copy.delta(1.0 if copy in full else share) for key, copy in self._copies.items()
        }
        gradients = [Gradient(key, delta.values, delta.ids) for key, delta in deltas.items()]
        send = partial(self._fleet.push, gradients, samples=self._samples, loss=self._loss)
        self._in_spite_of_refusals(send)
        # The bases change only now: if the push has failed, the next exchange sends the same updates.
        for key, delta in deltas.items():
            self._copies[key].commit(delta)
        self._steps = self._samples = 0
        try:
            self._in_spite_of_refusals(self._read_dense)
        finally:
            for copy in full:
                copy.drop_copies()

    def _in_spite_of_refusals(self, call: Callable[[], object]) -> None:
        """Make a call of the cluster's runtime, again if it raises a server's refusal of an earlier push.

        The copies have changed already, so the refusal is kept for the script's next call.
        """
        try:
            call()
        except UsageError as error:
            call()
            self._refusals.append(error)

    def _raise_refusals(self) -> None:
        refusals, self._refusals = self._refusals, []
        if refusals:
            raise joined_refusals(refusals)

    def _read_dense(self) -> None:
        dense = {
            key: copy for key, copy in self._copies.items() if isinstance(copy, LocalDenseTable)
        }
        values = self._fleet.pull([Read(key) for key in dense]) if dense else []
        for copy, value in zip(dense.values(), values, strict=True):
            copy.refresh(value.reshape(-1))

    @override
    def flush(self, timeout: float | None = None) -> None:
        """Send all changes that the servers do not have, and wait until they are applied."""
        if any(copy.owes for copy in self._copies.values()):
            self._exchange(1.0)
        self._raise_refusals()
        self._fleet.flush(timeout)

    @override
    def barrier(self, timeout: float | None = None) -> None:
        """Wait for all workers. Afterwards each worker's copies are equal to the servers' values."""
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
        """Overwrite a table. The other workers read the new values at their next exchange."""
        self.flush()
        self._fleet.write_table(table, state)
        if table in self._copies:
            self._local.write_table(table, state)
            self._copies[table].rebase()

    @override
    def load(self, path: str) -> None:
        """Load all tables. The other workers read the new values at their next exchange."""
        self.flush()
        self._fleet.load(path)
        self._local.close()
        self._local, self._copies = EmbeddedRuntime(watch=self._watch), {}
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
        """Drop the copies and leave the cluster's runtime open. Call `flush` before."""
        self._local.close()

    @override
    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._fleet.close()
            self.release()
