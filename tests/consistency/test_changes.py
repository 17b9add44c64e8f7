"""The mode is changed between two steps, on a fleet that goes on."""

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

from psfleet.core.base.errors import ConfigError
from psfleet.core.runtime.modes.switch import ModeSwitchRuntime
from psfleet.core.runtime.strategy import ConsistencySettings
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_launch.chaos.message_faults import MessageFaults
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.consistency.workers import DENSE, ROWS, step, taken, together
from tests.trainings import in_threads

IDS = np.arange(8)
MODES = [
    ConsistencySettings("sync"),
    ConsistencySettings("async"),
    ConsistencySettings("ssp", staleness=1),
    ConsistencySettings("sync"),
    ConsistencySettings("geo", k_steps=2),
    ConsistencySettings("half-async", max_merge=3),
    ConsistencySettings("ssp", staleness=0),
    ConsistencySettings("geo", k_steps=3),
    ConsistencySettings("sync"),
]
STEPS = 3


def check(runtime: ModeSwitchRuntime, expected: float) -> None:
    """All workers' steps so far are in the tables."""
    runtime.barrier()
    dense, rows = taken(runtime, IDS)
    assert [dense, *rows] == pytest.approx([expected] * 9, rel=1e-5)


def test_every_change() -> None:
    """Through all modes and back, each step counts as its mode says: in sync one round of all workers, in the
    others each push. The servers say which mode they are in. Lost answers and late repeats of an older
    mode's messages change nothing."""

    def train(fleet: LocalFleet, worker: int) -> None:
        faults = MessageFaults(seed=worker, drop=0.1, duplicate=0.3)
        cluster = ClusterRuntime(fleet.environment(worker), "async", inject_faults=faults)
        runtime = ModeSwitchRuntime(cluster, ConsistencySettings("async"))
        runtime.create(DENSE, np.zeros(DENSE.shape, np.float32))
        runtime.create(ROWS)
        expected = 0.0
        for consistency in [*MODES, *MODES[:3]]:
            runtime.set_mode(consistency)
            assert {server["mode"] for server in runtime.stats()} == {consistency.mode}
            for _ in range(STEPS):
                step(runtime, IDS)
            expected += STEPS * (1 if consistency.mode == "sync" else 2)
            check(runtime, expected)
        runtime.close()

    with LocalFleet(2, 2, in_process=True) as fleet:
        in_threads([partial(train, fleet, worker) for worker in range(2)])


def test_workers_that_disagree_change_nothing() -> None:
    """If workers ask for different modes each is told so, and training goes on in the old one."""

    def work(runtime: ModeSwitchRuntime) -> None:
        mine: Any = ["async", "ssp"][runtime.worker_index]
        with pytest.raises(ConfigError, match="another worker for something else"):
            runtime.set_mode(ConsistencySettings(mine))
        assert runtime.consistency.mode == "sync"
        step(runtime, IDS)
        check(runtime, 1)

    with LocalFleet(1, 2, in_process=True) as fleet:
        together(fleet, ConsistencySettings("sync"), work)


def test_a_worker_that_has_left_is_not_asked() -> None:
    """Those that are still there change the mode without it."""
    gone = threading.Event()

    def work(runtime: ModeSwitchRuntime) -> None:
        if runtime.worker_index == 1:
            runtime.close()
            gone.set()
            return
        assert gone.wait(60)
        runtime.set_mode(ConsistencySettings("ssp"))
        step(runtime, IDS)
        runtime.set_mode(ConsistencySettings("sync"))
        step(runtime, IDS)
        assert taken(runtime, IDS)[0] == 2

    with LocalFleet(1, 2, in_process=True) as fleet:
        together(fleet, ConsistencySettings("async"), work)
