"""Small calls leave in the thread of their caller, and whoever waits for them reads the answer."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psfleet.core.engine.runtime_interface import Gradient, Read
from psfleet.core.net.http2.calls import IncomingCall
from psfleet.core.net.http2.http2_client import ClientConnection, Http2Client
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from psfleet_worker.connection.call import wait_all
from psfleet_worker.connection.server_client import ServerClient
from psfleet_worker.session.retry_policy import Patience
from tests.http2.calls import serving
from tests.trainings import zero_rows
from tests.waiting import until

ROWS = zero_rows("rows", 2)
IDS = np.arange(6)
GRADIENT = Gradient(ROWS.key, np.ones((6, 2), np.float32), IDS, 1.0)


def connect(fleet: LocalFleet) -> ClusterRuntime:
    """A worker in sync mode that has made one step, and so has its connections."""
    runtime = ClusterRuntime(fleet.environment(0), "sync")
    runtime.create(ROWS)
    runtime.push([GRADIENT])
    runtime.pull([Read(ROWS.key, IDS)])
    return runtime


def test_a_small_step_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first step the script's own thread makes all calls of pushes and pulls."""
    senders: set[str] = set()

    def begin(client: Http2Client, path: str, message: bytes, seconds: float) -> ClientConnection:
        senders.add(threading.current_thread().name)
        return plain(client, path, message, seconds)

    plain = Http2Client.begin
    with LocalFleet(2, 1, in_process=True) as fleet:
        runtime = connect(fleet)
        monkeypatch.setattr(Http2Client, "begin", begin)
        for _ in range(5):
            runtime.push([GRADIENT])
            (rows,) = runtime.pull([Read(ROWS.key, IDS)])
        monkeypatch.undo()
        assert rows.tolist() == [[-6.0, -6.0]] * 6
        assert senders == {"MainThread"}
        runtime.close()


def test_a_reply_is_read_though_nobody_waits() -> None:
    """The thread of the server reads it when the worker next says that it is alive."""
    with LocalFleet(1, 1, in_process=True) as fleet:
        runtime = connect(fleet)
        runtime.push([GRADIENT])
        client = runtime._fleet.clients[0]
        until(lambda: not client.open_calls)
        assert runtime.pull([Read(ROWS.key, IDS)])[0].tolist() == [[-2.0, -2.0]] * 6
        runtime.close()


@pytest.mark.parametrize("network", ["unix", "tcp"])
def test_a_server_may_die_before_its_reply_is_read(network: Any) -> None:
    """A push that left without the thread is made again with the same number: it counts once. The server is
    found after each death, over TLS too."""
    with LocalFleet(2, 1, network, durability="log") as fleet, fleet.reviving():
        runtime = connect(fleet)
        for server in (0, 1):
            runtime.push([GRADIENT])
            fleet.kill(server)
            (rows,) = runtime.pull([Read(ROWS.key, IDS)])
        assert rows.tolist() == [[-3.0, -3.0]] * 6
        runtime.close()


@contextlib.contextmanager
def scripted(folder: Path, seen: list[str], reply: threading.Event) -> Iterator[ServerClient]:
    """A client of a server that notes its calls, and answers the request `b"held"` on that event."""

    def push(request: bytes, call: IncomingCall) -> None:
        seen.append(request.decode())
        if request == b"held":
            reply.wait(60)
            seen.append("answered")
        call.end(request)

    with serving(folder, methods={"/psfleet.v1.Shard/Push": push}) as path:
        (folder / "sock.h2").symlink_to(path)
        client = ServerClient(0, f"unix:{folder}/sock", Patience(), threading.Condition())
        with contextlib.closing(client):
            yield client


def test_calls_keep_their_order(tmp_path: Path) -> None:
    """A call that is asked for while an answer is not read comes to the server after that answer."""
    seen: list[str] = []
    reply = threading.Event()
    with scripted(tmp_path, seen, reply) as client:
        push = partial(client.start, "Shard/Push", small=True)
        assert wait_all([push(b"first")]) == [b"first"]
        calls = [push(b"held"), push(b"next"), push(b"last")]
        until(lambda: "held" in seen)
        reply.set()
        assert wait_all(calls) == [b"held", b"next", b"last"]
    assert seen == ["first", "held", "answered", "next", "last"]


def test_a_slow_reply_is_left_to_the_thread(tmp_path: Path) -> None:
    """Several threads may wait for one call; each gets its answer, whoever has read it."""
    seen: list[str] = []
    reply = threading.Event()
    with scripted(tmp_path, seen, reply) as client, ThreadPoolExecutor(3) as pool:
        wait_all([client.start("Shard/Push", b"first")])
        call = client.start("Shard/Push", b"held", small=True)
        waiting = [pool.submit(wait_all, [call]) for _ in range(3)]
        until(lambda: len(call.awaited) >= 3)
        reply.set()
        assert [one.result() for one in waiting] == [[b"held"]] * 3


def test_closing_ends_a_call_whose_reply_is_not_read(tmp_path: Path) -> None:
    """It ends with an error, and nobody waits for ever."""
    seen: list[str] = []
    reply = threading.Event()
    with scripted(tmp_path, seen, reply) as client:
        wait_all([client.start("Shard/Push", b"first")])
        call = client.start("Shard/Push", b"held", small=True)
        until(lambda: "held" in seen)
        client.close()
        assert call.ended
        assert call.error is not None
        reply.set()
