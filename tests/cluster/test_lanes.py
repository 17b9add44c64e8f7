"""Shared memory changes how tensors travel, and nothing else."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psfleet.core.base.errors import ConfigError, LaneLost, ProtocolError, ServerUnavailable
from psfleet.core.base.settings.environment import Environment
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine import rules
from psfleet.core.engine.runtime_interface import Gradient, Read, TableState
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.net import frame
from psfleet.core.net.protobuf_fields import field
from psfleet.core.net.v1.frame_pb2 import Header
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_server.process import Server
from psfleet_worker.cluster_runtime import ClusterRuntime
from psfleet_worker.connection.call import wait_all
from psfleet_worker.connection.request import ServerRequest
from psfleet_worker.connection.tensor_memory import WorkerMemory
from psfleet_worker.session.retry_policy import Patience
from psfleet_worker.tensors import push_queue
from tests.programs import PYTHONPATH
from tests.trainings import same_bits
from tests.waiting import until

ROWS = TableSpec("rows", "sparse", (8,), rules.Adam())
WHOLE = TableSpec("whole", "dense", (300, 100), rules.Adam())
IDS = np.arange(50, dtype=np.int64)
STEP = [Gradient(ROWS.key, np.ones((50, 8), np.float32), IDS, 0.1)]


@pytest.fixture
def server(tmp_path: Path) -> Any:
    """A server in this process."""
    with Server(Environment("server", 0, (f"unix:{tmp_path}/socket",), 1)) as server:
        yield server


def connect(server: Server, mode: Mode = "async", **more: Any) -> ClusterRuntime:
    """A worker of `server`."""
    environment = Environment("worker", 0, (server.endpoint,), 1)
    return ClusterRuntime(replace(environment, **more), mode)


@pytest.fixture
def worker(server: Server) -> Iterator[ClusterRuntime]:
    """A worker of `server` that has a table of rows, until the test ends."""
    with contextlib.closing(connect(server)) as runtime:
        runtime.create(ROWS)
        yield runtime


def train(runtime: ClusterRuntime, steps: int = 6) -> list[TableState]:
    """A few steps whose gradients depend on what was pulled, and the tables after them."""
    runtime.create(ROWS)
    runtime.create(WHOLE, np.ones(WHOLE.shape, np.float32))
    rng = np.random.default_rng(3)
    for step in range(steps):
        ids = rng.integers(0, 40 * (step + 1), 300)
        rows, whole = runtime.pull([Read(ROWS.key, ids), Read(WHOLE.key)])
        runtime.push(
            [
                Gradient(ROWS.key, rows * 2 + step, ids, 0.1),
                Gradient(WHOLE.key, whole - np.float32(rows.mean()), None, 0.1),
            ]
        )
    runtime.flush()
    return [runtime.read_table(ROWS.key), runtime.read_table(WHOLE.key)]


def test_a_worker_with_small_calls_shares_little(server: Server, worker: ClusterRuntime) -> None:
    """A server's shared memory for a worker whose calls are small is less than a megabyte."""
    for _ in range(3):
        worker.push(STEP)
        worker.pull([Read(ROWS.key, IDS)])
    [shared] = server.host.lanes._shared.values()
    assert len(shared.memory) < 1 << 20


@pytest.mark.parametrize(("lane", "shared"), [("auto", 1), ("inline", 0)])
def test_it_is_used_without_being_asked_for(server: Server, lane: str, shared: int) -> None:
    """On one host the tensors do not travel in messages, unless the environment says so."""
    runtime = connect(server, lane=lane)
    runtime.create(ROWS)
    runtime.push(STEP).wait()
    assert len(server.host.lanes) == shared
    runtime.close()


def test_an_unknown_lane_is_refused() -> None:
    """PSFLEET_LANE is auto or inline."""
    with pytest.raises(ConfigError, match="PSFLEET_LANE is 'fast'"):
        Environment("worker", 0, ("unix:/nowhere",), 1, lane="fast")


def test_memory_that_the_server_has_lost(server: Server) -> None:
    """A call whose memory is gone at the server goes on in a message; later ones share again."""
    runtime = connect(server)
    runtime.create(ROWS)
    for count in range(3):
        runtime.pull([Read(ROWS.key, IDS)])
        server.host.lanes.drop(0)
        runtime.push(STEP)
        before = runtime.pull([Read(ROWS.key, IDS)])[0]
        np.testing.assert_array_equal(
            before, server.host.shard.tables.read([Read(ROWS.key, IDS)])[0]
        )
        runtime.push(STEP).wait()
        assert len(server.host.lanes) == 1
        assert server.host.shard.counters.pushes == 2 * (count + 1)
    runtime.close()
    assert len(server.host.lanes) == 0


