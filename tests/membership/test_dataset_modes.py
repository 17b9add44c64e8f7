"""fleet.dataset beside what else a strategy says: local SGD, other modes, changes of the mode."""

import threading
from collections import Counter

import numpy as np
import pytest

from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine.round_plan import MOST
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Read
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.runtime.modes.local_sgd import LocalSGDRuntime
from psfleet.core.runtime.modes.switch import ModeSwitchRuntime
from psfleet.core.runtime.strategy import ConsistencySettings, LocalSGDSettings
from psfleet.fleet.testing.local_fleet import LocalFleet
from tests.consistency.workers import DENSE, ROWS, together
from tests.trainings import dependent, on_fleet

SAMPLES, BATCH, EPOCHS = 21, 2, 2
WEIGHTS = TableSpec("weights", "dense", (500,), make_rule("adam", {}))
ONCE = Counter(dict.fromkeys(range(SAMPLES * EPOCHS), 1))


@pytest.mark.parametrize("rows", [False, True])
def test_local_training_uses_each_sample_once(rows: bool) -> None:
    """Three workers with unequal last rounds, averaging every third step: every sample is in one step,
    and all end with the same weights, whether steps push rows to the servers or stay local."""
    used: Counter[int] = Counter()
    ended: dict[int, bytes] = {}

    def work(fleet: LocalFleet, worker: int) -> None:
        runtime = LocalSGDRuntime(
            fleet.connect(worker, "sync"), LocalSGDSettings(k_steps=3, begin_step=2)
        )
        runtime.create(WEIGHTS, np.linspace(-1, 1, 500, dtype=np.float32))
        runtime.create(ROWS)
        for ranges in runtime.data_steps(runtime, SAMPLES, BATCH, EPOCHS, 0, 1):
            chosen = np.concatenate([np.arange(*pair) for pair in ranges])
            used.update(chosen.tolist())
            gradients = [dependent(runtime, WEIGHTS, chosen, 0.01)]
            if rows:
                ones = np.ones((len(chosen), ROWS.dim), np.float32)
                gradients.append(Gradient(ROWS.key, ones, chosen, 1.0))
            runtime.push(gradients, samples=len(chosen))
        runtime.barrier()
        (weights,) = runtime.pull([Read(WEIGHTS.key)])
        ended[worker] = weights.tobytes()
        runtime.close()

    on_fleet(work, 2, 3)
    assert used == ONCE
    assert len(set(ended.values())) == 1


@pytest.mark.parametrize("merged", [1, 2])
def test_rounds_and_leases_follow_each_other_within_a_dataset(merged: int) -> None:
    """Changes that fall inside an epoch, there and back and from lease to lease, two of them also between the
    same two steps: every sample is handed out once."""
    modes = ["async", "sync", "ssp", "sync", "half-async", "ssp geo", "async sync"]
    size = 80 * merged
    used: Counter[int] = Counter()
    left: list[int] = []

    def work(runtime: ModeSwitchRuntime) -> None:
        todo = list(modes)
        for number, ranges in enumerate(
            runtime.data_steps(runtime, size, BATCH, EPOCHS, 0, merged), 1
        ):
            used.update(position for pair in ranges for position in range(*pair))
            if number % merged == 0:
                runtime.pull([Read(DENSE.key)])
                runtime.push([Gradient(DENSE.key, np.ones(DENSE.shape, np.float32), None, 1.0)])
            if todo and number % (2 * merged) == 0:
                for mode in todo.pop(0).split():
                    runtime.set_mode(ConsistencySettings(mode))  # type: ignore[arg-type]  # a mode
        left.append(len(todo))

    with LocalFleet(2, 2, in_process=True) as fleet:
        together(fleet, ConsistencySettings("sync"), work)
    assert left == [0, 0]
    assert used == Counter(dict.fromkeys(range(size * EPOCHS), 1))


@pytest.mark.parametrize("mode", ["async", "geo"])
def test_what_a_worker_leaves_of_its_lease_is_used_once(mode: Mode) -> None:
    """Worker 1 takes a lease, makes one of its steps and leaves. Worker 0 gets the other steps, not that
    one, although worker 1 has not finished the lease."""
    used: Counter[int] = Counter()
    done = threading.Event()

    def work(runtime: ModeSwitchRuntime) -> None:
        leaves = runtime.worker_index == 1
        assert leaves or done.wait(60)
        for ranges in runtime.data_steps(runtime, SAMPLES, BATCH, 1, 0, 1):
            used.update(position for pair in ranges for position in range(*pair))
            runtime.push([Gradient(DENSE.key, np.ones(DENSE.shape, np.float32), None, 1.0)])
            if leaves:
                break
        if leaves:
            runtime.close()
            done.set()

    with LocalFleet(2, 2, in_process=True) as fleet:
        together(fleet, ConsistencySettings(mode), work)
        assert fleet.wait(60) == [0, 0]
    assert used == Counter(dict.fromkeys(range(SAMPLES), 1))


@pytest.mark.parametrize("mode", ["sync", "half-async"])
def test_a_dataset_without_an_end_deals_until_the_script_stops(mode: Mode) -> None:
    """No sample comes twice in an epoch, through changes of the mode too; a worker that stops may leave."""
    used: Counter[int] = Counter()

    def work(runtime: ModeSwitchRuntime) -> None:
        steps = 3 * SAMPLES  # of each worker, over several epochs
        data_steps = runtime.data_steps(runtime, SAMPLES, BATCH, MOST // SAMPLES, 0, 1)
        for number, ranges in enumerate(data_steps, 1):
            used.update(position for pair in ranges for position in range(*pair))
            runtime.pull([Read(DENSE.key)])
            runtime.push([Gradient(DENSE.key, np.ones(DENSE.shape, np.float32), None, 1.0)])
            if number == SAMPLES:
                runtime.set_mode(ConsistencySettings("async" if mode == "sync" else "sync"))
            if number == 2 * SAMPLES:
                runtime.set_mode(ConsistencySettings(mode))
            if number == steps:
                break
        runtime.flush()

    with LocalFleet(2, 2, in_process=True) as fleet:
        together(fleet, ConsistencySettings(mode), work)
        assert fleet.wait(60) == [0, 0]
    assert set(used.values()) == {1}
    assert len(used) > 5 * SAMPLES * BATCH
