"""SparseTable, DenseTable and ClientFeatures: the objects that `Client` opens and a script pulls and pushes.

They convert a script's arrays to the runtime's reads and gradients. In a call for several tables, all
arguments are checked before anything is sent.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Generic, NoReturn, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from psfleet.core.base.errors import ShapeError, UsageError
from psfleet.core.base.validation.annotations import checked
from psfleet.core.engine.eviction_reader import EvictionReader
from psfleet.core.engine.gradient_checks import as_float32, as_ids
from psfleet.core.engine.gradients import PooledGradient, as_numbers, gradient_of
from psfleet.core.engine.runtime_interface import (
    Gradient,
    PendingPull,
    PendingPush,
    PooledIds,
    Read,
    Runtime,
    as_asked,
    read_of,
)
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.graph.parameters.parameter_client import write_weights
from psfleet.data.feature_sets.feature_lookup import FeatureLookup
from psfleet.data.feature_sets.feature_set import FeatureSet
from psfleet.optimizer.optimizer import Optimizer

Floats = NDArray[np.float32]
T = TypeVar("T", bound="ClientTable")


@checked
class ClientTable:
    """Base of SparseTable and DenseTable, with methods that calls for several tables use.

    Not an ABC, although some methods are abstract: `isinstance` of an ABC takes 2 us, for each table of each
    call.

    Attributes:
        optimizer: Optimizer that has the learning rate of each push, or None if the table is only read.
    """

    def __init__(self, runtime: Runtime, spec: TableSpec, optimizer: Optimizer | None) -> None:
        self._runtime = runtime
        self.spec = spec
        self.optimizer = optimizer

    def _rate(self) -> float:
        """Return the learning rate of a push.

        Raises:
            UsageError: The table is only read.
        """
        if self.optimizer is None:
            self._refuse("pushed to")
        return self.optimizer.get_lr()

    def _refuse(self, action: str) -> NoReturn:
        raise UsageError(
            f"table {self.spec.name!r} was opened without an optimizer, so it can be read and not {action}; "
            f"give {self.spec.kind}_table() its optimizer"
        )

    def _write(self, values: Any, ids: NDArray[np.int64] | None = None) -> None:
        """Overwrite weights of the given ids, or of the whole dense table."""
        if self.optimizer is None:
            self._refuse("written to")
        write_weights(self._runtime, self.spec, values, ids)

    def _read(self, ids: Any) -> Read:
        """Return the table's part of a pull.

        Raises:
            UsageError: `ids` are not valid for this table.
        """
        raise NotImplementedError

    def _gradient(self, part: Any) -> Gradient:
        """Return the table's part of a push.

        Raises:
            UsageError: `part` is not valid for this table.
        """
        raise NotImplementedError


class TablesAhead(Generic[T]):
    """Result of `Client.pull_ahead`: values of several tables that may not have arrived yet."""

    def __init__(self, ids: Mapping[T, Any], reads: Sequence[Read], pull: PendingPull) -> None:
        self._asked = dict(ids)
        self._reads = reads
        self._awaited = pull

    def wait(self) -> dict[T, Floats]:
        """Wait for the values, and return them by table as `Client.pull` does."""
        return by_table(self._asked, self._reads, self._awaited.wait())


def by_table(
    ids: Mapping[T, Any], reads: Sequence[Read], values: Sequence[Floats]
) -> dict[T, Floats]:
    """Return a mapping from table to values, in the order of the call.

    Args:
        ids: Argument of `Client.pull`.
        reads: Result of `reads_of(runtime, ids)`.
    """
    return {
        table: as_asked(part, read, value)
        for (table, part), read, value in zip(ids.items(), reads, values, strict=True)
    }


def reads_of(runtime: Runtime, ids: Mapping[T, Any]) -> list[Read]:
    """Convert the argument of `Client.pull` to reads for the runtime.

    Raises:
        UsageError: A key or its ids are not valid. The error names the table.
    """
    return [table._read(part) for table, part in _parts(runtime, ids, "pull")]


def gradients_of(runtime: Runtime, gradients: Mapping[T, Any]) -> list[Gradient]:
    """Convert the argument of `Client.push` to gradients for the runtime.

    Raises:
        UsageError: A key or its gradient is not valid. The error names the table.
    """
    return [table._gradient(part) for table, part in _parts(runtime, gradients, "push")]


def _parts(runtime: Runtime, parts: Mapping[T, Any], call: str) -> Sequence[tuple[T, Any]]:
    for table in parts:
        if not isinstance(table, ClientTable):
            raise UsageError(
                f"a key of this {call} is {table!r}; it must be a table, "
                "as sparse_table() and dense_table() return it"
            )
        if table._runtime is not runtime:
            raise UsageError(
                f"table {table.spec.name!r} belongs to another client; {call} it with that one"
            )
    return list(parts.items())


@checked
class RowsAhead:
    """Result of `SparseTable.pull_ahead`: rows that may not have arrived yet."""

    def __init__(self, pull: PendingPull) -> None:
        self._awaited = pull

    def wait(self) -> Floats:
        """Wait for the rows and return them: float32 [*ids.shape, dim]."""
        return self._awaited.wait()[0]


@checked
class SparseTable(ClientTable):
    """Table of rows by id, opened by `Client.sparse_table`.

        rows = users.pull(ids)
        users.push(ids, grads).wait()

    Without an optimizer the table can only be read.
    """

    def pull(self, ids: ArrayLike) -> Floats:
        """Return the current rows of these ids: float32 [*ids.shape, dim].

        Args:
            ids: int64 of any shape, repeats allowed. An id that was never pushed has its initial values,
                which depend only on the id and the seed. A pull creates no row.
        """
        return self._runtime.pull([self._read(ids)])[0]

    def pull_ahead(self, ids: ArrayLike) -> "RowsAhead":
        """Start to pull the rows of the next batch, while the script computes the present batch.

            coming = table.pull_ahead(first_ids)
            for ids, next_ids in zip(batches, batches[1:]):
                rows = coming.wait()
                coming = table.pull_ahead(next_ids)  # sent together with the previous push
                table.push(ids, gradients(rows))

        Call it before the push of the present batch. In async mode the rows then contain all of this worker's
        pushes except that one. In the other modes and embedded it pulls at once and waits for the rows.
        """
        return RowsAhead(self._runtime.pull_ahead([self._read(ids)]))

    def push(
        self,
        ids: ArrayLike,
        grads: ArrayLike,
        shows: ArrayLike | None = None,
        clicks: ArrayLike | None = None,
    ) -> PendingPush:
        """Send gradients, which the servers apply with the optimizer's current learning rate.

        Args:
            ids: int64 of any shape. Gradients of repeated ids are summed in the given order.
            grads: float32 [*ids.shape, dim], the shape that `pull` returns.
            shows: Number of times that each id was shown: float32 [*ids.shape], or None for once each. Only
                for a table with a ShowClickEntry, which counts shows and clicks.
            clicks: Number of times that each id was clicked: float32 [*ids.shape], or None for 0. Only for
                such a table.

        Returns:
            The outstanding push; its `wait(timeout)` returns when every server has acknowledged the push.

        Raises:
            IdError, ShapeError: The ids, or the gradients for them, are not valid. Nothing was sent.
            UsageError: A server has refused an earlier push. Nothing was sent; push these gradients again.
        """
        return self._runtime.push([self._rows_gradient(ids, grads, shows, clicks)])

    def write(self, ids: ArrayLike, rows: ArrayLike) -> None:
        """Overwrite rows, for example with values trained elsewhere. Their optimizer state is reset.

        The rows change at once, outside of any round. If several workers train, only one worker should write,
        between two barriers. Rows of other ids keep their values.

        Args:
            ids: int64 of any shape, without repeats.
            rows: float32 [*ids.shape, dim], the shape that `pull` returns.

        Raises:
            IdError, ShapeError: The ids, or the rows for them, are not valid. Nothing was written.
            UsageError: The table was opened without an optimizer, or may not hold that many rows.
        """
        where = f"table {self.spec.name!r}"
        keys, values = as_ids(ids, where), as_numbers(rows, f"the rows for {where}")
        if values.shape != (*keys.shape, self.spec.dim):
            raise ShapeError(
                f"the rows for {where} are {values.shape}; they must be {(*keys.shape, self.spec.dim)}"
            )
        self._write(values.reshape(-1, self.spec.dim), keys.reshape(-1))

    def evictions(self, position: Sequence[int] = ()) -> EvictionReader:
        """Return a reader of the ids whose rows are evicted from this table.

        Args:
            position: Attribute `position` of an earlier reader, to continue there, or () to begin with the
                oldest evictions that the servers still store.
        """
        return EvictionReader(self._runtime, self.spec, position)

    def _read(self, ids: Any) -> Read:
        if isinstance(ids, PooledIds):
            return read_of(self.spec.key, ids, self._runtime.pools)
        return Read(self.spec.key, as_ids(ids, self.spec.label))

    def _gradient(self, part: Any) -> Gradient:
        """Convert a tuple of `push`'s arguments, or a gradient of pooled rows, to the runtime's form."""
        if isinstance(part, PooledGradient):
            gradient = gradient_of(self.spec.key, part, self._rate())
            return gradient if self._runtime.pools else gradient.spread()
        if not isinstance(part, tuple) or not 2 <= len(part) <= 4:
            raise ShapeError(
                f"table {self.spec.name!r} is sparse; its part of a push is a tuple (ids, grads) or "
                f"(ids, grads, shows, clicks), not {_described(part)}"
            )
        return self._rows_gradient(*part)

    def _rows_gradient(
        self,
        ids: ArrayLike,
        grads: ArrayLike,
        shows: ArrayLike | None = None,
        clicks: ArrayLike | None = None,
    ) -> Gradient:
        keys = as_ids(ids, self.spec.label)
        values = _as_gradient(grads, self.spec)
        shape = keys.shape
        if len(shape) > 1 and values.shape == (*shape, self.spec.dim):
            keys, values = keys.reshape(-1), values.reshape(-1, self.spec.dim)
        if shows is not None or clicks is not None:
            values = self._with_scores(values, shape, shows, clicks)
        return Gradient(self.spec.key, values, keys, self._rate())

    def _with_scores(
        self,
        grads: Floats,
        shape: tuple[int, ...],
        shows: ArrayLike | None,
        clicks: ArrayLike | None,
    ) -> Floats:
        if not self.spec.pushed_scores:
            raise UsageError(
                f"table {self.spec.name!r} counts no shows and clicks; make it with a ShowClickEntry"
            )
        columns = [
            self._column(1 if shows is None else shows, "shows", shape),
            self._column(0 if clicks is None else clicks, "clicks", shape),
        ]
        return np.concatenate([grads, *columns], axis=1)

    def _column(self, numbers: ArrayLike, quantity: str, shape: tuple[int, ...]) -> Floats:
        """Broadcast numbers to the ids; return them as one column, float32 [n, 1]."""
        array = as_numbers(numbers, f"the {quantity} for table {self.spec.name!r}")
        try:
            return np.broadcast_to(array.astype(np.float32), shape).reshape(-1, 1)
        except ValueError:
            raise ShapeError(
                f"the {quantity} for table {self.spec.name!r} are {array.shape}, the ids {shape}; "
                "give one number for each id"
            ) from None


@checked
class DenseTable(ClientTable):
    """Table that holds one array, opened by `Client.dense_table`.

        value = bias.pull()
        bias.push(gradient).wait()

    Without an optimizer the table can only be read.
    """

    def pull(self) -> Floats:
        """Return the current value: float32 of the table's shape."""
        return self._runtime.pull([self._read(None)])[0]

    def push(self, grad: ArrayLike) -> PendingPush:
        """Send a gradient of the table's shape.

        `wait()` on the result waits until all servers acknowledge it.
        """
        return self._runtime.push([self._gradient(grad)])

    def write(self, value: ArrayLike) -> None:
        """Overwrite the whole array at once. Its optimizer state does not change."""
        where = f"table {self.spec.name!r}"
        values = as_numbers(value, f"the value of {where}")
        if values.shape != self.spec.shape:
            raise ShapeError(
                f"the value of {where} is {values.shape}; it must be {self.spec.shape}"
            )
        self._write(values)

    def _read(self, ids: Any) -> Read:
        if ids is not None:
            raise ShapeError(
                f"table {self.spec.name!r} is dense and is pulled whole; "
                f"give None for it, not {_described(ids)}"
            )
        return Read(self.spec.key)

    def _gradient(self, part: Any) -> Gradient:
        values = _as_gradient(part, self.spec)
        return Gradient(self.spec.key, values, None, self._rate())


