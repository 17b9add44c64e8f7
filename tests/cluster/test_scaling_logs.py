"""Another number of servers in a fleet whose servers keep logs: a kill -9 of any of them loses nothing."""

from pathlib import Path

import numpy as np
import pytest

from psfleet.core.engine.runtime_interface import TableState
from psfleet.fleet.testing.local_fleet import LocalFleet
from tests.cluster.test_scaling import COUNTS, meet
from tests.pools import started_pool
from tests.trainings import one_more
from tests.waiting import until


def test_each_push_counts_once() -> None:
    """Two async workers count while the number of servers changes, with a kill before the decision and one
    after it."""
    ids, each = np.arange(500), 10
    crashes = {0: ["decided:2"], 1: ["prepared:1"]}
    with (
        LocalFleet(2, 2, durability="log", crashes=crashes) as fleet,
        fleet.reviving(),
        started_pool(2) as pool,
    ):

        def work(worker: int) -> TableState:
            runtime = fleet.connect(worker, "async")
            runtime.create(COUNTS)
            for servers in (3, 3, 1, 0):
                for _ in range(each):
                    runtime.push([one_more(COUNTS, ids)])
                if servers and not worker:
                    fleet.scale(servers)
                runtime.barrier()
                if servers and not worker:
                    fleet.settle()
            state = runtime.read_table(COUNTS.key)
            runtime.close()
            return state

        [counts, _] = pool.map(work, range(2))
        assert fleet.deaths == ["prepared:1", "decided:2"]
        assert fleet.servers == 1
    assert np.all(counts.values[0] == 2 * each * 4)


def test_server_0_that_is_killed_while_new_servers_start() -> None:
    """The request is given up before server 0 hears of it; the fleet can be asked again."""

    class Unlucky(LocalFleet):
        def _endpoint(self, index: int) -> str:
            if index == 2 and not self.restarts:
                self.kill(0)
                until(lambda: self.restarts, lambda: self.log(0))
            return super()._endpoint(index)

    with Unlucky(2, 1, durability="log") as fleet, fleet.reviving():
        runtime = fleet.connect(0, "async")
        runtime.create(COUNTS)
        fleet.scale(3)
        runtime.barrier()
        assert "server 0" in fleet.settle()
        meet(runtime, fleet, 3)
        runtime.close()


@pytest.mark.long
def test_snapshots_shorten_the_log_after_a_move(tmp_path: Path) -> None:
    """A snapshot after a move begins a file of the new log and removes the one before; the logs of before the
    move are gone, and a server that dies goes on from that snapshot."""
    ids = np.arange(200)
    with LocalFleet(2, 1, durability="log", snapshot_every="1h") as fleet, fleet.reviving():
        runtime = fleet.connect(0, "async")
        runtime.create(COUNTS)
        runtime.push([one_more(COUNTS, ids)])
        meet(runtime, fleet, 3)
        folder = fleet.snapshots.parent
        assert {path.name for path in folder.glob("server.*.log")} == {
            f"server.{server}.move1.log" for server in range(3)
        }
        runtime.push([one_more(COUNTS, ids)])
        runtime.save(str(fleet.snapshots / "named"))
        runtime.push([one_more(COUNTS, ids)]).wait()
        for server in range(3):
            fleet.kill(server)
        assert np.all(runtime.read_table(COUNTS.key).values[0] == 3)
        meet(runtime, fleet, 2)
        fleet.kill(1)
        assert np.all(runtime.read_table(COUNTS.key).values[0] == 3)
        runtime.close()
