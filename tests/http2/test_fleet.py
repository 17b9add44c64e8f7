"""Fleets whose workers push and pull over psfleet's HTTP/2."""

from pathlib import Path

import numpy as np

from psfleet.core.engine.runtime_interface import Gradient, Read
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.trainings import zero_rows

ROWS = zero_rows("rows", 2)


def test_a_server_that_starts_again_is_found() -> None:
    """Killed twice under a worker that goes on over TLS: no push is lost or made twice. (Over unix sockets:
    tests/recovery/test_kills.py.)"""
    ids, ones = np.arange(3), np.ones((3, 2), np.float32)
    with LocalFleet(1, 1, "tcp", durability="log") as fleet, fleet.reviving():
        runtime = ClusterRuntime(fleet.environment(0), "async")
        runtime.create(ROWS)
        for _ in range(2):
            runtime.push([Gradient(ROWS.key, ones, ids, 1.0)])
            runtime.flush()
            fleet.kill(0)
            runtime.push([Gradient(ROWS.key, ones, ids, 1.0)])
        (rows,) = runtime.pull([Read(ROWS.key, ids)])
        assert rows.tolist() == [[-4.0, -4.0]] * 3
        runtime.close()


def test_no_socket_is_left() -> None:
    """A server removes both sockets when it ends."""
    with LocalFleet(1, 1, in_process=True) as fleet:
        folder = Path(fleet.endpoints[0].removeprefix("unix:")).parent
        assert [path.name for path in folder.glob("*.h2")] == ["0.sock.h2"]
        fleet.connect(0, "async").close()
        assert fleet.wait() == [0]
        assert not [*folder.glob("*.sock*")]
