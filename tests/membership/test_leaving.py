"""In which order servers hear that a worker leaves."""

import time

from psfleet.faults import Send
from psfleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime


def test_server_0_hears_last_of_a_worker_that_leaves() -> None:
    """When server 0 hears it, all others know it. Server 0 may then bring a view that makes others refuse
    the worker's word, and it ends with the last worker."""
    events = []

    def late(server: int, send: Send) -> Send:
        def meddled(method: str, request: bytes, seconds: float) -> bytes:
            if method != "Shard/Leave":
                return send(method, request, seconds)
            time.sleep(0.2 * server)
            reply = send(method, request, seconds)
            events.append(server)
            return reply

        return meddled

    with LocalFleet(3, 1, in_process=True) as fleet:
        ClusterRuntime(fleet.environment(0), "async", meddle=late).close()
        assert fleet.wait(60) == [0, 0, 0]
    assert events == [1, 2, 0]
