"""Fleet: the object behind `psfleet.fleet`, through which a trainer script joins the servers and workers of
a job.

It knows the role of this process, connects to the servers when a parameter is first needed, and passes each
call on to the runtime (psfleet.core.runtime) or to the script's loops (`data_loops.py`). It holds little
state itself: the role, the strategy, and the loops. Roles, saving and callbacks are in its base classes,
from `roles.py` over `fleet_saving.py` to `fleet_callbacks.py`.

`process_fleet` is the one instance whose methods are the functions of the package. All methods are called
in the thread that trains.
"""

import atexit
import dataclasses
import importlib.metadata
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from typing_extensions import override

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.logs import set_up_logs
from psfleet.core.base.observability.logged_values import NEWEST
from psfleet.core.base.validation.annotations import FilePath, NonNegativeInt, PositiveInt, checked
from psfleet.core.engine.interface import load_runtime
from psfleet.core.graph.parameters.binding import invalidate
from psfleet.core.runtime import stages
from psfleet.core.runtime.dataset_pass import batches
from psfleet.core.runtime.modes.local_sgd import LocalSGDRuntime
from psfleet.core.runtime.modes.switch import check_mode, connect
from psfleet.core.runtime.process_runtime import Parts, active, current
from psfleet.core.runtime.script_runtime import ScriptRuntime
from psfleet.core.runtime.strategy import DistributedStrategy, Settings, resolve
from psfleet.data.batches import Source, size_of
from psfleet.data.read_ahead import SizedPeekable
from psfleet.fleet import sums
from psfleet.fleet.data_loops import DataLoops
from psfleet.fleet.fleet_callbacks import FleetCallbacks
from psfleet.fleet.roles import RoleMaker, check_no_collective, environment_of
from psfleet.fleet.sums import Util
from psfleet.metrics.fleet_metrics import FleetMetrics, Slices, Tasks
from psfleet.optimizer.distributed import DistributedOptimizer
from psfleet.serving.prediction import CutEvaluation, evaluate_cut, predictor_of

__all__ = ["Fleet"]

T = TypeVar("T")
R = TypeVar("R")


