"""A worker dies after all have met to go on in another mode, and starts again before that has been done."""

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from psfleet.consistency import find_mode
from psfleet.faults import SimulatedDeath
from psfleet.runtime.interface import Gradient, Read
from psfleet.settings.mode_names import Mode
from psfleet.testing.local_fleet import LocalFleet
from psfleet.wire.v1 import shard_pb2
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.consistency.workers import ROWS
from tests.membership.test_deaths import Steps
from tests.trainings import in_threads

Send = Callable[[str, bytes, float], bytes]
SAMPLES, BATCH = 24, 2
IDS = np.arange(10)  # on both servers


class Change:
    """Stands before the first word of a worker to each server from `told` on that the mode is changed."""

    def __init__(self, told: int, arrive: Callable[[], None]) -> None:
        self.told = told
        self.arrive = arrive

    def __call__(self, server: int, send: Send) -> Send:
        """See ClusterRuntime's `meddle`."""

        def meddled(method: str, request: bytes, seconds: float) -> bytes:
            joins = method == "Shard/Join" and server >= self.told
            if joins and shard_pb2.JoinRequest.FromString(request).switch:
                self.arrive()
            return send(method, request, seconds)

        return meddled


@pytest.mark.parametrize("told", [0, 1])
@pytest.mark.parametrize(
    ("before", "after"), [("sync", "async"), ("async", "sync"), ("async", "ssp")]
)
def test_a_later_incarnation_makes_the_change(before: Mode, after: Mode, told: int) -> None:
    """Worker 0 has told no server, or the first one, when worker 1's later incarnation begins and trains: it
    is in the new mode, which holds on all servers, and every sample of the dataset is used once, by all of
    them."""
    used: Counter[int] = Counter()
    begun, modes = threading.Event(), []

    def script(runtime: ClusterRuntime) -> None:
        runtime.create(ROWS)
        if (
            runtime.mode.name == "async"
        ):  # numbers that the second server has not seen when it changes
            for _ in range(3 * runtime.worker_index):
                runtime.push([])
        runtime.set_mode(find_mode(after))
        for ranges in runtime.data_steps(Steps(runtime), SAMPLES, BATCH, 1, 0, 1):
            runtime.pull([Read(ROWS.key, IDS)])
            ones = Gradient(ROWS.key, np.ones((len(IDS), ROWS.dim), np.float32), IDS, 1.0)
            runtime.push([ones], samples=len(ranges))
            if runtime.worker_index == 1:
                begun.set()
            used.update(position for pair in ranges for position in range(*pair))
        runtime.barrier()
        (rows,) = runtime.pull([Read(ROWS.key, IDS)])
        steps = (
            SAMPLES // BATCH // (2 if after == "sync" else 1)
        )  # in a round that of both workers is one
        np.testing.assert_array_equal(rows, np.full(rows.shape, -steps, np.float32))
        runtime.close()

    def wait() -> None:
        assert begun.wait(60)

    def die() -> None:
        raise SimulatedDeath("the worker has died before it told the servers")

    def work(fleet: LocalFleet, worker: int) -> None:
        meddle = Change(told, die if worker else wait)
        runtime = ClusterRuntime(fleet.environment(worker), before, meddle=meddle)
        try:
            script(runtime)
        except SimulatedDeath:
            runtime.abandon()
            again = ClusterRuntime(fleet.environment(worker), before)
            modes.append(again.mode.name)
            script(again)

    with LocalFleet(2, 2, in_process=True) as fleet:
        in_threads([partial(work, fleet, worker) for worker in range(2)])
        assert fleet.wait(60) == [0, 0]
    assert modes == [after]
    assert used == Counter(dict.fromkeys(range(SAMPLES), 1))
