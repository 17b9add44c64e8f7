"""Servers die in every mode, and while the mode changes; they come back from their logs.

One seed is that of continuous integration; PSFLEET_TORTURE=n adds n more.
"""

import os
import random
from functools import partial

import numpy as np
import pytest

from psfleet.core.runtime.modes.switch import connect
from psfleet.core.runtime.strategy import ConsistencySettings
from psfleet.fleet.testing.local_fleet import LocalFleet
from tests.consistency.workers import DENSE, ROWS, step, taken
from tests.trainings import in_threads

IDS = np.arange(8)
MODES = [
    ConsistencySettings("ssp", staleness=1),
    ConsistencySettings("geo", k_steps=2),
    ConsistencySettings("sync"),
    ConsistencySettings("half-async", max_merge=3),
    ConsistencySettings("ssp", staleness=0),
    ConsistencySettings("async"),
]
STEPS = 4
MORE = int(os.environ.get("PSFLEET_TORTURE", "0"))
DEATHS = 2 if MORE else 1  # of each server
POINTS = ("append", "tear", "appended", "applied", "settled")


@pytest.mark.parametrize("seed", range(1 + MORE))
def test_each_step_counts_once(seed: int) -> None:
    """Both servers are killed at seeded points; clocks, modes and sequences come back with the
    tables: nobody hangs, and after every mode the tables hold each step once."""
    dice = random.Random(seed)
    crashes = {
        server: [f"{dice.choice(POINTS)}:{dice.randint(1, 60 // DEATHS)}" for _ in range(DEATHS)]
        for server in range(2)
    }

    def train(fleet: LocalFleet, worker: int) -> None:
        runtime = connect(fleet.environment(worker), MODES[0])
        runtime.create(DENSE, np.zeros(DENSE.shape, np.float32))
        runtime.create(ROWS)
        expected = 0.0
        for consistency in MODES:
            if consistency != runtime.consistency:
                runtime.set_mode(consistency)
            for _ in range(STEPS):
                step(runtime, IDS)
            expected += STEPS * (1 if consistency.mode == "sync" else 2)
            runtime.barrier()
            dense, rows = taken(runtime, IDS)
            assert [dense, *rows] == pytest.approx([expected] * 9, rel=1e-5)
            runtime.barrier()
        runtime.close()

    with LocalFleet(2, 2, durability="log", crashes=crashes) as fleet, fleet.reviving():
        in_threads([partial(train, fleet, worker) for worker in range(2)])
        assert fleet.wait() == [0, 0]
        assert fleet.restarts == 2 * DEATHS
