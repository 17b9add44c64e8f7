"""Servers that die while a snapshot is taken, named or settled, and while they come back from one.

The seeds of these tests are those of continuous integration; PSFLEET_TORTURE=n adds n more.
"""

import os
import random
from collections.abc import Callable
from functools import partial

import pytest

from psfleet.embedded import EmbeddedRuntime
from psfleet.runtime import TableState
from psfleet.testing.local_fleet import LocalFleet
from psfleet.testing.training import Training, in_threads, same_bits
from psfleet_worker.runtime import ClusterRuntime

TRAINING = Training(steps=60, pause=0.03)
ALONE = Training(steps=60)
MORE = int(os.environ.get("PSFLEET_TORTURE", "0"))
POINTS = ("turned", "cut", "page", "written")
LEADING = ("unnamed", "complete", "shortened")  # of server 0


def train(fleet: LocalFleet) -> list[TableState]:
    """Sync training by every worker; the tables that worker 0 then reads."""
    result: list[TableState] = []

    def work(worker: int) -> None:
        runtime = ClusterRuntime(fleet.environment(worker), "sync")
        TRAINING.run(runtime)
        runtime.barrier()
        if worker == 0:
            result.extend(TRAINING.result(runtime))
        runtime.barrier()
        runtime.close()

    with fleet.reviving():
        in_threads([partial(work, worker) for worker in range(fleet.workers)])
        assert fleet.wait() == [0] * fleet.servers, [fleet.log(i) for i in range(fleet.servers)]
    return result


@pytest.mark.parametrize("seed", range(1 + MORE))
def test_kills_around_snapshots_do_not_change_a_bit(
    seed: int, record_property: Callable[[str, object], None]
) -> None:
    """Sync mode: both servers die at points of snapshots and of recovery, and the result is the same."""
    dice = random.Random(seed)
    own = {0: (*POINTS, *LEADING), 1: POINTS}
    crashes = {
        server: [f"{dice.choice(points)}:1", f"replay:{dice.randint(1, 4)}"]
        for server, points in own.items()
    }
    alone = EmbeddedRuntime()
    ALONE.run(alone)
    with LocalFleet(2, 1, durability="log", crashes=crashes, snapshot_every="5 rounds") as fleet:
        same_bits(train(fleet), ALONE.result(alone))
        record_property("deaths", fleet.restarts)
        assert fleet.restarts >= 2


@pytest.mark.parametrize("points", [POINTS, (*LEADING, "replay")])
def test_the_only_server_dies_at_every_point(points: tuple[str, ...]) -> None:
    """One process after the other dies, each at another point; older logs are gone in the end."""
    alone = EmbeddedRuntime()
    ALONE.run(alone)
    crashes = {0: [f"{point}:1" for point in points]}
    with LocalFleet(1, 1, durability="log", crashes=crashes, snapshot_every="5 rounds") as fleet:
        same_bits(train(fleet), ALONE.result(alone))
        assert fleet.restarts == len(points)
        assert not (fleet.snapshots.parent / "server.0.log").exists()
        left = [path.name for path in fleet.snapshots.iterdir() if path.name.endswith(".partial")]
        assert len(left) <= 1
