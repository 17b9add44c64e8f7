"""In which order servers hear that a worker leaves."""

import time

from psfleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.watched_calls import WatchedCalls


def test_server_0_hears_last_of_a_worker_that_leaves() -> None:
    """When server 0 hears it, all others know it. Server 0 may then bring a view that makes others refuse
    the worker's word, and it ends with the last worker."""
    events = []

    def delay(server: int, method: str, _: bytes) -> None:
        if method == "Shard/Leave":
            time.sleep(0.2 * server)

    def record(server: int, method: str, _: bytes) -> None:
        if method == "Shard/Leave":
            events.append(server)

    with LocalFleet(3, 1, in_process=True) as fleet:
        ClusterRuntime(fleet.environment(0), "async", meddle=WatchedCalls(delay, record)).close()
        assert fleet.wait(60) == [0, 0, 0]
    assert events == [1, 2, 0]
