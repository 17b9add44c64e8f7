"""Client of a fleet's tables, for scripts that compute their own gradients.

    with psfleet.connect() as ps:
        users = ps.sparse_table("users", dim=16, optimizer=psfleet.optimizer.Ftrl(0.1, l1=1.0))
        rows = users.pull(ids)
        users.push(ids, grads).wait()
        ps.pull({users: ids, items: other_ids})  # several tables in one call; also push and pull_ahead

The same script runs embedded (all tables in its own process), or on the cluster that its environment names.
The table classes are in `client_tables`, and `connect` is in `process_client`.
"""

import functools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from psfleet.core.base.errors import ConfigError, PsfleetError, ShapeError, TableConflict
from psfleet.core.base.validation.annotations import NonNegativeInt, checked
from psfleet.core.client.client_tables import (
    ClientFeatures,
    ClientTable,
    DenseTable,
    SparseTable,
    TablesAhead,
    by_table,
    gradients_of,
    reads_of,
)
from psfleet.core.engine.gradients import as_numbers
from psfleet.core.engine.runtime_interface import (
    ClosedRuntime,
    FollowedCut,
    PendingPush,
    PooledIds,
    ReadVersion,
)
from psfleet.core.engine.schema.entry import Entry
from psfleet.core.engine.schema.table import (
    Device,
    InitializerSpec,
    RowPrecision,
    ServerCount,
    TableSpec,
)
from psfleet.core.graph.execution.model_files import TableNames, folder_of, load, save
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.runtime.process_runtime import current, is_failure
from psfleet.core.runtime.script_runtime import ScriptRuntime
from psfleet.core.runtime.strategy import Settings
from psfleet.data.feature_sets.feature_set import FeatureSet
from psfleet.initializer import Initializer, starting
from psfleet.metrics.fleet_metrics import FleetMetrics, Slices, Tasks
from psfleet.optimizer.lr.scheduler import LRScheduler
from psfleet.optimizer.optimizer import Optimizer, check_outside

if TYPE_CHECKING:
    from psfleet.serving.prediction import CutEvaluation, Predictor

Floats = NDArray[np.float32]
T = TypeVar("T", bound=ClientTable)


_CLOSED = (
    "this client is closed, and so are its tables; use them before close() or inside the `with` block, "
    "or call psfleet.connect() again"
)
_AFTER_FAILURE = 1.0  # seconds that a failed script waits for other workers when it leaves
Table = TypeVar("Table", SparseTable, DenseTable)


