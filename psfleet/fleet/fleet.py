"""One process of a fleet: its role, its runtime, and what a script does with both."""

import atexit
import dataclasses
import importlib.metadata
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from numpy.typing import NDArray

from psfleet.data.dispatch import batches
from psfleet.data.peekable import SizedPeekable
from psfleet.errors import ConfigError, UsageError
from psfleet.evaluation.fleet_metrics import FleetMetrics, Tasks
from psfleet.execution.inference import save_inference
from psfleet.execution.model_files import load, save
from psfleet.fleet import stats
from psfleet.fleet.data_loops import DataLoops
from psfleet.fleet.util import Util
from psfleet.modes.local_sgd import LocalSGDRuntime
from psfleet.modes.switch import change, check_mode, connect
from psfleet.optimizer.distributed import DistributedOptimizer
from psfleet.parameters.binding import invalidate
from psfleet.runtime import interface as runtimes
from psfleet.schema.table import key_of
from psfleet.settings.environment import Environment, check_alone, read_environment
from psfleet.stages import links
from psfleet.strategy import DistributedStrategy, Settings, resolve

__all__ = ["Fleet"]

T = TypeVar("T")
R = TypeVar("R")


class Fleet:
    """One process's view of the fleet: its role, and the way to everybody's parameters."""

    def __init__(self) -> None:
        self._joined: Environment | None = None
        self._place = links.StagePosition()
        self._strategy: DistributedStrategy | runtimes.Parts | None = None
        self._load_path: str | None = None
        self._loops: DataLoops | None = None
        self.util = Util(self)

    # -- role ----------------------------------------------------------------------------------

    def init(
        self,
        role_maker: Any = None,
        is_collective: bool = False,
        strategy: DistributedStrategy | None = None,
    ) -> None:
        """Learn the role and the fleet; connects when a parameter is first needed.

        Args:
            role_maker: PaddleCloudRoleMaker, UserDefinedRoleMaker or None: from the environment.
            is_collective: Accepted for the reference's sake; must be False.
            strategy: As for `distributed_optimizer`.
        """
        if is_collective:
            raise ConfigError("is_collective is True; psfleet trains with parameter servers only")
        _check_strategy(strategy)
        self._joined = role_maker.environment if role_maker else read_environment()
        self._strategy = strategy
        self._loops = None
        cluster = self._joined.role == "worker"
        if runtimes.is_held() and bool(runtimes.active().server_num) == cluster:
            self._check_connected(strategy)  # psfleet.connect() has come first
        elif (before := runtimes.use(None)) is not None:
            before.close()
        runtimes.provide(self._connect if cluster else self._embed)
        here = self._environment
        self._place = links.StagePosition(
            here.rank, here.stage, here.stages, here.stage_endpoints, here.copy, here.stage_copies
        )
        links.settle(self._place, _link)
        atexit.unregister(self._leave)
        atexit.register(self._leave)

    @property
    def _environment(self) -> Environment:
        """What `init` has found; a script that trains alone need not call it."""
        if self._joined is None:
            check_alone()
            return Environment()
        return self._joined

    def _own_loops(self) -> DataLoops:
        if self._loops is None:
            here = self._environment
            snapshots = bool(here.snapshot_every or here.resume or here.durability == "snapshot")
            self._loops = DataLoops(
                here.rank,
                here.workers,
                self.barrier_worker,
                runtime=runtimes.active if here.role == "worker" else None,
                snapshots=snapshots,
                restarts=bool(here.worker_restarts or here.dead_after),
            )
        return self._loops

    def _connect(self, asked: runtimes.Parts) -> runtimes.Runtime:
        self._hear(asked)
        settings = self.settings()
        runtime = connect(self._environment.seat, settings.consistency, settings.wire)
        runtime.check = lambda wanted: dataclasses.replace(settings, consistency=wanted)
        return runtime if settings.localsgd is None else LocalSGDRuntime(runtime, settings.localsgd)

    def _embed(self, asked: runtimes.Parts) -> runtimes.Runtime:
        self._hear(asked)
        return runtimes.load_runtime("embedded", wire=self.settings().wire)

    def _hear(self, asked: runtimes.Parts) -> None:
        """What `psfleet.connect` asks for counts where the script has said nothing."""
        if self._strategy is None and asked:
            self._strategy = asked

    def settings(self) -> Settings:
        """The strategy that counts: of each setting what the launcher says, else what `init` was told."""
        return self._settings(self._strategy)

    def _settings(self, strategy: DistributedStrategy | runtimes.Parts | None) -> Settings:
        """What counts of the script's strategy and the launcher's."""
        return resolve(strategy, self._environment.strategy)

    def is_server(self) -> bool:
        """Whether this process is a server."""
        return self._environment.role == "server"

    def is_worker(self) -> bool:
        """Whether this process trains."""
        return not self.is_server()

    def is_first_worker(self) -> bool:
        """Whether this process is worker 0, or its first stage."""
        return self.is_worker() and self.worker_index() == 0 and not self.is_later_stage()

    def is_later_stage(self) -> bool:
        """Whether this process is a stage of a pipeline and not the worker's first."""
        return self._place.process > 0

    def worker_index(self) -> int:
        """This worker's index, from 0; all its stages have the same."""
        return self._environment.rank

    def server_index(self) -> int:
        """This server's index, from 0."""
        return self._environment.rank

    def worker_num(self) -> int:
        """How many workers train."""
        return self._environment.workers

    def server_num(self) -> int:
        """How many servers there are; 0 embedded."""
        return len(self._environment.servers)

    def server_endpoints(self, to_string: bool = False) -> list[str] | str:
        """The servers' endpoints, as a list or joined by commas."""
        return _listed(self._environment.servers, to_string)

    def worker_endpoints(self, to_string: bool = False) -> list[str] | str:
        """The workers' addresses as far as the environment names them."""
        return _listed(self._environment.worker_endpoints, to_string)

    # -- life ----------------------------------------------------------------------------------

    def init_worker(self) -> None:
        """Connect to the servers now rather than with the first parameter."""
        runtimes.active()

    def init_server(self, dirname: str | None = None) -> None:
        """Prepare a server; `dirname` is a checkpoint to start from."""
        self._load_path = dirname

    def run_server(self) -> None:
        """Serve until every worker has left, then return."""
        if not self.is_server():
            raise ConfigError("run_server() was called in a process whose role is not server")
        for entry in importlib.metadata.entry_points(group="psfleet.servers", name="shard"):
            entry.load()(self._environment, self._load_path)
            return
        raise ConfigError("the server program is not installed; reinstall psfleet")

    def stop_worker(self) -> None:
        """Flush this worker's pushes and leave the fleet. Safe to call twice."""
        before = runtimes.use(None)
        if before is not None:
            before.close()

    def forget(self) -> None:
        """Leave the fleet, and know as little of it as before `init`; see psfleet.reset."""
        try:
            self.stop_worker()
        finally:
            runtimes.provide(None)
            links.settle(links.StagePosition())
            self._joined, self._place = None, links.StagePosition()
            self._strategy = self._load_path = None
            self._loops = None

    def _leave(self) -> None:
        # A script that failed must not be taken for one that has finished: its seat stays taken,
        # and the launcher or the deadline of the others reports the failure.
        if not hasattr(sys, "last_value"):
            self.stop_worker()

    def barrier_worker(self) -> None:
        """Flush, then wait until every worker is here."""
        runtimes.active().barrier()
        invalidate()

    # -- training ------------------------------------------------------------------------------

    def distributed_optimizer(
        self, optimizer: Any, strategy: DistributedStrategy | None = None
    ) -> DistributedOptimizer:
        """Wrap a local optimizer so that its parameters live on the fleet's servers."""
        return DistributedOptimizer(optimizer, self.adopt(strategy))

    def adopt(self, strategy: DistributedStrategy | runtimes.Parts | None) -> Settings:
        """Train by this strategy from now on; None: by the one before.

        Returns:
            The settings that count: what the launcher says wins.

        Raises:
            ConfigError: It is no strategy, or the fleet is connected and it needs another connection.
        """
        _check_strategy(strategy)
        if strategy is not None:
            self._check_unconnected(strategy)
            self._strategy = strategy
        return self.settings()

    def _check_connected(self, strategy: DistributedStrategy | None) -> None:
        """Go on with the runtime of `psfleet.connect()`; refuse a strategy that it does not follow."""
        wanted = self._settings(strategy)
        if wanted.localsgd is not None:
            raise ConfigError(
                "psfleet.connect() was called before fleet.init(), whose strategy has localsgd; call "
                "fleet.init() first"
            )
        runtime: Any = runtimes.active()
        if strategy is not None:
            check_mode(runtime, wanted.consistency.mode, "fleet.init")
        elif self._environment.role:
            self._hear({"consistency": {"mode": runtime.consistency.mode}})

    def _check_unconnected(self, strategy: DistributedStrategy | runtimes.Parts) -> None:
        now, wanted = self.settings(), self._settings(strategy)
        if not (runtimes.is_active() and self._environment.role):
            return
        if now.consistency != wanted.consistency:
            raise ConfigError(
                f"the fleet is connected in mode {now.consistency.mode!r}; pass the strategy "
                f"for mode {wanted.consistency.mode!r} before the first parameter is used"
            )
        for name in ("wire", "localsgd"):
            here, there = getattr(now, name), getattr(wanted, name)
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
            settings: Of that mode, as in a strategy file's [consistency].

        Raises:
            ConfigError: A setting is unknown or contradicts another, or workers ask for different
                things; nothing was changed.
        """
        wanted = Settings.from_parts({"consistency": {"mode": mode, **settings}})
        # Refused here, if it does not go with the other parts of the strategy.
        dataclasses.replace(self.settings(), consistency=wanted.consistency)
        change(runtimes.active(), wanted.consistency)
        invalidate()

    def dataset(
        self,
        source: int | Sequence[Any] | NDArray[Any],
        batch_size: int,
        epochs: int | None = 1,
        shuffle_seed: int | None = None,
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
            source: How many samples there are: batches are int64 indices. An array: batches are its
                rows. Another sequence, say of file names: lists of its elements.
            batch_size: Samples of a worker's step; an epoch's last step has fewer.
            epochs: How often all samples are used; None: until the script leaves the loop.

        Returns:
            The batches; with one worker their number is known and is the `len` of it.
            shuffle_seed: Each epoch has another order, which follows from this; None: as they are.
        """
        merge = self.settings().gradient_merge
        merged = merge.k_steps if merge is not None else 1
        found = batches(source, batch_size, epochs, shuffle_seed, merged)
        stepping = self._own_loops().stepping(found)
        if self.worker_num() > 1 or merged > 1 or epochs is None:
            return stepping
        size = source if isinstance(source, int) else len(source)
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
        slices: Sequence[str] = (),
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
            metrics, name, slices, window, decay: See `psfleet.evaluation.FleetMetrics`.
        """
        found = FleetMetrics(runtimes.active(), metrics, name, slices, window, decay)
        return self.remember(f"psfleet.metrics.{name}", found)

    # -- snapshots -----------------------------------------------------------------------------

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

    def snapshot(self) -> str:
        """Take a snapshot of the whole fleet in the job's folder; where it lies.

        Training of the other workers goes on. Worker 0 asks for it; for the others the call does
        nothing and gives "".
        """
        return runtimes.active().save("") if self.is_first_worker() else ""

    # -- saving --------------------------------------------------------------------------------

    def save_persistables(self, *arguments: Any, main_program: Any = None, mode: int = 0) -> None:
        """Write every table, optimizer state included, to a folder: weights and all to go on from.

        Worker 0 saves, for the others the call does nothing. Called as `save_persistables(dirname)` or
        with the reference's `(executor, dirname)`.

        Args:
            mode: 0: everything. 1: a delta, what has changed since the last delta or base. 2: a base,
                everything, and the next delta says the changes since. 3: everything; the reference
                also ages its rows then, which here only `shrink` does.

        Raises:
            CheckpointError: The fleet has no table, or the folder cannot be written.
        """
        path = _dirname("save_persistables", arguments)
        if mode not in (0, 1, 2, 3):
            raise ConfigError(f"save_persistables mode is {mode!r}; it must be 0, 1, 2 or 3")
        if self.is_first_worker():
            save(runtimes.active(), path, delta=mode == 1, base=mode == 2)

    def load_model(self, *arguments: Any, mode: int = 0) -> None:
        """Set every table from a folder written by `save_persistables`, by any number of servers.

        Worker 0 loads; the others wait for it. All workers must call it, once the model is made.

        Raises:
            CheckpointError: No table or parameter of the script would get a value; nothing was changed.
        """
        path = _dirname("load_model", arguments)
        if mode != 0:
            raise ConfigError(f"load_model mode is {mode!r}; only 0 (everything) is available")
        load(runtimes.active(), path)

    def save_inference_model(self, *arguments: Any, main_program: Any = None) -> None:
        """Write what predicting needs, and no optimizer state: the program up to the targets, weights.

        Called as `(dirname, feeded_var_names, target_vars)` or with the reference's executor first.
        Worker 0 saves, for the others the call does nothing.
        """
        if arguments and not isinstance(arguments[0], str | os.PathLike):
            arguments = arguments[1:]
        if len(arguments) != 3:
            raise UsageError(
                "save_inference_model needs dirname, feeded_var_names and target_vars; "
                f"it got {len(arguments)} of them"
            )
        path, feeds, targets = arguments
        if self.is_first_worker():
            runtimes.active().flush()
            save_inference(str(Path(path)), list(feeds), list(targets), main_program)

    def shrink(
        self, threshold: float | None = None, unseen: int | None = None, table: str | None = None
    ) -> int:
        """Remove rows of sparse tables that are worth little or not in use.

        All workers must call it: they meet before and after. Worker 0 shrinks.

        Args:
            threshold: In tables with a ShowClickEntry the least score of a row that stays; None: the
                entry's delete_threshold. In other tables the same as `unseen`.
            unseen: Rows go that no push has named since the unseen-th shrink before this one. None: the
                entry's delete_after_unseen; in other tables none go.
            table: Name of the one table that is meant; None: every sparse table.

        Returns:
            How many rows went; 0 on workers other than the first.
        """
        if threshold is not None and not math.isfinite(threshold):
            raise ConfigError(f"the threshold of shrink is {threshold}; use a number")
        if unseen is not None and not 1 <= unseen < 2**31:
            raise ConfigError(f"unseen of shrink is {unseen}; use a whole number from 1 on")
        runtimes.active().barrier()
        gone = 0
        if self.is_first_worker() and not runtimes.passes(runtimes.active()):
            key = 0 if table is None else key_of(table)
            gone = runtimes.active().shrink(key, threshold, unseen)
        runtimes.active().barrier()
        invalidate()
        return gone

    def print_table_stat(self, table: str | None = None) -> None:
        """Print rows, bytes and updates of one table or of all, summed over the servers."""
        stats.print_table_stat(table)

    def table_stat(self) -> dict[str, dict[str, Any]]:
        """Rows or values, bytes and updates by table, summed over the servers, after a flush."""
        return stats.table_stat()

    def staleness(self) -> dict[int, int]:
        """How many pushes of all workers were how stale, summed over the servers.

        The staleness of a push is the number of pushes of other workers that a server has applied since it
        last gave this worker values; from 256 on rounded down to a power of two. Empty in sync mode.
        """
        return stats.staleness()


def _link(place: links.StagePosition, queue_size: int) -> links.Links:
    """Links to the other stages, over the runtime that reaches the servers."""
    found: links.Links = runtimes.active().stage_links(place, queue_size)  # type: ignore[attr-defined]  # only a cluster's has stages
    return found


def _listed(endpoints: Sequence[str], to_string: bool) -> list[str] | str:
    return ",".join(endpoints) if to_string else list(endpoints)


def _check_strategy(strategy: Any) -> None:
    if not isinstance(strategy, DistributedStrategy | Mapping | None):
        raise ConfigError(
            f"the strategy is {strategy!r}; it must be a fleet.DistributedStrategy, such as "
            "DistributedStrategy(a_sync=True)"
        )


def _dirname(function: str, arguments: Sequence[Any]) -> str:
    """The folder among (dirname) or (executor, dirname[, program])."""
    for argument in arguments[:2]:
        if isinstance(argument, str | os.PathLike) and os.fspath(argument):
            return os.fspath(argument)
    raise UsageError(f"{function} needs a folder; it got {arguments!r}")
