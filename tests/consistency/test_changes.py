"""The mode is changed between two steps, on a fleet that goes on; also while its servers die.

One seed of deaths is that of continuous integration; PSFLEET_TORTURE=n adds n more.
"""

import random
import threading
from functools import partial

import numpy as np
import pytest

from psfleet.core.runtime.modes.switch import ModeSwitchRuntime
from psfleet.core.runtime.strategy import ConsistencySettings
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_launch.chaos.message_faults import MessageFaults
from tests.consistency.workers import change_modes, step, taken, together
from tests.programs import MORE

IDS = np.arange(8)
ASYNC, SYNC = ConsistencySettings("async"), ConsistencySettings("sync")
GEO, HALF = ConsistencySettings("geo", k_steps=2), ConsistencySettings("half-async", max_merge=3)
CLOSE, AHEAD = (ConsistencySettings("ssp", staleness=staleness) for staleness in (0, 1))
OTHER_GEO = ConsistencySettings("geo", k_steps=3)
MODES = [SYNC, ASYNC, AHEAD, SYNC, GEO, HALF, CLOSE, OTHER_GEO, SYNC]
DEATHS = 2 if MORE else 1  # of each server
POINTS = ("append", "tear", "appended", "applied", "settled")


def test_every_change() -> None:
    """Through all modes and back, each step counts as its mode says: in sync one round of all workers, in the
    others each push. The servers say which mode they are in. Lost answers and late repeats of an older
    mode's messages change nothing."""
    with LocalFleet(2, 2, in_process=True) as fleet:
        work = partial(change_modes, modes=[*MODES, *MODES[:3]], steps=3)
        together(fleet, ASYNC, work, lambda seed: MessageFaults(seed, drop=0.1, duplicate=0.3))


@pytest.mark.parametrize("seed", range(1 + MORE))
def test_each_step_counts_once_though_servers_die(seed: int) -> None:
    """Both servers are killed at seeded points; clocks, modes and sequences come back from their logs with
    the tables: nobody hangs, and after every mode the tables hold each step once."""
    dice = random.Random(seed)
    crashes = {
        server: [f"{dice.choice(POINTS)}:{dice.randint(1, 60 // DEATHS)}" for _ in range(DEATHS)]
        for server in range(2)
    }
    with LocalFleet(2, 2, durability="log", crashes=crashes) as fleet, fleet.reviving():
        modes = [AHEAD, GEO, SYNC, HALF, CLOSE, ASYNC]
        together(fleet, modes[0], partial(change_modes, modes=modes, steps=4))
        assert fleet.wait() == [0, 0]
        assert fleet.restarts == 2 * DEATHS


def test_a_worker_that_has_left_is_not_asked() -> None:
    """Those that are still there change the mode without it."""
    gone = threading.Event()

    def work(runtime: ModeSwitchRuntime) -> None:
        if runtime.worker_index == 1:
            runtime.close()
            gone.set()
            return
        assert gone.wait(60)
        for count, mode in enumerate((AHEAD, SYNC), 1):
            runtime.set_mode(mode)
            step(runtime, IDS)
            assert taken(runtime, IDS)[0] == count

    with LocalFleet(1, 2, in_process=True) as fleet:
        together(fleet, ASYNC, work)
