"""One process of a fleet: its role, its runtime, and what a script does with both."""

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
    """One process's view of the fleet: its role, and the way to everybody's parameters."""

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
        """Learn the role and the fleet; connects when a parameter is first needed.

        Args:
            role_maker: PaddleCloudRoleMaker, UserDefinedRoleMaker or None: from the environment.
            is_collective: Accepted for the reference's sake; must be False.
            strategy: Strategy, as for `distributed_optimizer`.
        """
        check_no_collective(is_collective)
        self._joined = environment_of(role_maker)
        set_up_logs(self._joined.role, self._joined.rank)
        self._strategy = strategy
        self._loops = None
        cluster = self._joined.role == "worker"
        if current().is_held and bool(active().server_num) == cluster:
            self._check_connected(strategy)  # psfleet.connect() has come first
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
        """Apply settings of `psfleet.connect` that the script has not chosen."""
        if self._strategy is None and parts:
            self._strategy = parts

    def settings(self) -> Settings:
        """Return the strategy in force: each setting is the launcher's, else that of `init`."""
        return self._settings(self._strategy)

    def _settings(self, strategy: DistributedStrategy | Parts | None) -> Settings:
        """Merge the settings of the script's strategy and of the launcher."""
        return resolve(strategy, self._environment.strategy)

    def init_worker(self) -> None:
        """Connect to the servers now rather than with the first parameter."""
        active()

    def init_server(self, dirname: FilePath | None = None) -> None:
        """Prepare a server; `dirname` is a checkpoint to start from."""
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
        """Flush this worker's pushes and leave the servers until `init` is called. Safe to call twice."""
        try:
            self._close_callbacks()
        finally:
            before = current().use(None)
            if before is not None:
                if before.server_num:
                    current().provide(_has_left)
                before.close()

    def forget(self) -> None:
        """Leave the fleet, and know as little of it as before `init`; see psfleet.reset."""
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
        if not current().has_failed():  # else its seat stays taken
            self.stop_worker()

    def barrier_worker(self) -> None:
        """Flush, then wait until every worker is here."""
        active().barrier()
        invalidate()

    def distributed_optimizer(
        self, optimizer: Any, strategy: DistributedStrategy | Parts | None = None
    ) -> DistributedOptimizer:
        """Wrap a local optimizer so that its parameters live on the fleet's servers."""
        return DistributedOptimizer(optimizer, self.adopt(strategy))

    def adopt(self, strategy: DistributedStrategy | Parts | None) -> Settings:
        """Train by this strategy from now on; None: by the one before.

        Returns:
            The settings that count: what the launcher says wins.

        Raises:
            ConfigError: It is no strategy, or the fleet is connected and it needs another connection.
        """
        if strategy is not None:
            self._check_unconnected(strategy)
            self._strategy = strategy
        return self.settings()

    def _check_connected(self, strategy: DistributedStrategy | Parts | None) -> None:
        """Go on with the runtime of `psfleet.connect()`; refuse a strategy that it does not follow."""
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
            here, there = getattr(now, name), getattr(settings, name)
            if here != there:
                raise ConfigError(
                    f"the fleet is connected with {name} {here}; pass the strategy "
                    f"with {there} before the first parameter is used"
                )

    def set_mode(self, mode: str, **settings: Any) -> None:
        """Go on in another consistency mode; every worker calls it between the same two steps.

        Waits for all workers: their pushes are applied, then all go on in the new mode. Embedded,
        where all modes are one, it does nothing.

        Args:
            mode: Its name, such as async; docs/strategies.md describes the modes.
            settings: Settings of that mode, as in a strategy file's [consistency].

        Raises:
            ConfigError: A setting is unknown or contradicts another, or workers ask for different
                things; nothing was changed.
        """
        mode_settings = Settings.from_parts({"consistency": {"mode": mode, **settings}})
        # Refused here, if it does not go with the other parts of the strategy.
        dataclasses.replace(self.settings(), consistency=mode_settings.consistency)
        active().set_mode(mode_settings.consistency)
        invalidate()

    def scale_servers(self, servers: PositiveInt) -> None:
        """Ask for another number of servers, in a job of psfleet-launch; one worker calls it.

        The launcher starts those that are missing. All workers go on with the new number after one of their
        next collectives, in sync mode with the same bits; `server_num` says it. A request that cannot be
        met changes nothing, and the launcher says why. Embedded it does nothing.

        Raises:
            ConfigError: No launcher has started the servers.
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
        """Batches for this worker, handed out by the fleet: no sample is lost with a worker that dies.

            for batch in fleet.dataset(len(x), batch_size=512, epochs=3, shuffle_seed=7):
                ...  # x[batch], then one step

        Sync mode: every sample of an epoch is in exactly one closed round, also when workers die, come
        back or are added. Make one step for each batch. Other modes: a sample is used at most once on
        every server; half-async: at least once. In one process: all batches in order.

        All stages of a worker get the same batches; under localsgd too each batch is one step of the
        fleet. All workers must use the same datasets in the same order. A worker that is started again runs
        its script from the beginning; datasets, or parts of them, that are used up are passed over.

        Args:
            source: Number of samples: batches are int64 indices. An array: batches are its
                rows. Another sequence, say of file names: lists of its elements. ParquetFiles, TextFiles,
                RecordBatches or KafkaTopic of psfleet.data: their batches.
            batch_size: Samples of a worker's step; an epoch's last step has fewer.
            epochs: Number of passes over all samples; None: until the script leaves the loop.
            shuffle_seed: Each epoch has another order, which follows from this; None: as they are.
            prefetch: So many batches of files are read and decoded ahead in a thread; the order stays.

        Returns:
            The batches; with one worker their number is known and is the `len` of it.
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
        """This worker's part of the batches: every worker_num-th, starting with its index.

            for batch in fleet.shard(batches()):
                ...  # one step

        When they are used up it waits for the other workers, so that workers with unequal numbers of
        batches end the loop together. All workers must read the same batches in the same order: a source
        that shuffles needs the same seed on all of them.

        A worker that is started again runs its script from the beginning; the loop then reads the source
        from its start and goes on after the last batch whose step counts, see docs/membership.md. Loops
        that are behind it are passed over.

        Args:
            batches: A list, a DataLoader, a generator, ... One that can be read more than once can be
                used in more than one loop, and what is returned has a length if it has one.
            repeatable: The source gives the same batches when the script runs again. False: it reads a
                socket, a queue, ...; a worker that is started again goes on with what comes then. A file
                that cannot seek is known for one.
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
        """Metrics over the samples of all workers, counted exactly once, while they train.

            scores = fleet.metrics([metrics.Auc(), metrics.LogLoss()])  # psfleet.metrics
            for batch in fleet.shard(batches()):
                scores.update(predictions, labels)  # in each step, best before its push
            print(scores.read().run["auc"])

        Call it on every worker, after `distributed_optimizer` and before the first step. What a step has
        counted and not pushed is remembered, see `remember`.

        Args:
            metrics, name, slices, window, decay: See `psfleet.metrics.FleetMetrics`.
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
        """Evaluate the model as it is now, while training goes on, also in this process.

            if fleet.is_first_worker() and step % 1000 == 0:
                evaluation = fleet.evaluate(chance, test_batches(), [metrics.Auc(), metrics.LogLoss()])
            ...
            print(evaluation.result()["auc"])

        Takes a snapshot, which is one cut through the pushes of all workers, and lets a thread of this
        process compute the metrics from it. It changes no table, so in sync mode training ends with the same
        bits. This process must have room for all weights. One worker calls it.

        Args:
            model: Model to predict with: a variable of a program, a mapping of them by task, or a
                torch module.
            batches: (inputs, labels), or (inputs, labels, more) where `more` goes to the metrics, such as
                {"weights": ..., "slices": ..., "groups": ...}. Inputs are a feed, or what the module is
                called with. Labels of several tasks are a mapping. They are read while training goes on.
            metrics, slices: See `psfleet.metrics.FleetMetrics`.
            folder: Folder of the snapshot, visible to all servers. None: in the folder for
                temporary files, which the servers must share with this worker, until it is read.
            transform: Makes probabilities of a model that gives logits: `torch.sigmoid` of a module, and of a
                program any function of an array. None: the metrics get what the model gives.

        Raises:
            CheckpointError: The snapshot cannot be taken.
            UsageError: The model, or what is asked of it, cannot be meant.
        """
        make = predictor_of(model)
        return evaluate_cut(active(), make, batches, metrics, slices, folder, transform)

    def remember(self, name: str, thing: R) -> R:
        """Let `thing` go on where it was, in a worker that starts again and in a job that is resumed.

        Its state goes with every push and into snapshots. The script runs from its start; where it comes
        to the place in its loops at which it was, `thing` gets back the state that it had there. Call it
        before the first step, with the same names in every run.

        Args:
            name: Unique in the script.
            thing: Has state_dict() and set_state_dict(state) (learning rate schedulers do), or is a
                numpy.random.Generator. The state must be one that JSON can hold.

        Returns:
            `thing`.
        """
        return self._own_loops().remember(name, thing)

    def step_done(self) -> None:
        """Say that a step is over: what is remembered is taken as it is now.

        The loops of `shard` say it by themselves; a loop of another kind calls it after each step.
        """
        self._own_loops().step_done()

    def print_table_stat(self, table: str | None = None) -> None:
        """Print rows, bytes and updates of one table or of all, summed over the servers."""
        sums.print_table_stat(table)

    def table_stat(self) -> dict[str, dict[str, Any]]:
        """Rows or values, bytes and updates by table, summed over the servers, after a flush."""
        return sums.table_stat()

    def staleness(self) -> dict[int, int]:
        """Return the number of pushes by staleness, for all workers, summed over the servers.

        The staleness of a push is the number of pushes of other workers that a server has applied since it
        last gave this worker values; from 256 on rounded down to a power of two. Empty in sync mode.
        """
        return sums.staleness()


def _link(place: stages.StagePosition, queue_size: int) -> stages.Links:
    """Links to the other stages, over the runtime that reaches the servers."""
    cluster = active().cluster
    assert cluster is not None, "only workers of a cluster have stages"
    return cluster.stage_links(place, queue_size)


def _has_left(parts: Parts) -> ScriptRuntime:
    raise UsageError(
        "this worker has left with fleet.stop_worker(): use the servers before, or call fleet.init()"
    )


process_fleet = Fleet()
"""The fleet of this process, whose methods are the functions of psfleet.fleet."""
