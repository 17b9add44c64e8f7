"""Another number of servers in a fleet whose servers keep logs: a kill -9 of any of them loses nothing."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from psfleet.core.engine.runtime_interface import Gradient, TableState
from psfleet.fleet.testing.local_fleet import LocalFleet
from tests.cluster.test_scaling import COUNTS, assert_same, meet, train
from tests.pools import started_pool
from tests.waiting import until

MOVES = (3, 1, 2)


def trained(
    moves: Sequence[int], crashes: Mapping[int, Sequence[str]] | None = None, given_up: bool = False
) -> tuple[list[TableState], list[str]]:
    """What the tables hold after training in sync mode with these numbers of servers; where some died."""
    with (
        LocalFleet(2, 2, durability="log", crashes=crashes) as fleet,
        fleet.reviving(),
        started_pool(2) as pool,
    ):

        def work(worker: int) -> list[TableState]:
            runtime = fleet.connect(worker, "sync")
            try:
                return train(runtime, fleet, moves, given_up)
            finally:
                runtime.close()

        return next(iter(pool.map(work, range(2)))), fleet.deaths


@pytest.fixture(scope="module")
def unmoved() -> list[TableState]:
    """What the tables hold where there are two servers from start to end."""
    return trained(())[0]


@pytest.mark.long
@pytest.mark.parametrize(("server", "point"), [(0, "decided"), (1, "adopted"), (2, "adopted")])
def test_a_server_that_is_killed_after_the_decision(
    server: int, point: str, unmoved: list[TableState]
) -> None:
    """Whoever dies once the move is decided, a new server, an old one or server 0, starts again with its new
    part, before or after it has heard of the decision; the bits are those of a fleet that stays."""
    states, deaths = trained(MOVES, {server: [f"{point}:1"]})
    assert deaths == [f"{point}:1"]
    assert_same(states, unmoved)


@pytest.mark.long
@pytest.mark.parametrize(("server", "point"), [(0, "promised"), (1, "sent"), (2, "prepared")])
def test_a_server_that_is_killed_before_the_decision(
    server: int, point: str, unmoved: list[TableState]
) -> None:
    """Whoever dies before the move is decided gives it up, and the old servers go on from their old logs; the
    next request is carried out, and the bits are those of a fleet that stays."""
    states, deaths = trained((3, 3, 1), {server: [f"{point}:1"]}, given_up=True)
    assert deaths == ([f"{point}:1"] if server < 2 else [])
    assert_same(states, unmoved)


@pytest.mark.long
def test_a_leaving_server_that_is_killed(unmoved: list[TableState]) -> None:
    """A kill of the server that goes, with changes that it has not sent, gives the move up."""
    states, deaths = trained((1, 1, 3), {1: ["opened:1"]}, given_up=True)
    assert deaths == ["opened:1"]
    assert_same(states, unmoved)


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
                    runtime.push(
                        [Gradient(COUNTS.key, np.full((500, 1), -1, np.float32), ids, 1.0)]
                    )
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
    ids, ones = np.arange(200), np.full((200, 1), -1, np.float32)
    with LocalFleet(2, 1, durability="log", snapshot_every="1h") as fleet, fleet.reviving():
        runtime = fleet.connect(0, "async")
        runtime.create(COUNTS)
        runtime.push([Gradient(COUNTS.key, ones, ids, 1.0)])
        meet(runtime, fleet, 3)
        folder = fleet.snapshots.parent
        assert {path.name for path in folder.glob("server.*.log")} == {
            f"server.{server}.move1.log" for server in range(3)
        }
        runtime.push([Gradient(COUNTS.key, ones, ids, 1.0)])
        runtime.save(str(fleet.snapshots / "named"))
        runtime.push([Gradient(COUNTS.key, ones, ids, 1.0)]).wait()
        for server in range(3):
            fleet.kill(server)
        assert np.all(runtime.read_table(COUNTS.key).values[0] == 3)
        meet(runtime, fleet, 2)
        fleet.kill(1)
        assert np.all(runtime.read_table(COUNTS.key).values[0] == 3)
        runtime.close()
