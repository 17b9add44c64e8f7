"""The logs of standbys: as short as their servers', and as good to start from."""

import resource
import signal
import time
from pathlib import Path

import numpy as np

from psfleet.core.engine.runtime_interface import Read
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.push_counts import COUNT, TOTAL
from tests.standby.pairs import LONGEST, Pairs


def test_a_standby_that_cannot_keep_a_record_is_replaced() -> None:
    """Its disk takes no more: it says so and ends, and its server goes on with another one."""
    with Pairs(1, 1, durability="log") as fleet:
        fleet.await_standbys()
        resource.prlimit(fleet.follower(0).pid, resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        runtime = ClusterRuntime(fleet.environment(0), "async")
        runtime.create(TOTAL, np.zeros(9000, np.float32))
        with fleet.deciding():
            for _ in range(4):
                runtime.push([COUNT])
            runtime.flush()
            fleet.await_standbys()
        assert "what it has sent cannot be taken: log" in fleet.logs()
        assert (fleet.takeovers, fleet.lost) == (0, 1)
        runtime.close()


def test_a_snapshot_shortens_the_standbys_log_too() -> None:
    """And from what is left of it a server starts, with every push that was acknowledged."""
    fleet = Pairs(1, 1, durability="log", snapshot_every="10 rounds")
    fleet.places.most = 0  # who takes over has no standby, and dies alone
    with fleet:
        fleet.await_standbys()
        first = Path(fleet.snapshots.parent, "standby.0.1", "server.0.log")
        assert first.exists()
        runtime = ClusterRuntime(fleet.environment(0), "async")
        runtime.create(TOTAL, np.zeros(9000, np.float32))
        pushes = 0

        def push() -> None:
            nonlocal pushes
            runtime.push([COUNT])
            runtime.flush()
            pushes += 1

        deadline = time.monotonic() + LONGEST
        while first.exists():
            assert time.monotonic() < deadline, fleet.logs()
            push()
        assert list(first.parent.glob("server.0.??????.log"))
        fleet.process(0).send_signal(signal.SIGKILL)
        with fleet.deciding():
            push()
            assert not first.exists()
            fleet.process(0).send_signal(signal.SIGKILL)
            push()
        assert "back after" in fleet.logs()
        assert (runtime.pull([Read(TOTAL.key)])[0] == pushes).all()
        runtime.close()