def test_tensors_of_any_size(server: Server) -> None:
    """Memory grows with the tensors, and what has no place in it travels in messages."""
    runtime = connect(server)
    for power in (10, 22, 23, 12):
        spec = TableSpec(f"of {power}", "dense", (1 << power,), rules.SGD())
        runtime.create(spec, np.zeros(1 << power, np.float32))
        for step in range(3):
            gradient = np.full(1 << power, -1, np.float32)
            ticket = runtime.push([Gradient(spec.key, gradient, None, 1.0)])
            gradient[:] = 7  # the array is the caller's again
            np.testing.assert_array_equal(runtime.pull([Read(spec.key)])[0], step + 1)
            ticket.wait()
    runtime.close()


def test_a_header_may_be_cut_anywhere(worker: ClusterRuntime) -> None:
    """A layout that is known is one way to write a header; every other one gives the same answer."""
    worker.push(STEP).wait()
    expected = worker.pull([Read(ROWS.key, IDS[:4])])[0]
    client, held = worker._fleet.clients[0], worker._fleet.lanes[0].held()
    for turn in range(8):
        request = ServerRequest(worker._fleet.header(), held)
        request.read_rows(ROWS, IDS[:4])
        layout, head, _ = frame.split(request.encode())
        fragment = request._replies[0]
        assert isinstance(fragment, np.ndarray)
        fragment[:] = -1
        cut = head.index(b"\x4a")  # the field `lane`, behind who speaks
        ways = (layout, head), (head, layout), (head + layout,), (layout + head[:cut], head[cut:])
        parts = ways[turn % 4]
        message = b"".join(field(1, part) for part in parts)
        request.encode = lambda message=message: message  # type: ignore[method-assign,misc]
        wait_all([client.send(request, "Shard/Pull")], 60)
        np.testing.assert_array_equal(fragment, expected)
        request.close()


def test_a_push_does_not_wait_for_company_for_long(server: Server, worker: ClusterRuntime) -> None:
    """A push that no pull follows is applied all the same."""
    worker.push(STEP)
    until(lambda: server.host.shard.counters.pushes == 1)


@pytest.mark.parametrize(("servers", "commit"), [(2, 1), (1, 0)])
def test_no_exchange_before_every_server_holds_the_push(servers: int, commit: int) -> None:
    """In sync mode a server refuses a pull with the push before it, unless it is the only one and is told
    that they belong together."""
    with LocalFleet(servers, 1, in_process=True) as fleet:
        runtime = ClusterRuntime(fleet.environment(0), "sync")
        incarnation = runtime._fleet.session.incarnation
        header = Header(worker=0, incarnation=incarnation, sequence=1, commit=commit)
        call = runtime._fleet.clients[0].start("Shard/Exchange", frame.encode(header))
        with pytest.raises(ProtocolError, match="push first, then pull"):
            wait_all([call], 60)
        runtime.close()


def test_with_one_server_a_sync_step_is_one_call(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A push leaves with the next pull, which commits it; the bits are those of two servers."""
    monkeypatch.setattr(push_queue, "LINGER", 60.0)
    runtime = connect(server, "sync")
    actual = train(runtime, 5)
    runtime.close()
    assert sum(server.host.latencies.shown["exchange"].times.counts) == 4
    with LocalFleet(2, 1, in_process=True) as fleet:
        runtime = ClusterRuntime(fleet.environment(0), "sync")
        same_bits(actual, train(runtime, 5))
        runtime.close()


def test_waiting_for_a_push_leaves_a_newer_one_its_pull(
    server: Server, worker: ClusterRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer push still leaves with the next pull, in one call."""
    monkeypatch.setattr(push_queue, "LINGER", 60.0)
    first = worker.push(STEP)
    worker.push(STEP)
    first.wait()
    worker.pull([Read(ROWS.key, IDS)])
    assert sum(server.host.latencies.shown["exchange"].times.counts) == 1


def test_a_call_is_taken_once(server: Server, worker: ClusterRuntime) -> None:
    """A call that comes again names places that may be another's by then; it is refused."""
    worker.push(STEP).wait()
    held = worker._fleet.lanes[0].held()
    assert held is not None
    header = Header(worker=0)
    header.lane.generation, header.lane.turn = held.generation, 1
    with pytest.raises(LaneLost, match="call 1 in the memory of worker 0 comes after call 1"):
        server.host.lanes.of(header)
    header.lane.generation += 1
    with pytest.raises(LaneLost, match="shares no memory"):
        server.host.lanes.of(header)


WORKER = """
import sys, numpy as np
from psfleet.core.engine import rules
from psfleet.core.base.settings.environment import Environment
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.table import TableSpec
from psfleet_worker.cluster_runtime import ClusterRuntime
runtime = ClusterRuntime(Environment("worker", 0, (sys.argv[1],), 1), "async")
spec = TableSpec("rows", "sparse", (8,), rules.Adam())
runtime.create(spec)
ids = np.arange(50, dtype=np.int64)
runtime.push([Gradient(spec.key, np.ones((50, 8), np.float32), ids, 0.1)]).wait()
print("shared", flush=True)
sys.stdin.read()
"""


def test_a_worker_that_is_killed_leaves_nothing(server: Server) -> None:
    """The server lets go of a killed worker's memory at once, and no file system has it."""
    before = shared_memory("self")
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, server.endpoint],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"shared\n"
        assert len(server.host.lanes) == 1
        assert not named_memory(worker.pid)
        worker.send_signal(signal.SIGKILL)
    until(lambda: len(server.host.lanes) == 0)
    until(lambda: shared_memory("self") <= before)


