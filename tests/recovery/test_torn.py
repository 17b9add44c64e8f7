"""A step that a dead worker has left on some servers only is named where people look."""

import numpy as np
import pytest

from psfleet.faults import SimulatedDeath
from psfleet.rules import make_rule
from psfleet.runtime.interface import Gradient
from psfleet.schema.table import InitializerSpec, TableSpec
from psfleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from psfleet_worker.connection.server_client import Send

COUNTS = TableSpec(
    "counts", "sparse", (1,), make_rule("sgd", {}), initializer=InitializerSpec("constant", 0.0)
)
IDS = np.arange(50)


class Between:
    """Lets a worker die between two servers: from its `last` push on server 1 hears nothing of it."""

    def __init__(self, last: int) -> None:
        self._left = last - 1

    def __call__(self, server: int, send: Send) -> Send:
        """`send` of one server."""

        def meddled(method: str, request: bytes, seconds: float) -> bytes:
            if server == 1 and method == "Shard/Push":
                self._left -= 1
                if self._left < 0:
                    raise SimulatedDeath(
                        f"the worker has died before {method} reached server {server}"
                    )
            return send(method, request, seconds)

        return meddled


def test_a_torn_step_is_in_the_status() -> None:
    """Async mode: the next incarnation finds what the servers have of the one before it."""
    with LocalFleet(2, 1, in_process=True) as fleet:
        dying = ClusterRuntime(fleet.environment(0), "async", meddle=Between(3))
        dying.create(COUNTS)
        rows = Gradient(COUNTS.key, np.full((50, 1), -1, np.float32), IDS, 1.0)
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
