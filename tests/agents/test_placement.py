"""Placement without a machine: servers are spread, standbys are elsewhere, workers are not torn apart."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psfleet.errors import ConfigError
from psfleet_launch.engines.remote.machine_placement import MachinePlacement
from psfleet_launch.engines.remote.server_locations import ServerLocations
from psfleet_launch.job.job_plan import Job, Member
from psfleet_launch.job.job_request import JobRequest
from psfleet_launch.supervision.job_events import ServerReady


def job(servers: int, workers: int, stages: int = 1, replicas: int = 0) -> Job:
    """A job of so many."""
    strategy = {"pipeline": {"stages": stages}} if stages > 1 else {}
    asked = JobRequest(__file__, (), servers, workers, strategy=strategy, port=0, replicas=replicas)
    return Job(asked, "j", "token", Path("/none"), Path("/none"))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 3), st.integers(1, 5))
def test_everybody_has_a_place(servers: int, workers: int, stages: int, count: int) -> None:
    """No machine has two servers more than another; the stages of a worker are together."""
    asked = job(servers, workers, stages)
    machines = [f"m{number}" for number in range(count)]
    places = MachinePlacement(asked, machines)
    assert sorted(seat for one in machines for seat in places.on(one)) == sorted(
        [*asked.servers, *asked.workers]
    )
    load = Counter(places[server] for server in asked.servers)
    assert max(load[one] for one in machines) - min(load[one] for one in machines) <= 1
    for rank in range(workers):
        assert len({places[seat] for seat in asked.workers if seat.rank == rank}) == 1


def test_a_standby_is_elsewhere() -> None:
    """It goes to the machine with the fewest servers of those that are allowed."""
    places = MachinePlacement(job(2, 1, replicas=1), ["a", "b", "c"])
    assert [places[Member("server", rank)] for rank in (0, 1)] == ["a", "b"]
    assert places.put_standby(Member("server", 0, copy=1), {"b", "c"}) == "c"
    assert places.put_standby(Member("server", 1, copy=1), {"a", "c"}) == "a"


def test_a_standby_needs_a_second_machine() -> None:
    """One machine is refused before anything starts."""
    with pytest.raises(ConfigError, match="--replicas 1 needs two machines"):
        MachinePlacement(job(1, 1, replicas=1), ["a"])


def test_seats_of_a_lost_machine_go_elsewhere() -> None:
    """Servers and workers get new places, standbys none; the last machine leaves nobody any."""
    places = MachinePlacement(job(2, 2), ["a", "b"])
    standby = Member("server", 0, copy=1)
    places.put_standby(standby, {"b"})
    lost = places.lose("b")
    assert lost == [Member("server", 0, copy=1), Member("server", 1), Member("worker", 1)]
    assert {places[Member("server", 1)], places[Member("worker", 1)]} == {"a"}
    assert standby not in places
    places.lose("a")
    assert Member("server", 0) not in places


def test_clients_follow_a_server_through_takeovers() -> None:
    """A server that moves, and moves back to an endpoint that it had, never sends clients in a circle."""
    where, server = ServerLocations(), Member("server", 0)
    assert where.ready(ServerReady(server, "a:1")) == (ServerReady(server, "a:1"), False)
    heir = Member("server", 0, copy=1)
    assert where.ready(ServerReady(heir, "b:0")) == (ServerReady(heir, "a:1"), False)
    assert where.ready(ServerReady(heir, "b:2"))[1]
    assert where.moved == {"a:1": "b:2"}
    assert where.ready(ServerReady(server, "a:1"))[1]
    assert where.moved == {"b:2": "a:1"}
    where.lose([server, heir])
    assert where.lost == {0}


def test_a_machine_is_lost_without_a_server_that_it_had_once() -> None:
    """Another machine has taken the server over, so its endpoint stays when the first machine goes."""
    where, server = ServerLocations(), Member("server", 0)
    heir = Member("server", 0, copy=1)
    where.ready(ServerReady(server, "a:1"))
    where.ready(ServerReady(heir, "b:2"))
    where.lose([server])
    assert where.lost == set()
    where.lose([heir])
    assert where.lost == {0}