@checked
class Client:
    """Opens the tables of a fleet by name. Pulls from and pushes to one or several tables.

        with psfleet.connect() as ps:
            users = ps.sparse_table("users", dim=16, optimizer=psfleet.optimizer.Adam(0.001))

    A client is a context manager: at the end of the block it waits until all pushes are applied, and leaves
    the fleet. All clients that `connect()` makes without an `environment`, and `psfleet.fleet`, are the same
    worker of the fleet. The process leaves the fleet when the last of these clients is closed; after
    `fleet.init()`, when the script ends.

    Args:
        runtime: Access to the tables: embedded, on a cluster, or read-only.
        leave: Function that leaves the fleet. Its arguments are the runtime and the seconds that it may wait
            for other workers, or None for the usual deadline. By default it closes the runtime.
    """

    def __init__(
        self,
        runtime: ScriptRuntime,
        leave: Callable[[ScriptRuntime, float | None], None] | None = None,
    ) -> None:
        self.runtime = runtime
        self._leave = leave or (lambda runtime, _: runtime.close())
        self._tables: weakref.WeakSet[SparseTable | DenseTable] = weakref.WeakSet()

    def sparse_table(
        self,
        name: str,
        dim: int | None = None,
        optimizer: Optimizer | None = None,
        initializer: InitializerSpec | Initializer | None = None,
        seed: NonNegativeInt = 0,
        entry: Entry | None = None,
        device: Device | None = None,
        servers: ServerCount | None = None,
        precision: RowPrecision = "float32",
    ) -> SparseTable:
        """Open a table of rows by id, and create it if no worker has done so yet.

            users = ps.sparse_table("users", dim=16, optimizer=psfleet.optimizer.Adam(0.001))
            users = ps.sparse_table("users")  # an existing table, only to read it

        Without an optimizer the table must exist and can only be read; the other arguments except `dim` are
        then ignored.

        Args:
            name: Name of the table, unique in the fleet.
            dim: Width of a row, 1 to 1024. May be None for a table that is only read.
            optimizer: Optimizer that the servers apply to the table. Each push has the optimizer's learning
                rate at that time.
            initializer: Initial values of a row, from psfleet.initializer. Uniform in [-0.01, 0.01) by
                default.
            seed: Seed of the initializer, if the initializer has no seed.
            entry: Rule that decides which new ids get a row, and which rows are evicted, such as
                psfleet.CountFilterEntry. With None every pushed id gets a row, and no row is evicted.
            device: Memory of the table on the servers, one of the values of --device, which is also the
                default.
            servers: Number of servers that store the table, 1 to 1024. A small table on few servers saves
                calls in each step. None means all servers. For an existing table it has no effect.
            precision: Number format of rows on the servers: "float32", "bfloat16" (for the weights),
                "bfloat16/bfloat16" or "bfloat16/int8" (for weights and optimizer state), see docs/tables.md.
                Pulled and pushed values and all arithmetic are float32.

        Raises:
            ConfigError: The servers do not have that device.
            TableConflict: The table exists with another definition.
            UnknownTable: No optimizer was given, and the table does not exist.
        """
        if optimizer is None:
            shape = None if dim is None else (dim,)
            return self._opened(SparseTable(self.runtime, self._find(name, "sparse", shape), None))
        _check(name, optimizer)
        if dim is None:
            raise ShapeError(f"table {name!r}: dim is None, it must be a whole number")
        start, seed = starting(initializer, (None, int(dim)), seed, f"table {name!r}")
        spec = TableSpec(
            name,
            "sparse",
            (int(dim),),
            optimizer.rule(),
            optimizer.decay(),
            start,
            seed,
            optimizer.every_row,
            entry,
            device,
            servers,
            precision=precision,
        )
        self.runtime.create(spec)
        return self._opened(SparseTable(self.runtime, spec, optimizer))

    def features(self, features: FeatureSet) -> ClientFeatures:
        """Open the tables of a feature set (a model's inputs), and create those that do not exist yet.

            features = ps.features(feature_set)
            batch = features.batch({"user": users, "friends": friends})

        Raises:
            TableConflict: A table exists with another definition.
            UnknownTable: A table has no optimizer, so that it is only read, and does not exist.
        """
        tables = {
            table.name: self.sparse_table(
                table.name,
                table.dim,
                table.optimizer,
                table.initializer,
                entry=table.entry,
                servers=table.servers,
                precision=table.precision,
            )
            for table in features.tables.values()
        }
        return ClientFeatures(features, tables)

    def dense_table(
        self,
        name: str,
        value: ArrayLike | None = None,
        optimizer: Optimizer | None = None,
        device: Device | None = None,
        servers: ServerCount | None = None,
    ) -> DenseTable:
        """Open a table that holds one array, and create it with `value` if no worker has done so yet.

            bias = ps.dense_table("bias", np.zeros(10), psfleet.optimizer.SGD(0.1))

        Args:
            name: Name of the table, unique in the fleet.
            value: Initial value, of any shape. May be None without an optimizer, which opens an existing
                table.
            optimizer: Optimizer that the servers apply to the table, or None to only read an existing table.
            device: Memory of the table on the servers, one of the values of --device.
            servers: Number of servers that store the table. None means as few as the table's size needs.
        """
        if optimizer is None:
            shape = None if value is None else np.shape(value)
            return self._opened(DenseTable(self.runtime, self._find(name, "dense", shape), None))
        _check(name, optimizer)
        array = np.asarray(as_numbers(value, f"the value of table {name!r}"), np.float32)
        parameter = Parameter(name, shape=array.shape)
        spec = TableSpec(
            name,
            "dense",
            array.shape,
            optimizer.rule(parameter),
            optimizer.decay(parameter),
            device=device,
            servers=servers,
        )
        self.runtime.create(spec, array)
        return self._opened(DenseTable(self.runtime, spec, optimizer))

    def _find(self, name: Any, kind: str, shape: tuple[int, ...] | None) -> TableSpec:
        """Return the definition of an existing table.

        Args:
            name: Name of the table.
            kind: "sparse" or "dense".
            shape: Shape that the script expects, or None for any.
        """
        spec = self.runtime.open(name)
        if spec.kind != kind or shape not in (None, spec.shape):
            text = kind if shape is None else f"{kind} of shape {shape}"
            raise TableConflict(
                f"table {name!r} is {spec.kind} of shape {spec.shape}, and the script opens it as {text}"
            )
        return spec

    def _opened(self, table: Table) -> Table:
        self._tables.add(table)
        return table

    def metrics(
        self,
        metrics: Tasks,
        name: str = "metrics",
        slices: Slices = (),
        window: int = 0,
        decay: float = 0.0,
    ) -> FleetMetrics:
        """Create metrics over the samples of all workers, each sample counted exactly once.

        The arguments are those of `psfleet.fleet.metrics`.
        """
        return FleetMetrics(self.runtime, metrics, name, slices, window, decay)

    def evaluate(
        self,
        model: Callable[["Client", Any], Any],
        batches: Iterable[Any],
        metrics: Tasks,
        slices: Slices = (),
        folder: str | os.PathLike[str] | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> "CutEvaluation":
        """Evaluate a model with the weights of one moment of the training, while training goes on.

            def chance(tables, ids):
                return sigmoid(tables.sparse_table("users").pull(ids).sum(1))

            found = ps.evaluate(chance, [(ids, clicks)], [metrics.Auc()]).result()

        Args:
            model: Function that returns the predictions for a batch. Its arguments are a client, whose tables
                have the values of that moment and are read-only, and the inputs of the batch. Another thread
                calls it.
            batches, metrics, slices, folder, transform: Arguments of `fleet.evaluate`.
        """

        from psfleet.serving.prediction import evaluate_cut  # loads programs

        def make(tables: ScriptRuntime) -> "Predictor":
            return functools.partial(model, Client(tables))

        return evaluate_cut(self.runtime, make, batches, metrics, slices, folder, transform)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a snapshot of all tables with their optimizer state, as `fleet.save_persistables` does.

        Worker 0 saves; on other workers the call does nothing. Call `barrier()` first if the snapshot must
        contain all pushes of the other workers.

        Args:
            folder: Folder to write, which all servers must be able to access, or a URL. If saving fails, the
                folder does not exist.

        Raises:
            CheckpointError: The fleet has no table, or the folder cannot be written.
        """
        if self.runtime.worker_index == 0:
            save(self.runtime, folder_of(folder, "save"))

    def load(self, folder: str | os.PathLike[str], tables: TableNames | None = None) -> None:
        """Load tables from a snapshot, which any number of servers may have written.

            ps.load("model")                                # every table
            ps.load("model", tables={"users": "old_users"})  # "users" gets the rows of "old_users"

        All workers must call it after they have opened their tables. Worker 0 loads, and the other workers
        wait for worker 0.

        Args:
            folder: Folder of the snapshot, or its URL.
            tables: None loads every table of the snapshot with its definition. A list of names loads only
                these tables, as a warm start. A mapping does so from tables of other names, as
                {name in the script: name in the snapshot}. A table also gets the snapshot's optimizer state
                if the optimizer rules are equal, else initial state. Rows that the snapshot lacks, and other
                tables, keep their values.

        Raises:
            CheckpointError: The folder is missing or damaged, no table of the script would get a value, or a
                table is missing or has another shape. Nothing was changed.
        """
        load(self.runtime, folder_of(folder, "load"), tables)

    def pull(self, ids: Mapping[T, ArrayLike | PooledIds | None]) -> dict[T, Floats]:
        """Return current values of several tables, with one call to each server.

            rows = ps.pull({users: ids, items: other_ids, bias: None})
            rows[users], rows[bias]

        Args:
            ids: For each sparse table its ids, as in `SparseTable.pull`, or the table's value in `pooled` of
                a batch of features. None for a dense table.

        Returns:
            The values by table, in the order of `ids`: float32 [*ids.shape, dim] of a sparse table, float32
            of the table's shape of a dense one.

        Raises:
            UsageError: A key is no table of this client, or its ids are not valid.
        """
        reads = reads_of(self.runtime, ids)
        return by_table(ids, reads, self.runtime.pull(reads))

    def pull_ahead(self, ids: Mapping[T, ArrayLike | PooledIds | None]) -> TablesAhead[T]:
        """Start to pull values of several tables for a later batch. `wait()` on the result returns them.

            coming = ps.pull_ahead({users: next_ids, bias: None})
            ...
            rows = coming.wait()[users]

        `SparseTable.pull_ahead` explains which pushes the values contain.
        """
        reads = reads_of(self.runtime, ids)
        return TablesAhead(ids, reads, self.runtime.pull_ahead(reads))

    def push(self, gradients: Mapping[T, Any]) -> PendingPush:
        """Send one step's gradients of several tables, with one call to each server.

            ps.push({users: (ids, grads), items: (others, slopes), bias: slope})

        Each table is updated once, with its own optimizer and learning rate. In sync mode the call is this
        worker's part of one round, for any number of tables. If only some workers push to a table, the mean
        is over their gradients. An empty mapping takes part in the round and changes nothing.

        Args:
            gradients: For each sparse table the arguments of `SparseTable.push` as a tuple, (ids, grads) or
                (ids, grads, shows, clicks), or the table's value in `pooled_gradients` of a batch of
                features. For each dense table its gradient.

        Returns:
            The outstanding push; its `wait(timeout)` returns when every server has acknowledged the push.

        Raises:
            UsageError: A key is no table of this client, its gradient is not valid, or a server has refused
                an earlier push. Nothing was sent to any table; in the last case, push the gradients again.
        """
        return self.runtime.push(gradients_of(self.runtime, gradients))

    @property
    def version(self) -> ReadVersion | None:
        """State of the training that the last pull returned, for a client of `connect(job=...)`.

        None before the first pull.
        """
        return self.runtime.version

    @property
    def cut(self) -> FollowedCut | None:
        """State of the training that a client of `connect(follow=...)` has copied. None for other clients."""
        return self.runtime.cut

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every push so far is applied on the servers.

        Args:
            timeout: Seconds to wait, or None for the usual deadline.
        """
        self.runtime.flush(timeout)

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every worker has called this method.

        Args:
            timeout: Seconds to wait, or None for the usual deadline.
        """
        self.runtime.barrier(timeout)

    def set_mode(self, mode: str, **settings: Any) -> None:
        """Switch to another consistency mode during training. All workers must call it.

            ps.set_mode("ssp", staleness=4)

        The arguments are those of `psfleet.fleet.set_mode`.
        """
        settings_of_mode = Settings.from_parts({"consistency": {"mode": mode, **settings}})
        self.runtime.set_mode(settings_of_mode.consistency)

    @property
    def worker_index(self) -> int:
        """Rank of this worker, from 0."""
        return self.runtime.worker_index

    @property
    def worker_num(self) -> int:
        """Number of workers."""
        return self.runtime.worker_num

    def stats(self) -> list[dict[str, Any]]:
        """Return one dictionary for each server, with its tables, pushes and bytes."""
        return self.runtime.stats()

    def close(self) -> None:
        """Wait for all pushes and leave the fleet. Safe to call twice.

        Later calls of the client or its tables raise UsageError.
        """
        self._close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if value is None or not is_failure(value):
            self.close()
            return
        current().expect_exit(value)
        try:  # wait only briefly: if other workers have failed too, the round never completes
            self._close(_AFTER_FAILURE)
        except PsfleetError as error:
            value.add_note(f"psfleet: the last pushes may not be applied: {error}")

    def _close(self, timeout: float | None = None) -> None:
        if isinstance(self.runtime, ClosedRuntime):
            return
        runtime, refusal = self.runtime, cast(ScriptRuntime, ClosedRuntime(_CLOSED))
        for table in self._tables:
            table._runtime = refusal
        self.runtime = refusal
        self._leave(runtime, timeout)


def _check(name: Any, optimizer: Any) -> None:
    check_outside(f"table {name!r}", optimizer)
    schedule = optimizer.common()["learning_rate"]
    if isinstance(schedule, LRScheduler) and schedule.steps_itself:
        raise ConfigError(
            f"the learning rate of table {name!r} counts updates, which a plain table does not have; "
            "take a schedule of psfleet.optimizer.lr and call its step()"
        )
