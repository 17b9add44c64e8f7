"""Workers that die at any call and come back, or do not: who is in a round, and what becomes of data.

A worker's death is one of its calls that is not made, or whose answer is not heard, while its calls
to the other servers may be under way: that is how a kill falls between servers. The seeds are those
of continuous integration; PSFLEET_TORTURE=n adds n more.
"""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from psfleet.core.base.errors import Fenced
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine.round_plan import Range
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Read, TableState
from psfleet.core.engine.schema.table import TableSpec
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.programs import MORE
from tests.trainings import dependent, in_threads, one_more, same_bits, zero_rows
from tests.worker_deaths import DeathFault, SimulatedDeath

SILENCE = 5.0  # seconds after which a worker is taken for dead; a living one on a busy host is not
SAMPLES, BATCH, EPOCHS = 100, 4, 2
WEIGHTS = TableSpec("weights", "dense", (9000,), make_rule("adam", {}))


def counts(worker: int) -> TableSpec:
    """A table that only this worker names counts its uses of each sample."""
    return zero_rows(f"counts {worker}")


def begin(runtime: ClusterRuntime, workers: int) -> None:
    """Make the tables."""
    for worker in range(workers):
        runtime.create(counts(worker))
    runtime.create(WEIGHTS, np.linspace(-1, 1, 9000, dtype=np.float32))


def train(runtime: ClusterRuntime, workers: int) -> None:
    """A script: tables, a collective, a dataset, a collective."""
    begin(runtime, workers)
    assert runtime.all_reduce(np.ones(2), "max").sum() == 2
    for ranges in runtime.data_steps(runtime, SAMPLES, BATCH, EPOCHS, 0, 1):
        step(runtime, ranges)
    runtime.barrier()


def step(runtime: ClusterRuntime, ranges: tuple[Range, ...]) -> None:
    """One step with the samples at these positions; every bit of the weights depends on all of it."""
    chosen = np.concatenate([np.arange(*pair) for pair in ranges])
    use = one_more(counts(runtime.worker_index), chosen)
    runtime.push([use, dependent(runtime, WEIGHTS, chosen, 0.01)], samples=len(chosen))


def results(runtime: ClusterRuntime, workers: int) -> tuple[TableState, list[float]]:
    """The weights, and how often each position of the data was used."""
    used = np.zeros(SAMPLES * EPOCHS)
    for worker in range(workers):
        state = runtime.read_table(counts(worker).key)
        assert state.ids is not None
        np.add.at(used, state.ids, state.values[0][:, 0])
    return runtime.read_table(WEIGHTS.key), list(used)


def run(
    mode: Mode,
    fleet: LocalFleet,
    deaths: dict[int, list[DeathFault]],
    script: Callable[[ClusterRuntime, int], None] = train,
    read: Callable[[ClusterRuntime, int], tuple[TableState, Any]] = results,
) -> tuple[TableState, Any]:
    """Run the script with these deaths of each worker; what worker 0 reads at its end."""
    found: list[tuple[TableState, Any]] = []

    def work(worker: int) -> None:
        for death in [*deaths.get(worker, []), None]:
            try:
                runtime = ClusterRuntime(fleet.environment(worker), mode, inject_faults=death)
            except SimulatedDeath:  # while it asked a server that was away
                continue
            try:
                script(runtime, fleet.workers)
                if worker == 0:
                    found.append(read(runtime, fleet.workers))
                runtime.barrier()
                if death is not None:  # who dies while it leaves is the launcher's affair
                    death.calls = 0
                runtime.close()
                return
            except SimulatedDeath:
                runtime.abandon()

    in_threads([partial(work, worker) for worker in range(fleet.workers)])
    assert fleet.wait() == [0] * fleet.servers
    return found[0]


def some(seed: int, lowest: int = 15, highest: int = 110) -> DeathFault:
    """A death at a call that the seed chooses."""
    dice = random.Random(seed)
    return DeathFault(dice.randint(lowest, highest), dice.random() < 0.5)


@pytest.fixture(scope="module")
def expected() -> TableState:
    """Sync weights without deaths."""
    with LocalFleet(2, 2, in_process=True) as fleet:
        weights, used = run("sync", fleet, {})
    assert used == [1.0] * SAMPLES * EPOCHS
    return weights


@pytest.mark.parametrize("seed", range(1 + MORE))
def test_a_worker_that_comes_back_changes_no_bit(expected: TableState, seed: int) -> None:
    """Sync mode: worker 1 dies twice, worker 0 once, anywhere; rounds and bits are the same."""
    deaths = {1: [some(seed), some(seed + 1000)], 0: [some(seed + 2000, 40)]}
    with LocalFleet(2, 2, in_process=True) as fleet:
        weights, used = run("sync", fleet, deaths)
    same_bits([weights], [expected])
    assert used == [1.0] * SAMPLES * EPOCHS
    assert all(death.happened for each in deaths.values() for death in each)


def test_a_silent_worker_is_fenced() -> None:
    """Who is removed although it lives hears so by name."""
    with LocalFleet(1, 2, dead_after=SILENCE, in_process=True) as fleet:
        runtime = ClusterRuntime(fleet.environment(0), "sync")
        silent = ClusterRuntime(fleet.environment(1), "sync")
        silent._fleet.heartbeats.stop()
        for each in (runtime, silent):
            each.create(WEIGHTS, np.zeros(9000, np.float32))
        runtime.push([Gradient(WEIGHTS.key, np.ones(9000, np.float32), None, 0.1)])
        runtime.flush()  # returns once worker 1's seat is removed
        with pytest.raises(Fenced, match="has ended"):
            silent.pull([Read(WEIGHTS.key)])
        silent.abandon()
        runtime.close()
        assert fleet.wait() == [0]