def test_a_server_that_is_killed_leaves_nothing() -> None:
    """With its server killed a worker hears so; the memory goes with the worker's runtime."""
    before = shared_memory("self")
    with LocalFleet(1, 1) as fleet:
        patience = Patience(outage=0.5, start=30.0)
        runtime = ClusterRuntime(fleet.environment(0), "async", patience=patience)
        runtime.create(ROWS)
        runtime.push(STEP).wait()
        fleet.kill(0)
        with pytest.raises(ServerUnavailable, match="server 0"):
            runtime.pull([Read(ROWS.key, IDS)])
        assert not named_memory("self")
        runtime.close()
    del runtime
    gc.collect()  # an error holds the frames that it came through
    assert shared_memory("self") <= before


def shared_memory(process: int | str) -> set[str]:
    """What a process has mapped of memory that is shared with others."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return {line for line in lines if "/dev/shm/" in line or "/memfd:psfleet" in line}


def named_memory(process: int | str) -> set[str]:
    """The same, of memory that has a name in a file system."""
    return {line for line in shared_memory(process) if "/dev/shm/" in line}


def test_letting_go_of_a_lent_array_runs_no_code(server: Server) -> None:
    """An interrupt cannot be lost where the last view of a lent array goes; its place is dealt again."""
    runtime = connect(server)
    runtime.create(WHOLE, np.ones(WHOLE.shape, np.float32))
    addresses = set()
    events: list[str] = []
    for _ in range(40):
        array = runtime.pull([Read(WHOLE.key)])[0]
        addresses.add(array.ctypes.data)
        sys.setprofile(lambda frame, event, _: events.append(event))
        del array
        sys.setprofile(None)
    runtime.close()
    assert "call" not in events
    assert len(addresses) < 20


def test_missing_memory_does_not_add_up() -> None:
    """A worker that outruns a server for long wants no more memory than its pushes need at once."""
    memories = WorkerMemory(servers=1, most=8 << 20)
    first = memories.renew()
    assert first is not None
    under_way: list[ServerRequest] = []
    for _ in range(300):  # the server is never idle, so nobody asks for larger memory meanwhile
        if len(under_way) > 4:
            under_way.pop(0).close()
        request = ServerRequest(Header(), first)
        request.rows(ROWS, np.arange(20_000), 0.1)
        under_way.append(request)
    assert 5 * 20_000 * 40 - len(first) <= first.missing <= 5 * 20_000 * 40
    second = memories.renew()
    assert second is not None
    assert len(first) + len(second) <= 8 << 20
    second.miss(1 << 30)
    assert memories.renew() is second  # as large as it may be
    memories.close()


def test_a_step_gets_the_memory_that_it_needs() -> None:
    """What one step needs is shared, however little is allowed for pushes that outrun the server."""
    memories = WorkerMemory(servers=1, most=1 << 20)
    first = memories.renew()
    assert first is not None
    request = ServerRequest(Header(), first)
    request.rows(ROWS, np.arange(100_000), 0.1)
    request.close()
    second = memories.renew()
    assert second is not None
    assert len(second) >= 4 * 100_000 * 40
    memories.close()


def test_pushes_wait_for_shared_memory() -> None:
    """Pushes that wait for none of them share no more with two servers than the worker may."""
    with LocalFleet(2, 1) as fleet:
        runtime = ClusterRuntime(replace(fleet.environment(0), lane_memory=4 << 20), "async")
        before = [shared_bytes(process.pid) for process in fleet.processes]
        runtime.create(ROWS)
        ids, values = np.arange(20_000), np.ones((20_000, 8), np.float32)
        for _ in range(60):
            runtime.push([Gradient(ROWS.key, values, ids, 0.1)])
            for process, there in zip(fleet.processes, before, strict=True):
                assert shared_bytes(process.pid) - there <= 4 << 20
        runtime.flush()
        assert sum(int(server["pushes"]) for server in runtime.stats()) == 2 * 60
        runtime.close()


def shared_bytes(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssShmem"))
