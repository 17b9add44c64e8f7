"""A step that a dead worker has left on some servers only is named where people look."""

import itertools

import numpy as np
import pytest

from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.trainings import one_more, zero_rows
from tests.watched_calls import WatchedCalls
from tests.worker_deaths import SimulatedDeath

COUNTS = zero_rows("counts")
IDS = np.arange(50)


def dying_between(last: int) -> WatchedCalls:
    """Lets a worker die between two servers: from its `last` push on server 1 hears nothing of it."""
    pushes = itertools.count(1)

    def before(server: int, method: str, request: bytes) -> None:
        if server == 1 and method == "Shard/Push" and next(pushes) >= last:
            raise SimulatedDeath(f"the worker has died before {method} reached server {server}")

    return WatchedCalls(before)


def test_a_torn_step_is_in_the_status() -> None:
    """Async mode: the next incarnation finds what the servers have of the one before it."""
    with LocalFleet(2, 1, in_process=True) as fleet:
        dying = ClusterRuntime(fleet.environment(0), "async", inject_faults=dying_between(3))
        dying.create(COUNTS)
        rows = one_more(COUNTS, IDS)
        for _ in range(2):
            dying.push([rows]).wait()
        with pytest.raises(SimulatedDeath):
            dying.push([rows]).wait()
        # What server 0 was sent it has before it answers; the ticket does not wait for that.
        while dying.stats()[0]["pushes"] < 3:
            pass
        dying.abandon()
        runtime = ClusterRuntime(fleet.environment(0), "async")
        first, second = runtime.stats()
        assert [(step["worker"], step["last"]) for step in first["torn"]] == [(0, {0: 3, 1: 2})]
        assert second["torn"] == []
        runtime.close()
        assert fleet.wait() == [0, 0]
