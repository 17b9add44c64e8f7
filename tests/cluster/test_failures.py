"""When somebody is missing, the others say who, in time."""

import dataclasses
import signal
import threading
import time
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from psfleet.core.base.errors import (
    ConfigError,
    DeadlineExceeded,
    Fenced,
    NotReady,
    ProtocolError,
    PsfleetError,
    ServerUnavailable,
)
from psfleet.core.base.settings.environment import Environment
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.net.connections import channel, tls_sockets
from psfleet.core.net.connections.access import Access
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from psfleet_worker.connection.call import wait_all
from psfleet_worker.connection.server_client import ServerClient
from psfleet_worker.session.retry_policy import Patience
from tests.waiting import pause, until

SPEC = TableSpec("dense", "dense", (3,), make_rule("sgd", {}))
GRADIENT = Gradient(SPEC.key, np.ones(3, np.float32), None, 1.0)
HASTY = Patience(wait=0.5, reply=30.0, outage=1.0, start=30.0)


def pushed(fleet: LocalFleet, mode: Mode = "sync", patience: Patience = HASTY) -> ClusterRuntime:
    """A new process of worker 0, which has made a table and pushed to it."""
    runtime = ClusterRuntime(fleet.environment(0), mode, patience=patience)
    runtime.create(SPEC, np.zeros(3, np.float32))
    runtime.push([GRADIENT]).wait(60)
    return runtime


def test_a_server_that_is_gone_is_named_in_time() -> None:
    """After kill -9 of a server the next pull raises ServerUnavailable, and so does close."""
    with LocalFleet(2, 1) as fleet:
        runtime = pushed(fleet)
        fleet.kill(1)
        began = time.monotonic()
        with pytest.raises(ServerUnavailable, match=r"server 1 at unix:.* has not answered for"):
            runtime.flush()
        assert time.monotonic() - began < HASTY.reply
        with pytest.raises(ServerUnavailable, match="server 1"):
            runtime.close()


