"""A server that starts again over TLS is found again."""

import numpy as np

from psfleet.runtime.interface import Gradient, Read
from psfleet.testing.local_fleet import LocalFleet
from tests.trainings import zero_rows
from tests.waiting import until

_SOON = 60.0  # seconds; it takes tenths of one
_TABLE = zero_rows("t", 2)


def test_workers_find_a_server_again_over_tls() -> None:
    """Killed three times under a worker that goes on calling: each time soon, and no push is lost."""
    ids, ones = np.arange(3), np.ones((3, 2), np.float32)
    with LocalFleet(1, 1, "tcp", durability="log") as fleet, fleet.reviving():
        runtime = fleet.connect(0, "async")
        runtime.create(_TABLE)
        for kill in range(3):
            runtime.push([Gradient(_TABLE.key, ones, ids, 1.0)])
            runtime.flush()
            before = fleet.ready_file(0)
            before.unlink()
            fleet.kill(0)
            until(before.exists, "server that has started again")
            assert fleet.restarts == kill + 1
            runtime.push([Gradient(_TABLE.key, ones, ids, 1.0)])
            runtime.flush(_SOON)
        (rows,) = runtime.pull([Read(_TABLE.key, ids)])
        assert rows.tolist() == [[-6.0, -6.0]] * 3
        runtime.close()
