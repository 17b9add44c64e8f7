"""A small training run whose result depends on everything that can go wrong."""

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Read, Runtime, TableState
from psfleet.core.engine.schema.table import InitializerSpec, RowPrecision, TableSpec
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from psfleet_worker.session.retry_policy import Patience

PATIENCE = Patience(reply=500.0, outage=500.0, start=500.0, leave=60.0)
"""Patience of workers whose servers start again, on any machine."""


@dataclass(frozen=True)
class TrainingWorkload:
    """A dense table under Adam and a sparse one under Adagrad, trained for some steps.

    Each gradient is a function of the pulled weights, the worker and the step, so that a wrong
    version, order or member of a round changes the final bits. `pause`: seconds after each step.
    `awaits`: until this holds each step takes half a second. `precision`: of the sparse table.
    """

    steps: int = 40
    shape: tuple[int, ...] = (137, 61)
    dim: int = 5
    pause: float = 0.0
    precision: RowPrecision = "float32"
    awaits: Callable[[], object] = lambda: True

    @property
    def dense(self) -> TableSpec:
        """Three blocks, the last one not full."""
        return TableSpec("training/dense", "dense", self.shape, make_rule("adam", {}))

    @property
    def sparse(self) -> TableSpec:
        """Any 64-bit id."""
        return TableSpec(
            "training/sparse",
            "sparse",
            (self.dim,),
            make_rule("adagrad", {}),
            initializer=InitializerSpec("uniform", -0.1, 0.1),
            seed=7,
            precision=self.precision,
        )

    def run(self, runtime: Runtime) -> None:
        """One worker's part."""
        value = np.linspace(-1, 1, self.dense.size, dtype=np.float32).reshape(self.shape)
        runtime.create(self.dense, value)
        runtime.create(self.sparse)
        for step in range(self.steps):
            self._step(runtime, np.random.default_rng((runtime.worker_index, step)))
            time.sleep(self.pause if self.awaits() else 0.5)
        runtime.flush()

    def _step(self, runtime: Runtime, dice: np.random.Generator) -> None:
        ids = dice.choice(np.array([0, -1, 2**63 - 1, -(2**63), *range(1, 200)]), (16, 4))
        weights, rows = runtime.pull([Read(self.dense.key), Read(self.sparse.key, ids)])
        slope = dice.standard_normal(self.shape, np.float32)
        noise = dice.standard_normal(rows.shape, np.float32)
        runtime.push(
            [
                Gradient(self.dense.key, weights * np.float32(0.1) + slope, None, 0.01),
                Gradient(
                    self.sparse.key, (rows + noise).reshape(-1, self.dim), ids.reshape(-1), 0.05
                ),
            ],
            samples=len(ids),
            loss=float(np.square(rows).mean()),
        )

    def result(self, runtime: Runtime) -> list[TableState]:
        """Both tables, optimizer state included."""
        return [runtime.read_table(self.dense.key), runtime.read_table(self.sparse.key)]


def zero_rows(name: str, dim: int = 1) -> TableSpec:
    """A table under SGD whose rows begin with 0, so that they count what is pushed."""
    zero = InitializerSpec("constant", 0.0)
    return TableSpec(name, "sparse", (dim,), make_rule("sgd", {}), initializer=zero)


def one_more(table: TableSpec, ids: NDArray[np.int64]) -> Gradient:
    """Adds 1 to the rows of these ids in a table of `zero_rows`."""
    return Gradient(table.key, np.full((len(ids), table.dim), -1, np.float32), ids, 1.0)


def dependent(runtime: Runtime, table: TableSpec, seed: ArrayLike, rate: float = 0.05) -> Gradient:
    """A gradient of a dense table, every bit of which depends on the table's weights and on the seed."""
    (weights,) = runtime.pull([Read(table.key)])
    noise = np.random.default_rng(seed).standard_normal(table.shape, np.float32)  # type: ignore[arg-type]
    return Gradient(table.key, weights * np.float32(0.1) + noise, None, rate)


def in_threads(works: Sequence[Callable[[], None]]) -> None:
    """Run the works at the same time; raises the first error after all of them have ended.

    Each error is printed when it happens: the others may then wait for that worker for a long time.
    """
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            traceback.print_exception(error)
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def on_fleet(
    work: Callable[[LocalFleet, int], None], servers: int = 2, workers: int = 2, **settings: Any
) -> None:
    """Let all workers of a new fleet do the work, each given its number; its servers end then."""
    with LocalFleet(servers, workers, in_process=True, **settings) as fleet:
        in_threads([partial(work, fleet, worker) for worker in range(workers)])
        assert fleet.wait(60) == [0] * servers


def same_bits(left: Sequence[TableState], right: Sequence[TableState]) -> None:
    """Raise AssertionError unless both results are equal in every bit."""
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.step == other.step
        assert (one.ids is None) == (other.ids is None)
        if one.ids is not None and other.ids is not None:
            np.testing.assert_array_equal(one.ids, other.ids)
        for ours, theirs in zip(one.values, other.values, strict=True):
            np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


def trained(fleet: LocalFleet, training: TrainingWorkload) -> list[TableState]:
    """The tables after sync training by all workers of the fleet, whose servers may die and come back."""

    def connect(worker: int) -> ClusterRuntime:
        return ClusterRuntime(fleet.environment(worker), "sync", patience=PATIENCE)

    with fleet.reviving() if fleet.durability != "none" else contextlib.nullcontext():
        states = train_together(fleet.workers, training, connect)
        assert fleet.wait(300) == [0] * fleet.servers, [fleet.log(i) for i in range(fleet.servers)]
    return states


def train_together(
    workers: int, training: TrainingWorkload, connect: Callable[[int], Runtime]
) -> list[TableState]:
    """Let so many workers train at the same time; the tables that worker 0 then reads.

    Args:
        connect: Gives the runtime of a worker, in the thread that is to use it.
    """
    result: list[TableState] = []

    def work(worker: int) -> None:
        runtime = connect(worker)
        training.run(runtime)
        runtime.barrier()
        if worker == 0:
            result.extend(training.result(runtime))
        runtime.barrier()
        runtime.close()

    in_threads([partial(work, worker) for worker in range(workers)])
    return result