class ClientFeatures:
    """Tables of a feature set, opened by `Client.features`.

        features = ps.features(feature_set)
        batch = features.batch({"user": users, "friends": Jagged(ids, lengths)})
        pooled = ps.pull({**batch.pooled, bias: None})  # one call to each server
        values = batch.values(pooled)                   # float32 arrays by feature
        ...
        ps.push({**batch.pooled_gradients(gradients), bias: slope})

    Here the rows of a feature are pooled (for example summed) per sample. To pool them in the script instead,
    pull `batch.ids`, then use `batch.pool` and `batch.gradients`.
    """

    def __init__(self, features: FeatureSet, tables: Mapping[str, SparseTable]) -> None:
        self.features = features
        self.tables = dict(tables)

    def batch(self, batch: Any) -> FeatureLookup[SparseTable]:
        """Return the ids of a batch by table, as arguments of `Client.pull` and `Client.push`.

            batch = features.batch({"user": [7, 8], "friends": [[1, 2], []]})

        Args:
            batch: Maps the name of a feature to its ids: an array [n] or [n, k], a list of lists, a mapping
                with `values` and `lengths`, or a `Jagged`, the class with these two arrays. A feature that
                was declared as a Number has values instead of ids. The batch may also be a KeyedJaggedTensor
                of TorchRec. A missing feature has no ids.

        Raises:
            UsageError: The batch does not fit the feature set. The error names the feature.
        """
        return FeatureLookup(self.features, batch, self.tables)


def _as_gradient(value: Any, spec: TableSpec) -> Floats:
    if type(value) is np.ndarray and value.dtype == np.float32:
        return value
    return as_float32(as_numbers(value, f"the gradient for table {spec.name!r}"))


def _described(value: Any) -> str:
    type_name = type(value).__name__
    if isinstance(value, tuple | list):
        return f"a {type_name} of {len(value)}"
    return f"{value!r:.60} ({type_name})"
