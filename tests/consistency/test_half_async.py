"""half-async: gradients that wait are summed to one push."""

import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from psfleet.core.base.errors import UsageError
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, PendingPush
from psfleet.core.engine.schema.entry import CapacityEntry
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.runtime.modes.half_async import HalfAsyncRuntime
from psfleet.core.runtime.strategy import ConsistencySettings
from psfleet.fleet.testing.local_fleet import LocalFleet
from tests.consistency.workers import give, ready, taken
from tests.waiting import pause

IDS = np.arange(8)
SMALL = TableSpec(
    "small", "sparse", (2,), make_rule("sgd", {}), entry=CapacityEntry(rows=20, full="refuse")
)


def test_gradients_are_merged_while_a_server_is_slow() -> None:
    """A server is paused: the worker goes on; at most max_merge gradients become one push, in order,
    other learning rates apart; flush waits for all, and their sum is in the tables."""
    with LocalFleet(2, 1) as fleet:
        runtime = ready(fleet, 0, ConsistencySettings("half-async", max_merge=4, queue_size=32))
        pause(fleet.processes[1])
        for number in range(17):
            give(runtime, IDS, 1.0 if number < 15 else 0.5)
        fleet.processes[1].send_signal(signal.SIGCONT)
        runtime.flush()
        assert taken(runtime, IDS) == (16, [16] * 8)
        for server in runtime.stats():
            # The first alone, then by fours and what is left of them.
            assert 5 <= server["pushes"] <= 7
            assert server["samples"] == 17 * 8
        runtime.close()


def test_the_queue_is_bounded() -> None:
    """With a paused server the worker stops when the queue is full, and goes on with the server."""
    with LocalFleet(1, 1) as fleet:
        runtime = ready(fleet, 0, ConsistencySettings("half-async", max_merge=2, queue_size=3))
        pause(fleet.processes[0])
        pushed: list[int] = []
        full = threading.Event()

        def work() -> None:
            for number in range(12):
                give(runtime, IDS)
                pushed.append(number)
            full.set()

        thread = threading.Thread(target=work)
        thread.start()
        assert not full.wait(0.3)
        assert len(pushed) <= 3 + 2 + 1  # those that wait, those under way, and the next
        fleet.processes[0].send_signal(signal.SIGCONT)
        thread.join(60)
        runtime.flush()
        assert taken(runtime, IDS)[0] == 12
        runtime.close()


@pytest.fixture
def waiting() -> Iterator[HalfAsyncRuntime]:
    """A lone worker in half-async mode whose pushes are not merged, and a table with 20 rows."""
    with LocalFleet(1, 1, in_process=True) as fleet:
        runtime = ready(fleet, 0, ConsistencySettings("half-async", max_merge=1))
        runtime.create(SMALL)
        assert isinstance(runtime._fleet, HalfAsyncRuntime)
        yield runtime._fleet
        runtime.close()


def push_rows(runtime: HalfAsyncRuntime, count: int) -> PendingPush:
    """Take 1 from this many rows of the table with 20."""
    ids, ones = np.arange(count), np.ones((count, 2), np.float32)
    return runtime.push([Gradient(SMALL.key, ones, ids, 1.0)])


def test_a_ticket_raises_the_refusal_of_its_own_push(waiting: HalfAsyncRuntime) -> None:
    """Whether or not another call has raised it before, and each time; a ticket that has raised it leaves
    nothing to be said, and the ticket of another push does not raise it."""
    refused = push_rows(waiting, 100)
    with pytest.raises(UsageError, match="'small' is full"):
        waiting.flush()
    for _ in range(2):
        with pytest.raises(UsageError, match="'small' is full"):
            refused.wait()
    waiting.flush()
    with pytest.raises(UsageError, match="'small' is full"):
        push_rows(waiting, 100).wait()
    waiting.flush()
    with waiting.alone():  # nothing is sent meanwhile
        refused, good = push_rows(waiting, 100), push_rows(waiting, 10)
    good.wait()
    with pytest.raises(UsageError, match="'small' is full"):
        refused.wait()
    waiting.flush()


def test_refusals_are_raised_once_all_pushes_have_been_sent(waiting: HalfAsyncRuntime) -> None:
    """A flush that raises has sent what waits behind a refused push, which `close` would else drop; several
    refusals are one error, which counts them."""
    with waiting.alone():  # nothing is sent meanwhile
        for count in (100, 10, 100, 10):
            push_rows(waiting, count)
    with pytest.raises(UsageError, match=r"'small' is full.*\(so were 1 pushes after it\)"):
        waiting.flush()
    [server] = waiting.stats()
    assert {table["name"]: table["step"] for table in server["tables"]}["small"] == 2
    waiting.flush()
