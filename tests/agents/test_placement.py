"""Placement without a machine: servers are spread, standbys are elsewhere, workers are not torn apart."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psfleet.core.base.errors import ConfigError
from psfleet_launch.engines.remote.machine_placement import MachinePlacement, ServerLocations
from psfleet_launch.job.job_plan import Job, Member, needed
from psfleet_launch.job.job_request import JobRequest
from psfleet_launch.job.resources import Resources
from psfleet_launch.supervision.job_events import ServerReady


def job(servers: int, workers: int, stages: int = 1, replicas: int = 0, **more: Any) -> Job:
    """A job of so many."""
    strategy = {"pipeline": {"stages": stages}} if stages > 1 else {}
    asked = JobRequest(
        __file__, (), servers, workers, strategy=strategy, port=0, replicas=replicas, **more
    )
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


def needed_cores(asked: Job) -> int:
    """Cores of all processes, standbys included."""
    servers = asked.request.servers * (1 + asked.request.replicas)
    return servers * asked.request.server_cores + asked.request.workers * asked.request.worker_cores


SIZES = st.lists(st.integers(0, 9), min_size=2, max_size=5)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 1), SIZES)
def test_no_machine_has_more_than_it_has_room_for(
    workers: int, server_cores: int, worker_cores: int, replicas: int, cores: list[int]
) -> None:
    """A job that is not refused fits, with its standbys; one that would leave much room is not refused."""
    needs = {"server_cores": server_cores, "worker_cores": worker_cores}
    asked = job(2, workers, stages=1 if replicas else 2, replicas=replicas, **needs)
    sizes = {f"m{number}": Resources(count) for number, count in enumerate(cores)}
    try:
        places = MachinePlacement(asked, list(sizes), sizes)
    except ConfigError:
        most = needed_cores(asked) + max(server_cores, worker_cores) * len(cores)
        assert replicas or sum(cores) < most  # a standby may be refused for where its server is
        return
    for server in asked.servers if replicas else []:
        elsewhere = set(sizes) - {places[server]}
        assert places.put_standby(Member("server", server.rank, copy=1), elsewhere) in elsewhere
    for name, size in sizes.items():
        assert needed(asked.request, places.on(name)) <= size
        assert needed(asked.request, places.on(name)) <= places.largest


def test_a_machine_that_is_too_small_is_left_out() -> None:
    """Workers go where there is room for them; who has the fewest processes counts only after that."""
    sizes = {"a": Resources(1, 8 << 30), "b": Resources(8, 8 << 30)}
    places = MachinePlacement(job(1, 2, worker_cores=2, worker_memory=3 << 30), ["a", "b"], sizes)
    assert [places[Member(role, 0)] for role in ("server", "worker")] == ["a", "b"]
    assert places[Member("worker", 1)] == "b"
    assert places.largest == Resources(4, 6 << 30)


def test_what_fits_nowhere_is_refused() -> None:
    """The sentence says who needs what, what there is, and which options ask for less."""
    sizes = {"a": Resources(4, 8 << 30), "b": Resources(6, 4 << 30)}
    sentence = (
        "worker 1 needs 3 cores and 1.5 GiB, and no machine has room for it: 'a' has most left, 1 core and "
        "6.5 GiB of 4 cores and 8.0 GiB; name more machines, or ask for less with --worker-cores and "
        "--worker-memory"
    )
    asked = job(1, 2, server_cores=5, worker_cores=3, worker_memory=3 << 29)
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)}$"):
        MachinePlacement(asked, ["a", "b"], sizes)
    standby = "standby of server 0 needs 5 cores, and no machine has room for it: 'a' has most left, 4 cores"
    asked = job(1, 1, replicas=1, server_cores=5)
    with pytest.raises(ConfigError, match=re.escape(standby)):
        MachinePlacement(asked, ["a", "b"], sizes)


def test_a_job_goes_on_where_there_is_no_room() -> None:
    """A machine is lost, and the others are full: a crowded machine is better than the end of the job."""
    sizes = dict.fromkeys("ab", Resources(2))
    places = MachinePlacement(job(1, 2, worker_cores=2), ["a", "b"], sizes)
    places.lose("b")
    assert {places[Member("worker", rank)] for rank in (0, 1)} == {"a"}


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
