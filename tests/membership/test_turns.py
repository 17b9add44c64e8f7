"""Workers die while the fleet changes between rounds and leases within an epoch of its dataset."""

import random

import pytest

from psfleet.core.runtime.strategy import ConsistencySettings
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.membership.test_deaths import BATCH, EPOCHS, SAMPLES, begin, run, step
from tests.programs import MORE
from tests.worker_deaths import DeathFault

ROUNDS, LEASED = 4, 4  # steps of each worker until it comes to the change of the mode


def train(runtime: ClusterRuntime, workers: int) -> None:
    """A script that changes to async mode and back within its dataset.

    In sync mode the number of the round says where, so that a later incarnation comes to the same place.
    """
    begin(runtime, workers)
    changes = 0
    own = 0  # steps since the last change
    for ranges in runtime.data_steps(runtime, SAMPLES, BATCH, EPOCHS, 0, 1):
        step(runtime, ranges)
        own += 1
        if changes == 0 and runtime.step >= ROUNDS:
            runtime.set_mode(ConsistencySettings("async"))
            changes, own = 1, 0
        elif changes == 1 and own >= LEASED:
            runtime.set_mode(ConsistencySettings("sync"))
            changes = 2
    assert changes == 2
    runtime.barrier()


@pytest.mark.parametrize("seed", range(2 + 4 * MORE))
def test_kills_around_a_change_keep_every_sample(seed: int) -> None:
    """Worker 1 dies at any call between its first step and its last, worker 0 too: no sample is used
    twice, and missing are only those of steps that are declared torn."""
    dice = random.Random(seed)
    deaths = {worker: [DeathFault(dice.randint(20, 90), dice.random() < 0.5)] for worker in (0, 1)}
    with LocalFleet(2, 2, in_process=True) as fleet:
        _, used = run("sync", fleet, deaths, train)
        torn = fleet.log(0).count("TORN_STEP")
    missing = used.count(0.0)
    assert max(used) == 1.0
    assert missing <= torn * BATCH
    assert torn or not missing
