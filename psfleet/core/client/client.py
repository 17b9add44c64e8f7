"""Client of a fleet's tables, for scripts that compute their own gradients.

    with psfleet.connect() as ps:
        users = ps.sparse_table("users", dim=16, optimizer=psfleet.optimizer.Ftrl(0.1, l1=1.0))
        rows = users.pull(ids)
        users.push(ids, grads).wait()
        ps.pull({users: ids, items: other_ids})  # several tables in one call; so do push and pull_ahead

The same script runs embedded, or on the cluster that its environment names. The handles of tables are in
`client_tables`, and `connect` is in `process_client`.
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
from psfleet.core.engine.interface import (
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
    """Opens the tables of a fleet by name, and pulls from and pushes to several at once.

    A context manager: leaving the block waits until all pushes are applied, and leaves the fleet. All
    clients that `connect()` makes without an `environment`, and `psfleet.fleet`, count as one worker of the
    fleet. The process leaves the fleet when the last of them is closed; after `fleet.init()`, when the
    script ends.

    Args:
        runtime: Access to the tables: embedded, on a cluster, or only for reading.
        leave: Function that leaves the fleet. It gets the runtime and the seconds that it may wait for other
            workers, or None for the usual deadline. By default it closes the runtime.
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
            optimizer: Optimizer whose rule and hyperparameters become the table's. Each push carries its
                current learning rate.
            initializer: Initial value of a row, from psfleet.initializer. Uniform in [-0.01, 0.01) by
                default.
            seed: Seed of the initializer, if it has none itself.
            entry: Rule that decides which new ids get a row, and which rows are evicted, such as
                psfleet.CountFilterEntry. With None every pushed id gets a row, and none is evicted.
            device: Memory of the table on the servers, with the values of --device, which is also the
                default.
            servers: Number of servers that hold the table, 1 to 1024. A small table on few servers saves
                calls in each step. None means all. An existing table stays where it is.
            precision: Storage of rows on the servers: "float32", "bfloat16" (for the weights),
                "bfloat16/bfloat16" or "bfloat16/int8" (for weights and state), see docs/tables.md. Pulled and
                pushed values and all arithmetic are float32.

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
        """Open the tables of a feature set, and create those that no worker has created yet.

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

        Args:
            name: Name of the table, unique in the fleet.
            value: Initial value, of any shape. Not needed without an optimizer, which opens an existing
                table.
            optimizer: As for `sparse_table`.
            device: As for `sparse_table`.
            servers: As for `sparse_table`, but None means as few as the table's size needs.
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
        """Make metrics over the samples of all workers, each counted exactly once, as `fleet.metrics`
        does."""
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
        """Evaluate a model at one cut through the training, while training goes on, as `fleet.evaluate` does.

            def chance(tables, ids):
                return sigmoid(tables.sparse_table("users").pull(ids).sum(1))

            found = ps.evaluate(chance, [(ids, clicks)], [metrics.Auc()]).result()

        Args:
            model: Function of a client, whose tables have the values at the cut and can only be read, and of
                the inputs of a batch. Returns the predictions. Another thread calls it.
            batches, metrics, slices, folder, transform: As for `fleet.evaluate`.
        """

        from psfleet.serving.prediction import evaluate_cut  # loads programs

        def make(tables: ScriptRuntime) -> "Predictor":
            return functools.partial(model, Client(tables))

        return evaluate_cut(self.runtime, make, batches, metrics, slices, folder, transform)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write a snapshot of every table with its optimizer state, as `fleet.save_persistables` does.

        Worker 0 saves; on other workers the call does nothing. Call `barrier()` first if the snapshot must
        contain all pushes of the other workers.

        Args:
            folder: Folder to write, which all servers must see, or a URL. It appears complete or not at all.

        Raises:
            CheckpointError: The fleet has no table, or the folder cannot be written.
        """
        if self.runtime.worker_index == 0:
            save(self.runtime, folder_of(folder, "save"))

    def load(self, folder: str | os.PathLike[str], tables: TableNames | None = None) -> None:
        """Set tables to the contents of a snapshot, which any number of servers may have written.

            ps.load("model")                                # every table
            ps.load("model", tables={"users": "old_users"})  # weights only, from a table of another name

        All workers must call it after they have opened their tables. Worker 0 loads, and the other workers
        wait for it.

        Args:
            folder: Folder of the snapshot, or its URL.
            tables: None loads every table of the snapshot with its definition. Names of tables load the
                weights of those, as a warm start; a mapping gives each the snapshot's table of another
                name. A table also gets the snapshot's optimizer state if the rules are equal, else initial
                state. Rows that the snapshot lacks, and other tables, keep their values.

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
            ids: For each sparse table its ids, as for `SparseTable.pull`, or its entry of `pooled` of a
                batch of features. None for a dense table.

        Returns:
            The values by table, in the order of `ids`: float32 [*ids.shape, dim] of a sparse table, float32
            of the table's shape of a dense one.

        Raises:
            UsageError: A key is no table of this client, or its ids are not valid.
        """
        reads = reads_of(self.runtime, ids)
        return by_table(ids, reads, self.runtime.pull(reads))

    def pull_ahead(self, ids: Mapping[T, ArrayLike | PooledIds | None]) -> TablesAhead[T]:
        """Start to pull values of several tables for a coming batch, as `SparseTable.pull_ahead` does for
        one."""
        reads = reads_of(self.runtime, ids)
        return TablesAhead(ids, reads, self.runtime.pull_ahead(reads))

    def push(self, gradients: Mapping[T, Any]) -> PendingPush:
        """Send one step's gradients of several tables, with one call to each server.

            ps.push({users: (ids, grads), items: (others, slopes), bias: slope})

        Each table is updated once, with its own optimizer and rate. In sync mode the call is this worker's
        part of one round, however many tables it names. A table that only some workers name gets the mean
        of their gradients. An empty mapping takes part in the round and changes nothing.

        Args:
            gradients: For each sparse table the arguments of `SparseTable.push` as a tuple, (ids, grads) or
                (ids, grads, shows, clicks), or its entry of `pooled_gradients` of a batch of features. For
                each dense table its gradient.

        Returns:
            A ticket; `.wait(timeout)` returns when every server has acknowledged the push.

        Raises:
            UsageError: A key is no table of this client, or its gradient is not valid. Nothing was sent to
                any table.
        """
        return self.runtime.push(gradients_of(self.runtime, gradients))

    @property
    def version(self) -> ReadVersion | None:
        """Version of the last pull of a client of `connect(job=...)`, or None before the first pull."""
        return self.runtime.version

    @property
    def cut(self) -> FollowedCut | None:
        """Cut of the training that a client of `connect(follow=...)` holds, or None for any other client."""
        return self.runtime.cut

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every push so far is applied on the servers."""
        self.runtime.flush(timeout)

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every worker has called this."""
        self.runtime.barrier(timeout)

    def set_mode(self, mode: str, **settings: Any) -> None:
        """Continue in another consistency mode, as `psfleet.fleet.set_mode` does. All workers must call
        it."""
        settings_of_mode = Settings.from_parts({"consistency": {"mode": mode, **settings}})
        self.runtime.set_mode(settings_of_mode.consistency)

    @property
    def worker_index(self) -> int:
        """This worker's index, from 0."""
        return self.runtime.worker_index

    @property
    def worker_num(self) -> int:
        """Number of workers."""
        return self.runtime.worker_num

    def stats(self) -> list[dict[str, Any]]:
        """Return the tables, pushes and bytes of each server, one dict for each."""
        return self.runtime.stats()

    def close(self) -> None:
        """Wait for all pushes and leave the fleet. Later calls of the client or its tables raise
        UsageError. Safe to call twice."""
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
        try:  # a short wait: if other workers have failed too, the round never completes
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
