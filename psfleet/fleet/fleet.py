"""Fleet: the object behind `psfleet.fleet`. A trainer script uses it to join the servers and workers of a
job.

A Fleet reads the role of this process and connects to the servers when a parameter is first needed. It
passes calls on to the runtime (psfleet.core.runtime) or to the script's loops (`data_loops.py`), and holds
little state itself: the role, the strategy and the loops. Its base classes have the methods about roles
(`roles.py`), saving (`fleet_saving.py`) and callbacks (`fleet_callbacks.py`).

The functions of `psfleet.fleet` are the methods of the instance `process_fleet`. Call all methods in the
thread that trains.
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
from psfleet.core.engine.runtime_interface import load_runtime
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

    If the environment variables name no cluster, all methods work on tables in this process.
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
        """Read the role of this process. Call it at the start of the script.

            fleet.init()

        The connection to the servers is made later, when a parameter is first needed.

        Args:
            role_maker: Source of the role, or None for the environment variables that the launcher sets.
            is_collective: Must be False. Accepted because Paddle has it.
            strategy: Strategy, as for `distributed_optimizer`.

        Raises:
            ConfigError: An environment variable is missing or wrong, or `psfleet.connect()` has connected
                this process with another strategy.
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
        """Use the settings passed to `psfleet.connect` if the script has passed no strategy."""
        if self._strategy is None and parts:
            self._strategy = parts

    def settings(self) -> Settings:
        """Return the strategy in effect. Settings of the launcher override those of the script."""
        return self._settings(self._strategy)

    def _settings(self, strategy: DistributedStrategy | Parts | None) -> Settings:
        return resolve(strategy, self._environment.strategy)

    def init_worker(self) -> None:
        """Connect to the servers now, instead of when a parameter is first needed."""
        active()

    def init_server(self, dirname: FilePath | None = None) -> None:
        """Choose the state that `run_server` starts from. Call it in server processes only.

        Args:
            dirname: Folder of a snapshot to load, or None to start without rows.
        """
        self._load_path = None if dirname is None else os.fspath(dirname)

    def run_server(self) -> None:
        """Run this process as a server until every worker has left the fleet."""
        if not self.is_server():
            raise ConfigError("run_server() was called in a process whose role is not server")
        for entry in importlib.metadata.entry_points(group="psfleet.servers", name="shard"):
            entry.load()(self._environment, self._load_path)
            return
        raise ConfigError("the server program is not installed; reinstall psfleet")

    def stop_worker(self) -> None:
        """Send this worker's outstanding pushes and leave the fleet.

        The fleet then treats the worker as finished. Calling it twice is harmless, and `init` joins again. At
        the end of the process this happens by itself, unless the script has failed.
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
        """Leave the fleet and return to the state before `init`. Scripts call `psfleet.reset` instead."""
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
        # The servers treat a worker that leaves as finished. A failed worker must not leave: it keeps its
        # seat (its number in the fleet), so that its restarted process can take the seat over.
        if not current().has_failed():
            self.stop_worker()

    def barrier_worker(self) -> None:
        """Wait until all workers have called this and the servers have applied all pushes made before."""
        active().barrier()
        invalidate()

    def distributed_optimizer(
        self, optimizer: Any, strategy: DistributedStrategy | Parts | None = None
    ) -> DistributedOptimizer:
        """Wrap an optimizer so that the servers hold and update its parameters.

            optimizer = fleet.distributed_optimizer(psfleet.optimizer.Adam(0.001))
            optimizer.minimize(loss)

        Args:
            optimizer: Optimizer of psfleet.optimizer.
            strategy: DistributedStrategy, or a dict as in a strategy file. None keeps the strategy of `init`.
        """
        return DistributedOptimizer(optimizer, self.adopt(strategy))

    def adopt(self, strategy: DistributedStrategy | Parts | None) -> Settings:
        """Use another strategy from now on, or keep the present one if `strategy` is None.

        Returns:
            The settings in effect. Settings of the launcher override those of `strategy`.

        Raises:
            ConfigError: `strategy` is no strategy, or this process is connected already with another mode,
                wire format or localsgd setting.
        """
        if strategy is not None:
            self._check_unconnected(strategy)
            self._strategy = strategy
        return self.settings()

    def _check_connected(self, strategy: DistributedStrategy | Parts | None) -> None:
        """Raise ConfigError if the runtime that `psfleet.connect()` opened does not fit the strategy."""
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

        The call waits for all workers and until the servers have applied all earlier pushes. Then the workers
        continue in the new mode. Without a cluster all modes are the same, and the call does nothing.

        Args:
            mode: Name of the mode, such as "async" (docs/strategies.md describes the modes).
            settings: Settings of that mode, as in the section [consistency] of a strategy file.

        Raises:
            ConfigError: A setting is unknown or contradicts another, or workers pass different modes or
                settings. The mode has not changed.
        """
        mode_settings = Settings.from_parts({"consistency": {"mode": mode, **settings}})
        # Raises ConfigError if the mode contradicts another part of the strategy.
        dataclasses.replace(self.settings(), consistency=mode_settings.consistency)
        active().set_mode(mode_settings.consistency)
        invalidate()

    def scale_servers(self, servers: PositiveInt) -> None:
        """Request another number of servers for a running job. Call it on one worker.

            fleet.scale_servers(4)

        The call returns at once. The launcher starts the missing servers. The workers switch to the new
        number at one of their next collectives (a barrier, an all-reduce, or the end of a `shard` loop).
        `server_num` returns the number in use. In sync mode the results of training stay bit-identical. If
        the request cannot be carried out, nothing changes and the launcher prints the reason. Without a
        cluster the call does nothing.

        Args:
            servers: Wanted number of servers.

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
        """Iterate over this worker's batches of a data source that all workers share.

            for batch in fleet.dataset(len(x), batch_size=512, epochs=3, shuffle_seed=7):
                ...  # x[batch], then one step

        The fleet assigns the batches to the workers that are running, also when workers die, return or are
        added. Make one step for each batch, also under localsgd. How often a sample of an epoch is used
        depends on the mode:

        - sync: every sample is in exactly one closed round.
        - other modes: at most once on every server.
        - without a cluster: once, in the order of the source or of the shuffle.

        All workers must iterate over the same datasets in the same order. All pipeline stages of a worker get
        the same batches. A restarted worker runs its script from the beginning, and samples that were used
        already are skipped.

        Args:
            source: Samples to iterate over. For a number n a batch is an int64 array of indices from 0 to n
                - 1. For an array a batch is an array of rows. For another sequence, such as file names, a
                batch is a list of elements. ParquetFiles, TextFiles, RecordBatches and KafkaTopic of
                psfleet.data define their own batches.
            batch_size: Number of samples in one worker's step. The last step of an epoch may have fewer.
            epochs: Number of passes over all samples, or None to repeat until the script leaves the loop.
            shuffle_seed: Seed of the order, which is another one in each epoch. None keeps the order of the
                source.
            prefetch: Number of batches to read and decode ahead in another thread, for sources that read
                files. Does not change the order.

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
        """Iterate over this worker's share of batches that the script makes itself.

            for batch in fleet.shard(batches()):
                ...  # one step

        Batch i belongs to worker i mod `worker_num`. All workers must read the same batches in the same
        order, so a source that shuffles needs the same seed on every worker. At the end the loop waits for
        the other workers, so that workers with different numbers of batches leave it together.

        A restarted worker runs its script from the beginning. Its loop then reads the source from the start
        and yields the batches after the last applied step (docs/membership.md). Loops that were finished
        before yield nothing.

        Args:
            batches: A list, a DataLoader, a generator or any other iterable. If `batches` can be read
                repeatedly, so can the result. If `batches` has a length, so has the result.
            repeatable: True if the source gives the same batches when the script runs again. Pass False for a
                socket or a queue: a restarted worker then continues with the next batches that arrive. A file
                that cannot seek is treated as False.
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
        """Create metrics that are computed during training, over the samples of all workers.

            scores = fleet.metrics([metrics.Auc(), metrics.LogLoss()])  # psfleet.metrics
            for batch in fleet.shard(batches()):
                scores.update(predictions, labels)  # in each step, best before its push
            print(scores.read().run["auc"])

        Call it on every worker, after `distributed_optimizer` and before the first step. Each sample is
        counted exactly once, even if a worker is restarted.

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

        Call it on one worker. The call takes a snapshot of all servers at the same point of training, and
        starts a thread of this process that computes the metrics from the snapshot. It changes no table, so
        training in sync mode is bit-identical with and without it. This process needs memory for all
        weights.

        Args:
            model: Model to predict with: a variable of a program, a mapping from tasks to variables, or a
                torch module.
            batches: Tuples (inputs, labels) or (inputs, labels, more), read in the thread. `inputs` is a
                feed of the program or the argument of the module. `labels` is an array, or a mapping from
                tasks to arrays. `more` has keyword arguments for the metrics, such as {"weights": ...,
                "slices": ..., "groups": ...}.
            metrics, slices: Arguments of `psfleet.metrics.FleetMetrics`.
            folder: Folder for the snapshot, which all servers must be able to write. None uses this machine's
                folder for temporary files, which works only if the servers share that folder, and removes the
                snapshot after reading it.
            transform: Function that turns the model's logits into probabilities: `torch.sigmoid` for a
                module, a function of an array for a program. None passes the model's output on unchanged.

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
        start. When it reaches the position in its loops where it stopped, `thing` gets the state that it
        had at that position. Call `remember` before the first step, with the same names in every run.

        Args:
            name: Name that is unique in the script.
            thing: Object with state_dict() and set_state_dict(state), such as a learning rate scheduler, or a
                numpy.random.Generator. JSON must be able to hold the state.

        Returns:
            The same object.
        """
        return self._own_loops().remember(name, thing)

    def step_done(self) -> None:
        """Mark the end of a step, so that a restarted worker can continue here.

        Call it after each step of a loop of your own. Loops over `dataset` and `shard` need no such call. The
        states of remembered objects are saved as they are now.
        """
        self._own_loops().step_done()

    def print_table_stat(self, table: str | None = None) -> None:
        """Print the number of rows, bytes and updates of a table, or of all tables if `table` is None.

        Rows and bytes are summed over the servers.
        """
        sums.print_table_stat(table)

    def table_stat(self) -> dict[str, dict[str, Any]]:
        """Return the size of each table, after this worker's pushes were applied.

        The values of the result are dicts with `count` (rows, or values of a dense table), `unit` ("rows"
        or "values"), `bytes`, `step` (number of updates) and `servers`. `count` and `bytes` are sums over
        the servers.

        Returns:
            Such a dict for each table name.
        """
        return sums.table_stat()

    def staleness(self) -> dict[int, int]:
        """Return a histogram of the staleness of all workers' pushes, summed over the servers.

        The staleness of a push is the number of pushes by other workers that a server has applied between
        the worker's pull and this push. From 256 on it is rounded down to a power of two.

        Returns:
            Number of pushes by staleness. Empty in sync mode.
        """
        return sums.staleness()


def _link(position: stages.StagePosition, queue_size: int) -> stages.Links:
    """Return this process's connections to the other stages of a pipeline, opened through the active
    runtime."""
    cluster = active().cluster
    assert cluster is not None, "only workers of a cluster have stages"
    return cluster.stage_links(position, queue_size)


def _has_left(parts: Parts) -> ScriptRuntime:
    raise UsageError(
        "this worker has left with fleet.stop_worker(): use the servers before, or call fleet.init()"
    )


process_fleet = Fleet()
"""Fleet of this process. The functions of psfleet.fleet are its methods."""
