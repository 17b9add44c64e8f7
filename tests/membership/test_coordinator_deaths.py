"""Server 0, which is the coordinator, dies while workers die and come back, also within a change."""

import random

import pytest

from psfleet.core.base.settings.environment import Environment
from psfleet.core.engine.runtime_interface import TableState
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.membership.test_deaths import BATCH, EPOCHS, SAMPLES, results, run, some, train
from tests.programs import MORE
from tests.trainings import in_threads, same_bits

POINTS: tuple[str, ...] = ("appended", "install")
if MORE:
    POINTS += ("append", "tear", "settled", "freeze")


@pytest.fixture(scope="module")
def expected() -> TableState:
    """Sync weights without deaths."""
    with LocalFleet(2, 2, in_process=True) as fleet:
        return run("sync", fleet, {})[0]


def crash(point: str, seed: int) -> str:
    """The point is reached some time in the run: changes of the view reach some of them seldom."""
    return f"{point}:{random.Random(seed).randint(2, 7 if point in ('freeze', 'install') else 60)}"


@pytest.mark.parametrize(
    "point",
    [pytest.param(point, marks=[pytest.mark.long] * (point != "install")) for point in POINTS],
)
def test_a_coordinator_that_comes_back_changes_no_bit(expected: TableState, point: str) -> None:
    """Sync mode: server 0 and a worker die; the log says who was in the fleet and what was decided."""
    for seed in range(1 + MORE):
        crashes = {0: [crash(point, seed)], 1: [crash("append", seed + 1000)]}
        deaths = {1: [some(seed + POINTS.index(point))]}
        with LocalFleet(2, 2, durability="log", crashes=crashes) as fleet, fleet.reviving():
            weights, used = run("sync", fleet, deaths)
            assert fleet.restarts >= 1
        same_bits([weights], [expected])
        assert used == [1.0] * SAMPLES * EPOCHS


@pytest.mark.parametrize("seed", range(1 + MORE))
def test_leases_survive_the_coordinator(seed: int) -> None:
    """Async mode: the same; no sample twice, and missing only those of steps declared torn."""
    crashes = {0: [crash("append", seed), crash("install", seed)]}
    with LocalFleet(2, 2, durability="log", crashes=crashes) as fleet, fleet.reviving():
        _, used = run("async", fleet, {1: [some(seed, 12, 40)]})
        torn = fleet.log(0).count("TORN_STEP")
        assert fleet.restarts >= 1
    assert max(used) == 1.0
    assert used.count(0.0) <= torn * 4 * BATCH


def test_a_worker_is_added() -> None:
    """Sync mode: a third worker comes while two train; every sample is still used once."""
    curves: list[list[float]] = []
    with LocalFleet(2, 2, in_process=True) as fleet:

        def work(worker: int, workers: int) -> None:
            environment = Environment("worker", worker, fleet.endpoints, workers)
            runtime = ClusterRuntime(environment, "sync")
            train(runtime, 3)
            if worker == 0:
                curves.append(results(runtime, 3)[1])
            runtime.barrier()
            runtime.close()

        in_threads([lambda: work(0, 2), lambda: work(1, 2), lambda: work(2, 3)])
        assert fleet.wait() == [0, 0]
    assert curves == [[1.0] * SAMPLES * EPOCHS]
