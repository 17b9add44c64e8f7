"""half-async: gradients that wait are summed to one push."""

import signal
import threading

import numpy as np

from psfleet.core.engine.interface import Gradient
from psfleet.core.runtime.modes.switch import ModeSwitchRuntime, connect
from psfleet.core.runtime.strategy import ConsistencySettings
from psfleet.fleet.testing.local_fleet import LocalFleet
from tests.consistency.workers import DENSE, ROWS, taken
from tests.waiting import pause

IDS = np.arange(8)


def push(runtime: ModeSwitchRuntime, rate: float = 1.0) -> None:
    """A step without a pull."""
    runtime.push(
        [
            Gradient(DENSE.key, np.ones(DENSE.shape, np.float32), None, rate),
            Gradient(ROWS.key, np.ones((8, 2), np.float32), IDS, rate),
        ],
        samples=3,
    )


def ready(fleet: LocalFleet, consistency: ConsistencySettings) -> ModeSwitchRuntime:
    """A lone worker that knows the tables."""
    runtime = connect(fleet.environment(0), consistency)
    runtime.create(DENSE, np.zeros(DENSE.shape, np.float32))
    runtime.create(ROWS)
    return runtime


def test_gradients_are_merged_while_a_server_is_slow() -> None:
    """A server is paused: the worker goes on; at most max_merge gradients become one push, in order,
    other learning rates apart; flush waits for all, and their sum is in the tables."""
    with LocalFleet(2, 1) as fleet:
        runtime = ready(fleet, ConsistencySettings("half-async", max_merge=4, queue_size=32))
        pause(fleet.processes[1])
        for number in range(17):
            push(runtime, 1.0 if number < 15 else 0.5)
        fleet.processes[1].send_signal(signal.SIGCONT)
        runtime.flush()
        assert taken(runtime, IDS) == (16, [16] * 8)
        for server in runtime.stats():
            assert (
                5 <= server["pushes"] <= 7
            )  # the first alone, then by fours and what is left of them
            assert server["samples"] == 17 * 3
        runtime.close()


def test_the_queue_is_bounded() -> None:
    """With a paused server the worker stops when the queue is full, and goes on with the server."""
    with LocalFleet(1, 1) as fleet:
        runtime = ready(fleet, ConsistencySettings("half-async", max_merge=2, queue_size=3))
        pause(fleet.processes[0])
        pushed: list[int] = []
        full = threading.Event()

        def work() -> None:
            for number in range(12):
                push(runtime)
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