@pytest.mark.long
@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_stopped_server_is_waited_for(
    transport: Literal["unix", "tcp"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is stopped for longer than one may be out of reach, so that gRPC gives its connections
    up, answers when it goes on, if that is within the time for a reply. One that has ended is given up."""
    options = dict(channel._CHANNEL_OPTIONS) | {"grpc.min_reconnect_backoff_ms": 300}
    monkeypatch.setattr(channel, "_CHANNEL_OPTIONS", [*options.items()])
    monkeypatch.setattr(tls_sockets, "_MOMENT", 0.3)
    patience = dataclasses.replace(HASTY, outage=0.1)
    with LocalFleet(1, 1, transport) as fleet:
        access, changed = Access.of(fleet.environment(0)), threading.Condition()
        client = ServerClient(0, fleet.endpoints[0], patience, changed, access=access)
        try:
            pause(fleet.processes[0])
            call = client.start("Shard/Status", b"")
            until(lambda: client.retries >= 6 or call.ended)
            assert not call.ended, call.error
            fleet.processes[0].send_signal(signal.SIGCONT)
            wait_all([call], 60)
            pause(fleet.processes[0])
            with pytest.raises(PsfleetError):
                wait_all([client.start("Shard/Status", b"", seconds=1.0)], 60)
            fleet.kill(0)
            with pytest.raises(ServerUnavailable):
                wait_all([client.start("Shard/Status", b"")], 60)
        finally:
            client.close()


@pytest.mark.long
def test_a_worker_without_a_seat_says_what_it_waits_for() -> None:
    """While server 1 is silent nobody gets a seat: the worker names it, and so does the log of server 0,
    which also says when it is over. While server 0 is silent the worker says what it asked for how long."""
    short = dataclasses.replace(HASTY, start=1.0)
    with LocalFleet(2, 1) as fleet:
        pause(fleet.processes[1])
        with pytest.raises(NotReady, match=r"server 0 for its seat, which waits for .*server 1: "):
            ClusterRuntime(fleet.environment(0), "sync", patience=short)
        until(lambda: "does not answer server 0, and workers wait for it: " in fleet.log(0))
        fleet.processes[1].send_signal(signal.SIGCONT)
        ClusterRuntime(fleet.environment(0), "sync", patience=HASTY).close()
        assert fleet.log(0).count("answers server 0 again") == 1
    with LocalFleet(1, 1) as fleet:
        pause(fleet.processes[0])
        asked = (
            r"worker 0 has asked for its seat: server 0 at .* Coordinator/Register within 2.0 s: "
        )
        with pytest.raises(DeadlineExceeded, match=asked):
            ClusterRuntime(fleet.environment(0), "sync", patience=short)


def test_a_dead_server_is_not_hidden_by_one_that_waits() -> None:
    """With server 1 dead and server 0 waiting for worker 1, the dead server is reported first."""
    patient = Patience(wait=120.0, outage=1.0, start=30.0)
    with LocalFleet(2, 2) as fleet:
        runtime = pushed(fleet, patience=patient)
        fleet.kill(1)
        began = time.monotonic()
        with pytest.raises(ServerUnavailable, match="server 1"):
            runtime.flush()
        with pytest.raises(ServerUnavailable, match="server 1"):
            runtime.close()
        assert time.monotonic() - began < patient.wait


def test_nobody_listens() -> None:
    """A fleet that never starts is given up after Patience.start."""
    environment = Environment("worker", 0, ("unix:/nonexistent/server",), 1)
    with pytest.raises(ServerUnavailable, match="server 0 at unix:/nonexistent/server"):
        ClusterRuntime(environment, "sync", patience=Patience(start=0.3))


def test_a_round_names_the_worker_that_it_waits_for() -> None:
    """A sync flush whose round lacks worker 1 raises DeadlineExceeded that names worker 1."""
    with LocalFleet(2, 2, in_process=True) as fleet:
        runtime = pushed(fleet)
        for timeout in (None, 0.2):
            with pytest.raises(DeadlineExceeded, match=r"round 1 did not close .* worker 1"):
                runtime.flush(timeout)
        with pytest.raises(DeadlineExceeded):
            runtime.close()


@pytest.mark.long
def test_a_barrier_names_the_worker_that_it_waits_for() -> None:
    """A barrier without worker 1 ends with its name; asked for again, it goes on."""
    with LocalFleet(1, 2, in_process=True) as fleet:
        first = ClusterRuntime(fleet.environment(0), "async", patience=HASTY)
        with pytest.raises(DeadlineExceeded, match=r"barrier 1 of worker 0 .* waits for worker 1"):
            first.barrier(0.3)
        second = ClusterRuntime(fleet.environment(1), "async", patience=HASTY)
        with pytest.raises(ProtocolError, match=r"worker 1 comes to all_reduce .* is at barrier"):
            second.all_reduce(np.zeros(1))
        second.barrier()
        first.barrier()
        first.close()
        second.close()


def test_an_earlier_incarnation_is_fenced() -> None:
    """When a worker's seat is taken by a new process, the old one cannot push any more."""
    with LocalFleet(2, 1, in_process=True) as fleet:
        old = pushed(fleet, "async", Patience())
        new = ClusterRuntime(fleet.environment(0), "async")
        with pytest.raises(
            Fenced, match="incarnation 1 of worker 0 has ended; incarnation 2 has begun"
        ):
            old.push([GRADIENT]).wait(60)
        new.create(SPEC, np.zeros(3, np.float32))
        new.push([GRADIENT]).wait(60)
        np.testing.assert_array_equal(new.read_table(SPEC.key).values[0], [-2, -2, -2])
        with pytest.raises(Fenced):
            old.close()
        new.close()


def test_workers_must_agree_on_mode_and_number() -> None:
    """Another mode, another number of workers, or servers in another order are refused."""
    with LocalFleet(2, 2, in_process=True) as fleet:
        ClusterRuntime(fleet.environment(0), "sync").close()
        with pytest.raises(ConfigError, match="mode"):
            ClusterRuntime(fleet.environment(1), "async")
        with pytest.raises(ConfigError, match="was started for 3 workers"):
            ClusterRuntime(Environment("worker", 1, fleet.endpoints, 3), "sync")
        swapped = Environment("worker", 1, fleet.endpoints[::-1], 2)
        with pytest.raises(ProtocolError, match="UNIMPLEMENTED"):
            ClusterRuntime(swapped, "sync", patience=HASTY)
        missing = Environment("worker", 1, fleet.endpoints[:1], 2)
        with pytest.raises(ConfigError, match="is server 0 of 2; start it as 0 of 1"):
            ClusterRuntime(missing, "sync")


def test_a_server_that_cannot_write_fails_the_save(tmp_path: Path) -> None:
    """A save into a folder that is a file raises, and leaves nothing behind."""
    with LocalFleet(1, 1, in_process=True) as fleet:
        runtime = ClusterRuntime(fleet.environment(0), "sync")
        runtime.create(SPEC, np.zeros(3, np.float32))
        (tmp_path / "file").write_text("occupied")
        with pytest.raises(Exception, match="file"):
            runtime.save(str(tmp_path / "file" / "model"))
        assert [path.name for path in tmp_path.iterdir()] == ["file"]
        runtime.close()
