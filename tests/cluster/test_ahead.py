"""Rows read ahead lack exactly the push that overtook them."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import psfleet
from psfleet.core.base.crash_points import Send
from psfleet.core.base.errors import ServerUnavailable
from psfleet.core.base.settings.environment import Environment
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine import rules
from psfleet.core.engine.runtime_interface import Gradient, Read
from psfleet.core.engine.schema.table import TableSpec
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_launch.chaos.message_faults import MessageFaults
from psfleet_server.process import Server
from psfleet_worker.cluster_runtime import ClusterRuntime
from psfleet_worker.session.retry_policy import Patience
from psfleet_worker.tensors.push_queue import LINGER
from tests.watched_calls import WatchedCalls

ROWS = TableSpec("rows", "sparse", (8,), rules.SGD())
WHOLE = TableSpec("whole", "dense", (300, 100), rules.SGD())
IDS = np.arange(50, dtype=np.int64)
READS = [Read(ROWS.key, IDS), Read(WHOLE.key)]


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    """A server in this process."""
    with Server(Environment("server", 0, (f"unix:{tmp_path}/socket",), 1)) as server:
        yield server.endpoint


def connect(
    endpoint: str,
    mode: Mode = "async",
    lane: str = "auto",
    inject_faults: Callable[[int, Send], Send] | None = None,
) -> ClusterRuntime:
    """A worker with a table of each kind."""
    environment = Environment("worker", 0, (endpoint,), 1, lane=lane)
    runtime = ClusterRuntime(environment, mode, inject_faults=inject_faults)
    runtime.create(ROWS)
    runtime.create(WHOLE, np.zeros(WHOLE.shape, np.float32))
    return runtime


def push(runtime: ClusterRuntime) -> None:
    """Take 1 from every value."""
    rows, whole = np.ones((50, 8), np.float32), np.ones(WHOLE.shape, np.float32)
    runtime.push([Gradient(ROWS.key, rows, IDS, 1.0), Gradient(WHOLE.key, whole, None, 1.0)])


@pytest.mark.parametrize(("lane", "is_asked_first"), [("auto", False), ("inline", True)])
def test_one_push_behind(endpoint: str, lane: str, is_asked_first: bool) -> None:
    """What is read ahead in each step lacks the push of that step and no other.

    Also where the next values are asked for before the last ones are looked at.
    """
    runtime = connect(endpoint, lane=lane)
    push(runtime)
    first = runtime.pull([READS[0]])[0]
    ahead = runtime.pull_ahead(READS)
    for step in range(1, 8):
        following = runtime.pull_ahead(READS) if is_asked_first else None
        rows, whole = ahead.wait()
        np.testing.assert_array_equal(whole, -max(step - 1, 1))
        np.testing.assert_allclose(rows, first + 1 - max(step - 1, 1), rtol=1e-6)
        ahead = following or runtime.pull_ahead(READS)
        push(runtime)
    np.testing.assert_array_equal(ahead.wait()[1], -7)
    np.testing.assert_array_equal(runtime.pull(READS)[1], -8)
    runtime.close()


@pytest.mark.parametrize(("lane", "drop"), [("auto", 0.3), ("inline", 0.0)])
def test_looked_at_in_any_order(endpoint: str, lane: str, drop: float) -> None:
    """Values are those of their moment whenever they are looked at, with and without lost answers."""
    runtime = connect(endpoint, lane=lane, inject_faults=MessageFaults(5, drop=drop))
    tickets = []
    for _ in range(20):
        tickets.append(runtime.pull_ahead(READS))
        push(runtime)
    for step in reversed(range(20)):
        np.testing.assert_array_equal(tickets[step].wait()[1], -step)
    np.testing.assert_array_equal(runtime.pull(READS)[1], -20)
    runtime.close()


def reply_slowly(server: int, method: str, request: bytes) -> None:
    """Take longer to answer to a pull than a push waits for company."""
    if method in ("Shard/Pull", "Shard/Exchange"):
        threading.Event().wait(4 * LINGER)


def test_one_call_for_each_step(endpoint: str) -> None:
    """However long a server takes, a push behind a pull read ahead leaves with the next one."""
    slow = WatchedCalls(after=reply_slowly)
    runtime = connect(endpoint, inject_faults=slow)
    for _ in range(100):  # between answer and question this process may be held up
        ahead = runtime.pull_ahead(READS)
        push(runtime)
        if "Shard/Exchange" in slow.methods:
            break
    ahead.wait()
    assert "Shard/Exchange" in slow.methods
    runtime.close()


def test_memory_grows_while_calls_are_under_way(endpoint: str) -> None:
    """Batches that outgrow the shared memory are in it again, though a call is under way at each push."""
    sizes: list[int] = []  # of the messages of exchanges

    def measure(server: int, method: str, request: bytes) -> None:
        if method == "Shard/Exchange":
            sizes.append(len(request))

    runtime = connect(endpoint, inject_faults=WatchedCalls(measure))
    ids = np.arange(200_000, dtype=np.int64)
    rows = np.ones((len(ids), 8), np.float32)
    ahead = runtime.pull_ahead([Read(ROWS.key, ids)])
    for _ in range(100):  # a push may leave alone where this process is held up
        following = runtime.pull_ahead([Read(ROWS.key, ids)])
        ahead.wait()
        runtime.push([Gradient(ROWS.key, rows, ids, 1.0)])
        ahead = following
        if sizes and sizes[-1] < 1000:
            break
    assert sizes[-1] < 1000
    runtime.close()


def test_the_rounds_of_sync_mode(endpoint: str) -> None:
    """In sync mode it is a pull: it commits the round before it."""
    runtime = connect(endpoint, "sync")
    push(runtime)
    np.testing.assert_array_equal(runtime.pull_ahead(READS).wait()[1], -1)
    runtime.close()


def test_a_client_reads_ahead(endpoint: str) -> None:
    """A table of a client, on a server and embedded: the same call, there one push behind."""
    for ps, behind in (
        (psfleet.connect(Environment("worker", 0, (endpoint,), 1)), 1),
        (psfleet.connect(Environment(None, 0, (), 1)), 1),
    ):
        with ps:
            table = ps.sparse_table("rows", 8, psfleet.optimizer.SGD(1.0))
            before = table.pull(IDS)
            ahead = table.pull_ahead(IDS)
            table.push(IDS, np.full((50, 8), behind, np.float32)).wait()
            np.testing.assert_array_equal(ahead.wait(), before)
            np.testing.assert_allclose(table.pull(IDS), before - behind)


def test_a_server_that_is_killed() -> None:
    """A pull whose server dies ends with its error, for whoever waits for it and for what follows."""
    with LocalFleet(1, 1) as fleet:
        patience = Patience(outage=0.5, start=30.0, leave=0.2)
        runtime = ClusterRuntime(fleet.environment(0), "async", patience=patience)
        runtime.create(ROWS)
        runtime.pull([READS[0]])
        fleet.kill(0)
        ahead = runtime.pull_ahead([READS[0]])
        for _ in range(2):
            with pytest.raises(ServerUnavailable, match="server 0"):
                ahead.wait()
        with pytest.raises(ServerUnavailable, match="server 0"):
            runtime.pull([READS[0]])
        runtime.close()
