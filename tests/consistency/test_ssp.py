"""Bounded staleness on real servers: nobody gets further ahead than was said, and nobody hangs."""

import contextlib
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from psfleet.core.base.errors import DeadlineExceeded
from psfleet.core.engine.consistency import SspMode
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Read
from psfleet.core.engine.schema.table import TableSpec
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from psfleet_worker.session.retry_policy import Patience
from tests.trainings import in_threads
from tests.waiting import until

DENSE = TableSpec("w", "dense", (5000,), make_rule("sgd", {}))
ROWS = TableSpec("rows", "sparse", (2,), make_rule("sgd", {}))
IDS = np.arange(64)


def step(runtime: ClusterRuntime) -> None:
    """Read everything, then take 1 from every weight of the dense table."""
    runtime.pull([Read(DENSE.key), Read(ROWS.key, IDS)])
    runtime.push(
        [
            Gradient(DENSE.key, np.ones(5000, np.float32), None, 1.0),
            Gradient(ROWS.key, np.ones((64, 2), np.float32), IDS, 1.0),
        ]
    )


def connect(fleet: LocalFleet, worker: int, staleness: int, wait: float = 60) -> ClusterRuntime:
    """A worker that knows the tables."""
    runtime = ClusterRuntime(
        fleet.environment(worker), SspMode(staleness=staleness), patience=Patience(wait=wait)
    )
    runtime.create(DENSE, np.zeros(5000, np.float32))
    runtime.create(ROWS)
    return runtime


def leading(runtime: ClusterRuntime) -> list[int]:
    """On each server the most steps that a worker was ahead."""
    return [server["leading_steps"] for server in runtime.stats()]


def together(fleet: LocalFleet, staleness: int, work: Callable[[ClusterRuntime], None]) -> None:
    """Every worker of the fleet does the work."""

    def train(worker: int) -> None:
        runtime = connect(fleet, worker, staleness)
        work(runtime)
        runtime.close()

    in_threads([partial(train, worker) for worker in range(fleet.workers)])


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_slow_worker_is_not_left_behind(staleness: int) -> None:
    """One worker pauses: on both servers the other is never given values while it is
    more than `staleness` pushes ahead, it does get that far, and every push counts once."""
    leads: list[int] = []

    def work(runtime: ClusterRuntime) -> None:
        for number in range(12):
            step(runtime)
            if runtime.worker_index == 1 and number == 5:
                until(lambda: leading(runtime) == [staleness] * 2)
        runtime.barrier()
        assert (runtime.pull([Read(DENSE.key)])[0] == -24).all()
        leads.extend(leading(runtime))

    with LocalFleet(2, 2, in_process=True) as fleet:
        together(fleet, staleness, work)
    assert set(leads) == {staleness}


def test_a_wait_ends_and_says_for_whom() -> None:
    """A worker whose peer has stopped is told after its deadline which one it waits for; one that is
    still waiting goes on when the peer has left."""
    with LocalFleet(1, 3, in_process=True) as fleet:
        fast, slow, third = (connect(fleet, worker, 1, wait=2.0) for worker in range(3))
        for _ in range(2):
            step(fast)
            step(third)
        with pytest.raises(DeadlineExceeded, match=r"2 pushes ahead .* it waits for worker 1$"):
            step(fast)
        released = threading.Event()

        def go_on() -> None:
            step(third)
            released.set()

        patient = threading.Thread(target=go_on)
        slow.close()
        patient.start()
        assert released.wait(60)
        patient.join()
        third.close()
        with contextlib.suppress(DeadlineExceeded):  # where a push has travelled with that pull
            fast.close()


def test_a_new_incarnation_begins_beside_the_slowest() -> None:
    """A worker that starts again does not make the others wait until it has done all their steps."""
    with LocalFleet(2, 2, in_process=True) as fleet:
        old = connect(fleet, 0, 1)
        other = connect(fleet, 1, 1)
        for _ in range(6):
            step(old)
            step(other)
        other.flush()
        new = connect(fleet, 0, 1)  # the process has died without a word and come back
        for _ in range(3):
            step(new)
            step(other)
        new.close()
        other.close()
        old.abandon()
