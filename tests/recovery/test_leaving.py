"""Servers that die while workers leave: nobody waits for them in vain, and they end."""

import time
from functools import partial

import numpy as np
import pytest

from psfleet.core.base.errors import NotReady
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.net.v1.shard_pb2 import LeaveRequest
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from psfleet_worker.session.retry_policy import Patience
from tests.trainings import in_threads
from tests.watched_calls import WatchedCalls

SPEC = TableSpec("weights", "dense", (3,), make_rule("sgd", {}))
PATIENCE = Patience(reply=60.0, outage=60.0, start=60.0, leave=60.0)


def leaves(method: str, request: bytes) -> bool:
    """Whether the call is a worker's last one."""
    return method == "Shard/Leave" and not LeaveRequest.FromString(request).rest


def dies_before_goodbye(fleet: LocalFleet, victim: int) -> WatchedCalls:
    """Kills a server before it hears that worker 1 leaves, and lets it come back.

    Server 0 hears it last: it dies when server 1 has ended.
    """

    def before(server: int, method: str, request: bytes) -> None:
        if server == victim and leaves(method, request) and not fleet.deaths:
            if server == 0:
                fleet.processes[1].wait(60)
            fleet.kill(server)
            fleet.deaths.append("before goodbye")
            fleet.processes[server] = fleet.spawn(server)

    return WatchedCalls(before)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_server_that_comes_back_before_the_last_goodbye(mode: Mode, victim: int) -> None:
    """The worker that has still to tell it so waits for it, and both servers end. Server 0 can bring no
    view any more: server 1 has ended."""

    def work(worker: int) -> None:
        inject_faults = dies_before_goodbye(fleet, victim) if worker else None
        runtime = ClusterRuntime(
            fleet.environment(worker), mode, patience=PATIENCE, inject_faults=inject_faults
        )
        runtime.create(SPEC, np.zeros(3, np.float32))
        runtime.push([Gradient(SPEC.key, np.ones(3, np.float32), None, 1.0)])
        runtime.barrier()
        runtime.close()

    with LocalFleet(2, 2, durability="log") as fleet:
        in_threads([partial(work, worker) for worker in range(2)])
        assert fleet.wait(60) == [0, 0]
        assert fleet.deaths


def unready(seconds: float) -> WatchedCalls:
    """A server that takes longer to be ready than a worker waits for one that does not answer."""
    asked: list[float] = []

    def before(server: int, method: str, request: bytes) -> None:
        if server == 1 and leaves(method, request):
            asked.append(time.monotonic())
            if asked[-1] < asked[0] + seconds:
                raise NotReady("server 1 waits to hear who is in the fleet")

    return WatchedCalls(before)


def test_a_server_that_is_not_ready_yet_is_waited_for() -> None:
    """Patience.leave is for servers that do not answer; one that does has only to become ready."""
    inject_faults = unready(1.0)
    patience = Patience(outage=30.0, start=60.0, leave=0.1)
    with LocalFleet(2, 1, in_process=True) as fleet:
        runtime = ClusterRuntime(
            fleet.environment(0), "async", patience=patience, inject_faults=inject_faults
        )
        runtime.close()
        assert fleet.wait(60) == [0, 0]