@checked
class Fleet(FleetCallbacks):
    """Connection of one process to a fleet of servers and workers.

        from psfleet import fleet

        fleet.init()
        optimizer = fleet.distributed_optimizer(optimizer)
        for batch in fleet.dataset(files, batch_size=512):
            ...

    Without a cluster in the environment, all methods work on tables in this process.
    """

    def __init__(self) -> None:
        super().__init__()
        self._strategy: DistributedStrategy | Parts | None = None
        self._load_path: str | None = None
        self._loops: DataLoops | None = None
        self.util = Util(self)

    def init(
        self,
        role_maker: RoleMaker | None = None,
        is_collective: bool = False,
        strategy: DistributedStrategy | Parts | None = None,
    ) -> None:
        """Read the role of this process. The connection is made when a parameter is first needed.

        Args:
            role_maker: Source of the role, or None for the environment variables that the launcher sets.
            is_collective: Must be False. Accepted because the reference has it.
            strategy: Strategy, as for `distributed_optimizer`.

        Raises:
            ConfigError: The environment is wrong, or the process is connected with another strategy.
        """
        check_no_collective(is_collective)
        self._joined = environment_of(role_maker)
        set_up_logs(self._joined.role, self._joined.rank)
        self._strategy = strategy
        self._loops = None
        cluster = self._joined.role == "worker"
        if current().is_held and bool(active().server_num) == cluster:
            self._check_connected(
                strategy
            )  # psfleet.connect() was called before, and its runtime stays
        elif (before := current().use(None)) is not None:
            before.close()
        current().provide(self._connect if cluster else self._embed)
        here = self._environment
        self._place = stages.StagePosition(
            here.rank, here.stage, here.stages, here.stage_endpoints, here.copy, here.stage_copies
        )
        stages.settle(self._place, _link)
        atexit.unregister(self._leave)
        atexit.register(self._leave)

    @override
    def _own_loops(self) -> DataLoops:
        if self._loops is None:
            here = self._environment
            snapshots = bool(here.snapshot_every or here.resume or here.durability == "snapshot")
            self._loops = DataLoops(
                here.rank,
                here.workers,
                self.barrier_worker,
                self._end_step,
                self._is_stopped,
                runtime=active if here.role == "worker" else None,
                snapshots=snapshots,
                restarts=bool(here.worker_restarts or here.dead_after),
            )
        return self._loops

    def _connect(self, parts: Parts) -> ScriptRuntime:
        self._hear(parts)
        settings = self.settings()
        runtime = connect(self._environment.seat, settings.consistency, settings.wire)
        runtime.check = lambda consistency: dataclasses.replace(settings, consistency=consistency)
        return runtime if settings.localsgd is None else LocalSGDRuntime(runtime, settings.localsgd)

    def _embed(self, parts: Parts) -> ScriptRuntime:
        self._hear(parts)
        runtime: ScriptRuntime = load_runtime("embedded", wire=self.settings().wire)
        return runtime

    def _hear(self, parts: Parts) -> None:
        """Use the settings of `psfleet.connect` if the script has passed no strategy."""
        if self._strategy is None and parts:
            self._strategy = parts

    def settings(self) -> Settings:
        """Return the strategy in force. A setting of the launcher wins over one of the script."""
        return self._settings(self._strategy)

    def _settings(self, strategy: DistributedStrategy | Parts | None) -> Settings:
        """Merge the settings of the script's strategy and of the launcher."""
        return resolve(strategy, self._environment.strategy)

    def init_worker(self) -> None:
        """Connect to the servers now, instead of when a parameter is first needed."""
        active()

    def init_server(self, dirname: FilePath | None = None) -> None:
        """Prepare a server.

        Args:
            dirname: Folder of a snapshot that the server starts from, or None to start without rows.
        """
        self._load_path = None if dirname is None else os.fspath(dirname)

    def run_server(self) -> None:
        """Serve until every worker has left, then return."""
        if not self.is_server():
            raise ConfigError("run_server() was called in a process whose role is not server")
        for entry in importlib.metadata.entry_points(group="psfleet.servers", name="shard"):
            entry.load()(self._environment, self._load_path)
            return
        raise ConfigError("the server program is not installed; reinstall psfleet")

    def stop_worker(self) -> None:
        """Send this worker's pushes and leave the fleet, until `init` is called. Safe to call twice.

        The worker counts as finished. It is called at the end of the process too, unless the script has
        failed.
        """
        try:
            self._close_callbacks()
        finally:
            before = current().use(None)
            if before is not None:
                if before.server_num:
                    current().provide(_has_left)
                before.close()

    def forget(self) -> None:
        """Leave the fleet and return to the state before `init`, as `psfleet.reset` needs it."""
        try:
            self.stop_worker()
        finally:
            current().provide(None)
            stages.settle(stages.StagePosition())
            self._joined, self._place = None, stages.StagePosition()
            self._strategy = self._load_path = None
            self._loops = None
            NEWEST.clear()

    def _leave(self) -> None:
        # A worker that leaves counts as finished. One that has failed keeps its seat, so that its next
        # incarnation can take over.
        if not current().has_failed():
            self.stop_worker()

    def barrier_worker(self) -> None:
        """Wait until all workers have called this and the servers have applied their pushes."""
        active().barrier()
        invalidate()

    def distributed_optimizer(
        self, optimizer: Any, strategy: DistributedStrategy | Parts | None = None
    ) -> DistributedOptimizer:
        """Wrap an optimizer so that the servers hold and update its parameters.

        Args:
            optimizer: Optimizer of psfleet.optimizer.
            strategy: DistributedStrategy, or a dict as in a strategy file. None keeps the strategy of `init`.
        """
        return DistributedOptimizer(optimizer, self.adopt(strategy))

    def adopt(self, strategy: DistributedStrategy | Parts | None) -> Settings:
        """Use another strategy from now on, or keep the present one if `strategy` is None.

        Returns:
            The settings in force, in which those of the launcher win.

        Raises:
            ConfigError: `strategy` is no strategy, or needs another connection than the one that is open.
        """
        if strategy is not None:
            self._check_unconnected(strategy)
            self._strategy = strategy
        return self.settings()

    def _check_connected(self, strategy: DistributedStrategy | Parts | None) -> None:
        """Keep the runtime of `psfleet.connect()`, and refuse a strategy that this runtime does not
        follow."""
        settings = self._settings(strategy)
        if settings.localsgd is not None:
            raise ConfigError(
                "psfleet.connect() was called before fleet.init(), whose strategy has localsgd; call "
                "fleet.init() first"
            )
        runtime = active()
        if strategy is not None:
            check_mode(runtime, settings.consistency.mode, "fleet.init")
        elif runtime.cluster is not None:
            self._hear({"consistency": {"mode": runtime.cluster.mode.name}})

    def _check_unconnected(self, strategy: DistributedStrategy | Parts) -> None:
        now, settings = self.settings(), self._settings(strategy)
        if not (current().is_active and self._environment.role):
            return
        if now.consistency != settings.consistency:
            raise ConfigError(
                f"the fleet is connected in mode {now.consistency.mode!r}; pass the strategy "
                f"for mode {settings.consistency.mode!r} before the first parameter is used"
            )
        for name in ("wire", "localsgd"):
            present_value, wanted_value = getattr(now, name), getattr(settings, name)
            if present_value != wanted_value:
                raise ConfigError(
                    f"the fleet is connected with {name} {present_value}; pass the strategy "
                    f"with {wanted_value} before the first parameter is used"
                )

    def set_mode(self, mode: str, **settings: Any) -> None:
        """Switch the fleet to another consistency mode. All workers call it between the same two steps.

            fleet.set_mode("ssp", staleness=4)

        The call waits for all workers. The servers apply all pushes made before, then the workers continue in
        the new mode. In an embedded runtime all modes are the same, and the call does nothing.

        Args:
            mode: Name of the mode, such as "async" (docs/strategies.md describes the modes).
            settings: Settings of that mode, as in a strategy file's [consistency].

        Raises:
            ConfigError: A setting is unknown or contradicts another, or workers ask for different modes or
                settings. The mode has not changed.
        """
        mode_settings = Settings.from_parts({"consistency": {"mode": mode, **settings}})
        # Raises ConfigError if the mode contradicts another part of the strategy.
        dataclasses.replace(self.settings(), consistency=mode_settings.consistency)
        active().set_mode(mode_settings.consistency)
        invalidate()

    def scale_servers(self, servers: PositiveInt) -> None:
        """Request another number of servers for a running job of psfleet-launch. One worker calls it.

        The call returns at once. The launcher starts the missing servers, and the workers use the new
        number after one of their next collectives, in sync mode with the same bits. `server_num` returns
        the number in use. If the request cannot be carried out, nothing changes and the launcher prints the
        reason. In an embedded runtime the call does nothing.

        Args:
            servers: Number of servers to have.

        Raises:
            ConfigError: The servers were not started by a launcher.
        """
        active().scale(servers)

    def dataset(
        self,
        source: Source,
        batch_size: PositiveInt,
        epochs: PositiveInt | None = 1,
        shuffle_seed: int | None = None,
        prefetch: NonNegativeInt = 0,
    ) -> Iterator[Any]:
        """Iterate over this worker's batches, which the fleet assigns as workers come, die and return.

            for batch in fleet.dataset(len(x), batch_size=512, epochs=3, shuffle_seed=7):
                ...  # x[batch], then one step

        Make one step for each batch. How often a sample is used depends on the mode:

        - sync: every sample of an epoch is in exactly one closed round, even if workers die, return or are
          added.
        - other modes: at most once on every server.
        - In one process: once, in order.

        All workers must use the same datasets in the same order. All stages of a worker get the same
        batches, and under localsgd each batch is one step of the fleet too. A worker that starts again runs
        its script from the beginning, and skips datasets, or parts of one, that are used up.

        Args:
            source: Samples to iterate over. A number n gives int64 indices from 0 to n - 1. An array gives
                its rows, and another sequence (of file names, for example) lists of its elements.
                ParquetFiles, TextFiles, RecordBatches and KafkaTopic of psfleet.data give their batches.
            batch_size: Number of samples in one worker's step. The last step of an epoch may have fewer.
            epochs: Number of passes over all samples, or None to repeat until the script leaves the loop.
            shuffle_seed: Seed that gives each epoch another order, or None for the order of the source.
            prefetch: Number of batches of files that are read and decoded ahead in a thread. Does not change
                the order.

        Returns:
            Iterator over the batches. With one worker it also has a length.
        """
        merge = self.settings().gradient_merge
        steps = merge.k_steps if merge is not None else 1
        loop = batches(source, batch_size, epochs, shuffle_seed, steps, prefetch=prefetch)
        stepping = self._own_loops().stepping(loop)
        if self.worker_num() > 1 or steps > 1 or epochs is None:
            return stepping
        size = size_of(source)
        return SizedPeekable(lambda: stepping, lambda: epochs * -(-size // batch_size))

    def shard(self, batches: Iterable[T], repeatable: bool = True) -> Iterator[T]:
        """Iterate over this worker's share of the script's own batches: batch i goes to worker i mod
        worker_num.

            for batch in fleet.shard(batches()):
                ...  # one step

        All workers must read the same batches in the same order, so a source that shuffles needs the same
        seed on every worker. At the end the loop waits for the other workers, so that workers with
        different numbers of batches leave it together.

        A worker that starts again runs its script from the beginning. The loop then reads the source from
        its start and continues after the last batch whose step counts (docs/membership.md). Loops that were
        finished before yield nothing.

        Args:
            batches: A list, a DataLoader, a generator or any other iterable. If it can be read repeatedly, so
                can the result, and if it has a length, so has the result.
            repeatable: True if the source gives the same batches when the script runs again. With False (a
                socket, a queue) a worker that starts again continues with the batches that come then. A file
                that cannot seek counts as False.
        """
        return self._own_loops().shard(batches, repeatable)

    def metrics(
        self,
        metrics: Tasks,
        name: str = "metrics",
        slices: Slices = (),
        window: int = 0,
        decay: float = 0.0,
    ) -> FleetMetrics:
        """Create metrics over the samples of all workers, each counted exactly once, during training.

            scores = fleet.metrics([metrics.Auc(), metrics.LogLoss()])  # psfleet.metrics
            for batch in fleet.shard(batches()):
                scores.update(predictions, labels)  # in each step, best before its push
            print(scores.read().run["auc"])

        Call it on every worker, after `distributed_optimizer` and before the first step. Counts that were not
        pushed yet survive a restart of the worker, as with `remember`.

        Args:
            metrics, name, slices, window, decay: Arguments of `psfleet.metrics.FleetMetrics`.
        """
        fleet_metrics = FleetMetrics(active(), metrics, name, slices, window, decay)
        return self.remember(f"psfleet.metrics.{name}", fleet_metrics)

    def evaluate(
        self,
        model: Any,
        batches: Iterable[Any],
        metrics: Tasks,
        slices: Slices = (),
        folder: str | os.PathLike[str] | None = None,
        transform: Callable[[Any], Any] | None = None,
    ) -> CutEvaluation:
        """Evaluate the model as it is now, in a thread, while training continues.

            if fleet.is_first_worker() and step % 1000 == 0:
                evaluation = fleet.evaluate(chance, test_batches(), [metrics.Auc(), metrics.LogLoss()])
            ...
            print(evaluation.result()["auc"])

        One worker calls it. The call takes a snapshot, which is one cut through the pushes of all workers,
        and starts a thread of this process that computes the metrics from it. No table changes, so in sync
        mode training ends with the same bits as without it. This process must have memory for all weights.

        Args:
            model: Model to predict with: a variable of a program, a mapping from tasks to variables, or a
                torch module.
            batches: Tuples (inputs, labels) or (inputs, labels, more), read while training continues.
                Inputs are a feed, or the argument of the module. Labels of several tasks are a mapping.
                `more` are keyword arguments for the metrics, such as {"weights": ..., "slices": ...,
                "groups": ...}.
            metrics, slices: Arguments of `psfleet.metrics.FleetMetrics`.
            folder: Folder for the snapshot, which all servers can write. None uses the folder for temporary
                files, which the servers must share with this worker, and removes the snapshot when it is
                read.
            transform: Function that turns the model's logits into probabilities: `torch.sigmoid` for a
                module, a function of an array for a program. None passes the model's output to the metrics.

        Raises:
            CheckpointError: The snapshot cannot be taken.
            UsageError: The model or another argument cannot be used.
        """
        make = predictor_of(model)
        return evaluate_cut(active(), make, batches, metrics, slices, folder, transform)

    def remember(self, name: str, thing: R) -> R:
        """Keep the state of an object across a restart of the worker and a resumed job.

            scheduler = fleet.remember("lr", scheduler)

        The state is sent with every push and stored in snapshots. After a restart the script runs from its
        start, and when it reaches the position in its loops where it was before, `thing` gets back the
        state that it had there. Call it before the first step, with the same names in every run.

        Args:
            name: Name that is unique in the script.
            thing: Object with state_dict() and set_state_dict(state), such as a learning rate scheduler, or a
                numpy.random.Generator. JSON must be able to hold the state.

        Returns:
            The same object.
        """
        return self._own_loops().remember(name, thing)

    def step_done(self) -> None:
        """Mark the end of a step: the states of remembered objects are kept as they are now.

        Call it after each step of a loop that iterates over neither `dataset` nor `shard`, which do it
        themselves.
        """
        self._own_loops().step_done()

    def print_table_stat(self, table: str | None = None) -> None:
        """Print rows, bytes and updates of one table, or of all if `table` is None, summed over the
        servers."""
        sums.print_table_stat(table)

    def table_stat(self) -> dict[str, dict[str, Any]]:
        """Return rows or values, bytes and updates of each table by name, summed over the servers.

        This worker's pushes are applied before.
        """
        return sums.table_stat()

    def staleness(self) -> dict[int, int]:
        """Return how many pushes had which staleness, for all workers, summed over the servers.

        The staleness of a push is the number of pushes by other workers that a server has applied since
        this worker's last pull. From 256 on it is rounded down to a power of two. The result is empty in
        sync mode.
        """
        return sums.staleness()


def _link(position: stages.StagePosition, queue_size: int) -> stages.Links:
    """Return links to the other stages of a pipeline, over the runtime that is connected to the servers."""
    cluster = active().cluster
    assert cluster is not None, "only workers of a cluster have stages"
    return cluster.stage_links(position, queue_size)


def _has_left(parts: Parts) -> ScriptRuntime:
    raise UsageError(
        "this worker has left with fleet.stop_worker(): use the servers before, or call fleet.init()"
    )


process_fleet = Fleet()
"""Fleet of this process. Its methods are the functions of psfleet.fleet."""
