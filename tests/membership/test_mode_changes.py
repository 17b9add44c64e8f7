"""A worker that starts again after changes of the mode joins in the mode that the fleet is in."""

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.job_files import write_request
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine.runtime_interface import Gradient, Read
from psfleet.core.net.v1 import shard_pb2
from psfleet.core.runtime.modes.switch import ModeSwitchRuntime
from psfleet.core.runtime.strategy import ConsistencySettings
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.consistency.workers import DENSE, ROWS, ready, step
from tests.trainings import on_fleet
from tests.watched_calls import WatchedCalls
from tests.worker_deaths import SimulatedDeath

FIRST = ConsistencySettings("sync")
CHANGES = [
    ConsistencySettings("geo", k_steps=2),
    ConsistencySettings("ssp", staleness=1),
    ConsistencySettings("half-async", max_merge=2),
    ConsistencySettings("sync"),
]
SAMPLES, BATCH = 24, 2


class Dead(Exception):
    """The worker's process is gone."""


def run_again(
    fleet: LocalFleet, worker: int, script: Callable[[ModeSwitchRuntime], None]
) -> ModeSwitchRuntime:
    """A worker that has run the script, from its start once more if it has died."""
    runtime = ready(fleet, worker, FIRST)
    try:
        script(runtime)
    except Dead:
        runtime.abandon()
        runtime = ready(fleet, worker, FIRST)
        script(runtime)
    return runtime


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param(phase, marks=() if phase in (2, 3) else pytest.mark.long)
        for phase in (0, 2, 3, 4)
    ],
)
def test_a_restarted_worker_joins_in_the_present_mode(phase: int) -> None:
    """Worker 1 dies within the dataset after the phase-th change of the mode; its script runs from the
    start. It passes over the changes behind the fleet, makes the others with it, and each sample of
    each dataset is used once."""
    used: list[Counter[int]] = [Counter() for _ in range(1 + len(CHANGES))]
    modes: dict[int, list[str]] = {0: [], 1: []}
    died: list[bool] = []

    def script(runtime: ModeSwitchRuntime) -> None:
        modes[runtime.worker_index].append(runtime.consistency.mode)
        for number, consistency in enumerate([FIRST, *CHANGES]):
            if number:
                runtime.set_mode(consistency)
            for done, ranges in enumerate(runtime.data_steps(runtime, SAMPLES, BATCH, 1, 0, 1), 1):
                assert runtime.consistency == consistency
                chosen = np.concatenate([np.arange(*pair) for pair in ranges])
                step(runtime, chosen)
                runtime.flush()
                used[number].update(chosen.tolist())
                if (runtime.worker_index, number, done) == (1, phase, 2) and not died:
                    died.append(True)
                    raise Dead
            runtime.barrier()

    def work(fleet: LocalFleet, worker: int) -> None:
        runtime = run_again(fleet, worker, script)
        dense, rows = runtime.pull([Read(DENSE.key), Read(ROWS.key, np.arange(SAMPLES))])
        assert np.isfinite(dense).all()
        assert np.isfinite(rows).all()
        runtime.close()

    on_fleet(work)
    once = Counter(dict.fromkeys(range(SAMPLES), 1))
    assert modes == {0: [FIRST.mode], 1: [FIRST.mode, [FIRST, *CHANGES][phase].mode]}
    # A merged push may be given out once more to whoever comes after the dead worker.
    for number, counts in enumerate(used):
        if number == phase == 3:
            assert counts.keys() == once.keys()
        else:
            assert counts == once


