"""Servers that die while workers leave: nobody waits for them in vain, and they end."""

import time
from functools import partial

import numpy as np
import pytest

from psfleet.errors import NotReady
from psfleet.faults import Send
from psfleet.rules import make_rule
from psfleet.runtime.interface import Gradient
from psfleet.schema.table import TableSpec
from psfleet.settings.mode_names import Mode
from psfleet.testing.local_fleet import LocalFleet
from psfleet.wire.v1.shard_pb2 import LeaveRequest
from psfleet_worker.cluster_runtime import ClusterRuntime
from psfleet_worker.session.retries import Patience
from tests.trainings import in_threads

SPEC = TableSpec("weights", "dense", (3,), make_rule("sgd", {}))
PATIENCE = Patience(reply=60.0, outage=60.0, start=60.0, leave=60.0)


def leaves(method: str, request: bytes) -> bool:
    """Whether the call is a worker's last one."""
    return method == "Shard/Leave" and not LeaveRequest.FromString(request).rest


class DiesBeforeGoodbye:
    """Kills a server before it hears that worker 1 leaves, and lets it come back.

    Server 0 hears it last: it dies when server 1 has ended.
    """

    def __init__(self, fleet: LocalFleet, victim: int) -> None:
        self._fleet = fleet
        self._victim = victim

    def __call__(self, server: int, send: Send) -> Send:
        """`send` of one server."""
        return partial(self._meddled, server, send)

    def _meddled(
        self, server: int, send: Send, method: str, request: bytes, seconds: float
    ) -> bytes:
        if server == self._victim and leaves(method, request) and not self._fleet.deaths:
            if server == 0:
                self._fleet.processes[1].wait(60)
            self._fleet.kill(server)
            self._fleet.deaths.append("before goodbye")
            self._fleet.processes[server] = self._fleet.spawn(server)
        return send(method, request, seconds)


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_server_that_comes_back_before_the_last_goodbye(mode: Mode, victim: int) -> None:
    """The worker that has still to tell it so waits for it, and both servers end. Server 0 can bring no
    view any more: server 1 has ended."""

    def work(worker: int) -> None:
        meddle = DiesBeforeGoodbye(fleet, victim) if worker else None
        runtime = ClusterRuntime(fleet.environment(worker), mode, patience=PATIENCE, meddle=meddle)
        runtime.create(SPEC, np.zeros(3, np.float32))
        runtime.push([Gradient(SPEC.key, np.ones(3, np.float32), None, 1.0)])
        runtime.barrier()
        runtime.close()

    with LocalFleet(2, 2, durability="log") as fleet:
        in_threads([partial(work, worker) for worker in range(2)])
        assert fleet.wait(60) == [0, 0]
        assert fleet.deaths


class UnreadyForAWhile:
    """A server that takes longer to be ready than a worker waits for one that does not answer."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._until: float | None = None

    def __call__(self, server: int, send: Send) -> Send:
        """`send` of one server."""

        def meddled(method: str, request: bytes, seconds: float) -> bytes:
            if server == 1 and leaves(method, request):
                now = time.monotonic()
                self._until = self._until or now + self._seconds
                if now < self._until:
                    raise NotReady("server 1 waits to hear who is in the fleet")
            return send(method, request, seconds)

        return meddled


def test_a_server_that_is_not_ready_yet_is_waited_for() -> None:
    """Patience.leave is for servers that do not answer; one that does has only to become ready."""
    meddle = UnreadyForAWhile(1.0)
    patience = Patience(outage=30.0, start=60.0, leave=0.1)
    with LocalFleet(2, 1, in_process=True) as fleet:
        runtime = ClusterRuntime(fleet.environment(0), "async", patience=patience, meddle=meddle)
        runtime.close()
        assert fleet.wait(60) == [0, 0]
