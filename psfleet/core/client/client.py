"""Just tables: push and pull from a plain script, embedded or on the cluster the environment names.

with psfleet.connect() as ps:
    users = ps.sparse_table("users", dim=16, optimizer=psfleet.optimizer.Ftrl(0.1, l1=1.0))
    rows = users.pull(ids)
    users.push(ids, grads).wait()
    ps.pull({users: ids, items: others})  # several tables in one call; push and pull_ahead likewise
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
    Runtime,
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
from psfleet.core.runtime.modes.switch import change
from psfleet.core.runtime.process_runtime import current, is_failure
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
_AFTER_FAILURE = 1.0  # seconds for which a script that has failed waits for other workers
Table = TypeVar("Table", SparseTable, DenseTable)


@checked
class Client:
    """Tables of a fleet by name. A context manager; closing flushes and leaves the fleet.

    All clients of a process without an environment of their own, and `psfleet.fleet`, share one seat in
    the fleet: it is left when the last of them is closed, or after `fleet.init()` when the script ends.

    Args:
        runtime: Through which it reaches the tables.
        leave: Function that closes the runtime; takes the seconds that it may wait for other
            workers (None: as long as any call); by default it closes it.
    """

    def __init__(
        self, runtime: Runtime, leave: Callable[[Runtime, float | None], None] | None = None
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
        """Return the table of that name, made if no worker has made it yet.

        Without an optimizer the table is only read: it must be there, and pushes of it are refused.

        Args:
            name: Unique in the fleet.
            dim: Width of a row, 1 to 1024. Of a table that is only read None: as it is.
            optimizer: Its rule and hyperparameters become the table's; pushes carry its rate. None: the
                table is only read; what else is said of it does not count.
            initializer: First value of a row, of psfleet.initializer; default uniform in [-0.01, 0.01).
            seed: Seed of the initializer, if it has none of its own.
            entry: Rule by which unknown ids of a push get a row and rows go, see
                psfleet.core.engine.schema.entry; None: all, and none.
            device: Memory that holds it on the servers, named as by --device; None: as that says.
            servers: Number of servers that hold it, 1 to 1024, so that a step calls fewer; None:
                all. A table that is there stays where it is.
            precision: Storage of rows on the servers: "float32", "bfloat16" (the weights),
                "bfloat16/bfloat16" or "bfloat16/int8" (the weights, then the state), see docs/tables.md.
                All that is computed, pulled and pushed is float32.

        Raises:
            ConfigError: The servers lack that device.
            TableConflict: The table exists with another definition.
            UnknownTable: There is no optimizer, and no such table.
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
        """Return the tables of a feature set, made if no worker has made them yet; see `ClientFeatures`.

        Raises:
            TableConflict: A table exists with another definition.
            UnknownTable: A table has no optimizer, so that it is only read, and is not there.
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
        """Return the table of that name; if no worker has made it yet, it starts with `value`.

        `optimizer`, `device` and `servers` as for `sparse_table`, but servers=None: as few as its size
        asks for. A table without an optimizer needs no value.
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
        """Return the definition of a table that is there.

        shape: Shape that the script expects; None: any.
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
        """Metrics over the samples of all workers, counted exactly once; see `fleet.metrics`."""
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
        """Evaluate a model at one cut through the training, which goes on meanwhile; see `fleet.evaluate`.

            def chance(tables, ids):
                return sigmoid(tables.sparse_table("users").pull(ids).sum(1))

            found = ps.evaluate(chance, [(ids, clicks)], [metrics.Auc()]).result()

        Args:
            model: Gets a client whose tables are those of the cut, to be read only, and the inputs of a
                batch; gives the predictions. It is called by another thread.
            batches, metrics, slices, folder, transform: As for `fleet.evaluate`.
        """

        from psfleet.serving.prediction import evaluate_cut  # loads programs

        def make(tables: Runtime) -> "Predictor":
            return functools.partial(model, Client(tables))

        return evaluate_cut(self.runtime, make, batches, metrics, slices, folder, transform)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write every table of the fleet, optimizer state included, as `fleet.save_persistables` does.

        Worker 0 saves; for the others the call does nothing. Call `barrier()` first if what they have
        pushed is to be in it.

        Args:
            folder: Appears whole or not at all; the servers must see it too.

        Raises:
            CheckpointError: The fleet has no table, or the folder cannot be written.
        """
        if self.runtime.worker_index == 0:
            save(self.runtime, folder_of(folder, "save"))

    def load(self, folder: str | os.PathLike[str], tables: TableNames | None = None) -> None:
        """Set tables from a folder that `save` or `fleet.save_persistables` has written.

        Worker 0 loads; the others wait for it. All workers must call it, once their tables are made. The
        folder may come from a fleet with any number of servers.

        Args:
            folder: Folder of the checkpoint.
            tables: None: every table of the checkpoint, with its definition. Else the names of those that get
                its weights, as a warm start; {"users": "old_users"}: users gets those of old_users. A table
                has the optimizer state of the checkpoint where that is of the same rule, else the first one.
                Rows that the checkpoint lacks, and other tables, stay as they are.

        Raises:
            CheckpointError: The folder is missing or damaged, or no table of the script would get a
                value, or a table is missing or has another shape; nothing was changed.
        """
        load(self.runtime, folder_of(folder, "load"), tables)

    def pull(self, ids: Mapping[T, ArrayLike | PooledIds | None]) -> dict[T, Floats]:
        """Return current values of several tables, with one call to each server.

            rows = ps.pull({users: ids, items: others, bias: None})
            rows[users], rows[bias]

        Args:
            ids: For each table its ids, as for `SparseTable.pull`, or what `pooled` of a batch of features
                has for it; None for a dense table.

        Returns:
            The values by table, in the order of `ids`: sparse float32 [*ids.shape, dim], dense float32
            of the table's shape.

        Raises:
            UsageError: A key is no table of this client, or its value cannot be what is asked of it.
        """
        reads = reads_of(self.runtime, ids)
        return by_table(ids, reads, self.runtime.pull(reads))

    def pull_ahead(self, ids: Mapping[T, ArrayLike | PooledIds | None]) -> TablesAhead[T]:
        """Begin to pull values of several tables, see `pull` and `SparseTable.pull_ahead`."""
        reads = reads_of(self.runtime, ids)
        return TablesAhead(ids, reads, self.runtime.pull_ahead(reads))

    def push(self, gradients: Mapping[T, Any]) -> PendingPush:
        """Send one step's gradients of several tables, with one call to each server.

            ps.push({users: (ids, grads), items: (others, slopes), bias: slope})

        Each table is updated once, with its own optimizer and rate. In sync mode the call is this
        worker's part of one round, however many tables it names; a table that only some workers
        name gets the mean of their gradients. With an empty mapping the worker takes part in the
        round and changes nothing.

        Args:
            gradients: For each sparse table the arguments of `SparseTable.push` as a tuple: (ids, grads) or
                (ids, grads, shows, clicks), or what `pooled_gradients` of a batch of features has for it.
                For each dense table its gradient.

        Returns:
            A ticket; `.wait(timeout)` returns when every server has acknowledged the push.

        Raises:
            UsageError: A key is no table of this client, or its value cannot be what is sent to it.
                Nothing was sent, to no table.
        """
        return self.runtime.push(gradients_of(self.runtime, gradients))

    @property
    def version(self) -> ReadVersion | None:
        """Version of the last pull by a client of `connect(job=...)`; None before the first."""
        version: ReadVersion | None = getattr(self.runtime, "version", None)
        return version

    @property
    def cut(self) -> FollowedCut | None:
        """The cut of the training that a client of `connect(follow=...)` has; None: it is another client."""
        cut: FollowedCut | None = getattr(self.runtime, "cut", None)
        return cut

    def flush(self, timeout: float | None = None) -> None:
        """Wait until every push so far is applied."""
        self.runtime.flush(timeout)

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every worker is here."""
        self.runtime.barrier(timeout)

    def set_mode(self, mode: str, **settings: Any) -> None:
        """Go on in another consistency mode, see `psfleet.fleet.set_mode`; all workers call it."""
        settings_of_mode = Settings.from_parts({"consistency": {"mode": mode, **settings}})
        change(self.runtime, settings_of_mode.consistency)

    @property
    def worker_index(self) -> int:
        """This worker's index, from 0."""
        return self.runtime.worker_index

    @property
    def worker_num(self) -> int:
        """Number of workers."""
        return self.runtime.worker_num

    def stats(self) -> list[dict[str, Any]]:
        """Return tables, pushes and bytes, one entry per server."""
        return self.runtime.stats()

    def close(self) -> None:
        """Flush and leave the fleet; afterwards the client's tables are refused. Safe to call twice."""
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
        try:  # the others may have failed too, and then the round never completes
            self._close(_AFTER_FAILURE)
        except PsfleetError as error:
            value.add_note(f"psfleet: the last pushes may not be applied: {error}")

    def _close(self, timeout: float | None = None) -> None:
        if isinstance(self.runtime, ClosedRuntime):
            return
        runtime, refusal = self.runtime, cast(Runtime, ClosedRuntime(_CLOSED))
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
