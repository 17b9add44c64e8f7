"""Local SGD on a cluster: what is local, what is averaged, and what the servers end with."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from psfleet.core.base.errors import ConfigError, ShapeError, UsageError
from psfleet.core.base.scaling_files import read_scale
from psfleet.core.client.client import Client
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Read, Runtime
from psfleet.core.engine.schema.entry import CapacityEntry
from psfleet.core.engine.schema.table import InitializerSpec, TableSpec
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.modes.local_sgd import LocalSGDRuntime
from psfleet.core.runtime.strategy import LocalSGDSettings, Settings
from psfleet.fleet.testing.local_fleet import LocalFleet
from tests.trainings import in_threads

SGD = make_rule("sgd", {})
W = TableSpec("local/w", "dense", (3, 2), SGD)
V = TableSpec("local/v", "dense", (5000,), make_rule("momentum", {"momentum": 0.5}))
ROWS = TableSpec("local/rows", "sparse", (1,), SGD, initializer=InitializerSpec("constant", 0.0))
Floats = NDArray[np.float32]
Work = Callable[[Runtime], None]


def together(servers: int, workers: int, settings: LocalSGDSettings, work: Work) -> None:
    """Every worker of a fleet does the work, in rounds, with local dense tables."""

    def train(fleet: LocalFleet, worker: int) -> None:
        runtime = LocalSGDRuntime(fleet.connect(worker, "sync"), settings)
        work(runtime)
        runtime.close()

    with LocalFleet(servers, workers, in_process=True) as fleet:
        in_threads([partial(train, fleet, worker) for worker in range(workers)])
        assert fleet.wait() == [0] * servers


def create(runtime: Runtime) -> None:
    runtime.create(W, np.zeros((3, 2), np.float32))
    runtime.create(V, np.zeros(5000, np.float32))
    runtime.create(ROWS)


def step(runtime: Runtime, value: float) -> None:
    """A push of `value` everywhere."""
    runtime.pull([Read(W.key), Read(ROWS.key, np.array([7])), Read(V.key)])
    runtime.push(
        [
            Gradient(W.key, np.full((3, 2), value, np.float32), None, 1.0),
            Gradient(V.key, np.full(5000, value, np.float32), None, 1.0),
            Gradient(ROWS.key, np.full((1, 1), value, np.float32), np.array([7]), 1.0),
        ]
    )


def test_workers_differ_until_they_average() -> None:
    """Worker 0 pushes 1, worker 1 pushes 3. After begin_step shared rounds of 2 each goes its own
    way, while rows are shared all the time; every third push the dense weights become the mean."""
    seen: dict[int, list[float]] = {}

    def work(runtime: Runtime) -> None:
        create(runtime)
        mine = seen[runtime.worker_index] = []
        for _ in range(8):
            step(runtime, 1.0 + 2 * runtime.worker_index)
            w, rows = runtime.pull([Read(W.key), Read(ROWS.key, np.array([7]))])
            mine.append(float(w[0, 0]))
            assert rows[0, 0] == -2.0 * len(mine)

    together(2, 2, LocalSGDSettings(k_steps=3, begin_step=2), work)
    assert seen[0] == [-2, -4, -5, -6, -10, -11, -12, -16]
    assert seen[1] == [-2, -4, -7, -10, -10, -13, -16, -16]


def test_one_step_is_the_plain_run() -> None:
    """Under SGD with k_steps 1 the weights are those of averaged gradients."""
    ends: list[Floats] = []

    def work(runtime: Runtime) -> None:
        create(runtime)
        for number in range(5):
            step(runtime, 2.0**-number * (1 + runtime.worker_index))
        ends.append(runtime.pull([Read(W.key)])[0])

    together(1, 2, LocalSGDSettings(), work)
    expected = -sum(1.5 * 2.0**-number for number in range(5))
    assert all((end == expected).all() for end in ends)


def test_unequal_numbers_of_steps_meet_at_the_barrier(tmp_path: Path) -> None:
    """A worker with fewer steps takes part in the others' averages; after the barrier everybody and
    the servers have the mean of those who trained, and that is what is saved."""
    path = str(tmp_path / "saved")

    def work(runtime: Runtime) -> None:
        create(runtime)
        for _ in range(3 + 4 * runtime.worker_index):
            step(runtime, 1.0)
        runtime.barrier()
        assert (runtime.pull([Read(W.key)])[0] == -7).all()
        if runtime.worker_index == 0:
            runtime.save(path)
        runtime.barrier()

    together(2, 2, LocalSGDSettings(k_steps=2, begin_step=1), work)
    alone = EmbeddedRuntime()
    alone.load(path)
    assert (alone.read_table(W.key).values[0] == -7).all()
    assert alone.read_table(V.key).step == 3  # worker 0's own count goes with its optimizer state


def test_what_one_worker_writes_counts_for_all() -> None:
    """A table that is written, as by set_state_dict or load_model, is taken over at the barrier."""

    def work(runtime: Runtime) -> None:
        create(runtime)
        for _ in range(4):
            step(runtime, 1.0 + runtime.worker_index)
        runtime.barrier()
        if runtime.worker_index == 0:
            state = runtime.read_table(W.key)
            state.values[0] = np.full((3, 2), 42, np.float32)
            runtime.write_table(W.key, state)
        runtime.barrier()
        assert (runtime.pull([Read(W.key)])[0] == 42).all()
        assert runtime.all_reduce(np.ones(1, np.float32))[0] == 2

    together(1, 2, LocalSGDSettings(k_steps=2), work)


def test_servers_get_no_dense_gradients() -> None:
    """Between averages only rows travel: the servers count one update of the dense tables."""

    def work(runtime: Runtime) -> None:
        create(runtime)
        for _ in range(6):
            step(runtime, 1.0)
        steps = {
            table["name"]: table["step"] for server in runtime.stats() for table in server["tables"]
        }
        # The last is not committed.
        assert (steps[W.name], steps[V.name], steps[ROWS.name]) == (1, 1, 5)

    together(1, 1, LocalSGDSettings(k_steps=100), work)


def test_calls_for_the_cluster_reach_it() -> None:
    """A request for servers arrives at server 0, and a mode that contradicts localsgd is refused, whichever
    call asks for it."""
    settings = Settings.from_parts({"localsgd": {"k_steps": 2}})
    with LocalFleet(1, 1, in_process=True) as fleet:
        cluster = fleet.connect(0, "sync")
        cluster.check = lambda consistency: dataclasses.replace(settings, consistency=consistency)
        runtime = LocalSGDRuntime(cluster, LocalSGDSettings(k_steps=2))
        with pytest.raises(ConfigError, match="localsgd and the consistency mode 'async'"):
            Client(runtime).set_mode("async")
        runtime.scale(2)
        assert read_scale(fleet.snapshots.parent) == (1, 2)
        runtime.close()


def test_a_push_that_raises_changes_nothing() -> None:
    """Neither one with a gradient that does not fit, nor one that tells that an earlier push was refused."""
    few = dataclasses.replace(ROWS, entry=CapacityEntry(rows=2, full="refuse"))

    def work(runtime: Runtime) -> None:
        runtime.create(W, np.zeros((3, 2), np.float32))
        runtime.create(few)

        def push(rows: int, width: int = 1) -> None:
            values = np.ones((rows, width), np.float32)
            runtime.push(
                [
                    Gradient(W.key, np.ones((3, 2), np.float32), None, 1.0),
                    Gradient(few.key, values, np.arange(rows), 1.0),
                ]
            )

        push(1)
        with pytest.raises(ShapeError):
            push(1, width=2)
        push(5)  # refused, as far as servers get it
        with pytest.raises(UsageError, match="'local/rows' is full"):
            push(1)
        push(1)
        runtime.flush()
        assert runtime.pull([Read(W.key)])[0].tolist() == [[-3, -3]] * 3

    together(1, 1, LocalSGDSettings(k_steps=100, begin_step=1), work)