def test_a_mode_request_from_outside_is_for_those_who_come_later_too() -> None:
    """Workers follow a mode request at the barrier after it, once; a worker that starts again passes that
    barrier and is in that mode. One that the strategy does not allow changes nothing."""
    modes: dict[int, list[str]] = {0: [], 1: []}
    taken: list[bool] = []

    def script(fleet: LocalFleet, runtime: ModeSwitchRuntime) -> None:
        assert not taken or runtime.consistency == ConsistencySettings("ssp", staleness=1)
        runtime.check = partial(refuse, "geo")
        requests = [{"mode": "ssp", "staleness": 1}, None, {"mode": "geo"}]
        for number, mode_request in enumerate(requests, 1):
            if mode_request is not None and runtime.worker_index == 0:
                write_request(fleet.snapshots.parent, number, mode_request)
            runtime.barrier()
            modes[runtime.worker_index].append(runtime.consistency.mode)
            if runtime.worker_index == 1 and number == 2 and not taken:
                taken.append(True)
                raise Dead
            step(runtime, np.arange(3))

    def work(fleet: LocalFleet, worker: int) -> None:
        run_again(fleet, worker, partial(script, fleet)).close()

    on_fleet(work)
    assert modes == {0: ["ssp"] * 3, 1: ["ssp"] * 5}


def refuse(mode: str, expected: ConsistencySettings) -> None:
    """A strategy that does not go with the mode."""
    if expected.mode == mode:
        raise ConfigError(f"this strategy does not go with {mode!r}")


IDS = np.arange(10)  # on both servers


def change(told: int, arrive: Callable[[], None]) -> WatchedCalls:
    """Stands before the first word of a worker to each server from `told` on that the mode is changed."""

    def before(server: int, method: str, request: bytes) -> None:
        joins = method == "Shard/Join" and server >= told
        if joins and shard_pb2.JoinRequest.FromString(request).switch:
            arrive()

    return WatchedCalls(before)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("sync", "async", 1),
        pytest.param("async", "sync", 0, marks=pytest.mark.long),
        ("async", "sync", 1),
        pytest.param("async", "ssp", 0, marks=pytest.mark.long),
    ],
)
def test_a_later_incarnation_makes_the_change(before: Mode, after: Mode, told: int) -> None:
    """Worker 0 has told no server, or the first one, when worker 1's later incarnation begins and trains: it
    is in the new mode, which holds on all servers, and every sample of the dataset is used once, by all of
    them."""
    used: Counter[int] = Counter()
    begun, modes = threading.Event(), []

    def script(runtime: ClusterRuntime) -> None:
        runtime.create(ROWS)
        for _ in range(3 * runtime.worker_index if runtime.mode.name == "async" else 0):
            runtime.push([])  # numbers that the second server has not seen when it changes
        runtime.set_mode(ConsistencySettings(after))
        for ranges in runtime.data_steps(runtime, SAMPLES, BATCH, 1, 0, 1):
            runtime.pull([Read(ROWS.key, IDS)])
            ones = Gradient(ROWS.key, np.ones((len(IDS), ROWS.dim), np.float32), IDS, 1.0)
            runtime.push([ones], samples=len(ranges))
            if runtime.worker_index == 1:
                begun.set()
            used.update(position for pair in ranges for position in range(*pair))
        runtime.barrier()
        (rows,) = runtime.pull([Read(ROWS.key, IDS)])
        # In a round the steps of both workers are one.
        steps = SAMPLES // BATCH // (2 if after == "sync" else 1)
        np.testing.assert_array_equal(rows, np.full(rows.shape, -steps, np.float32))
        runtime.close()

    def wait() -> None:
        assert begun.wait(60)

    def die() -> None:
        raise SimulatedDeath("the worker has died before it told the servers")

    def work(fleet: LocalFleet, worker: int) -> None:
        inject_faults = change(told, die if worker else wait)
        runtime = ClusterRuntime(fleet.environment(worker), before, inject_faults=inject_faults)
        try:
            script(runtime)
        except SimulatedDeath:
            runtime.abandon()
            again = ClusterRuntime(fleet.environment(worker), before)
            modes.append(again.mode.name)
            script(again)

    on_fleet(work)
    assert modes == [after]
    assert used == Counter(dict.fromkeys(range(SAMPLES), 1))
