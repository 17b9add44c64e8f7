"""Sync mode gives the same bits whatever the fleet looks like and whatever the network does."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import pytest

from psfleet.embedded.runtime import EmbeddedRuntime
from psfleet.faults.crash_points import MessageFaults
from psfleet.runtime.interface import Gradient, Read, TableState
from psfleet.testing.local_fleet import LocalFleet
from psfleet.testing.training_run import TrainingWorkload, in_threads, same_bits
from psfleet_worker.cluster_runtime import ClusterRuntime

TRAINING = TrainingWorkload()


def train(
    fleet: LocalFleet, meddle: Callable[[int], Any] = lambda worker: None
) -> list[TableState]:
    """Train with every worker of the fleet as a thread; the tables that worker 0 then reads."""
    result: list[TableState] = []

    def work(worker: int) -> None:
        runtime = ClusterRuntime(fleet.environment(worker), "sync", meddle=meddle(worker))
        TRAINING.run(runtime)
        runtime.barrier()
        if worker == 0:
            result.extend(TRAINING.result(runtime))
        runtime.barrier()
        runtime.close()

    in_threads([partial(work, worker) for worker in range(fleet.workers)])
    assert fleet.wait() == [0] * fleet.servers
    return result


@pytest.fixture(scope="module")
def expected() -> list[TableState]:
    """The result of 2 workers with one server and no fault."""
    with LocalFleet(servers=1, workers=2) as fleet:
        return train(fleet)


@pytest.mark.parametrize(
    ("servers", "transport"), [(1, "tcp"), (2, "unix"), (3, "tcp"), (3, "unix")]
)
def test_any_fleet_gives_the_same_bits(
    expected: list[TableState], servers: int, transport: Literal["unix", "tcp"]
) -> None:
    """1, 2 and 3 servers over unix sockets and TCP end with the same weights and optimizer state."""
    with LocalFleet(servers, 2, transport) as fleet:
        same_bits(train(fleet), expected)


@pytest.mark.parametrize("servers", [1, 2])
def test_lost_and_repeated_messages_do_not_change_a_bit(
    expected: list[TableState], servers: int
) -> None:
    """With 5 % of answers lost and 5 % of requests repeated the result is that without faults."""
    faults = [MessageFaults(seed=worker, drop=0.05, duplicate=0.05) for worker in range(2)]
    with LocalFleet(servers, 2) as fleet:
        same_bits(train(fleet, lambda worker: faults[worker]), expected)
    assert sum(fault.dropped for fault in faults) > 3
    assert sum(fault.duplicated for fault in faults) > 3


def test_a_storm_of_faults_does_not_change_a_bit(expected: list[TableState]) -> None:
    """The same with a quarter of all answers lost and a quarter of all requests repeated."""
    with LocalFleet(2, 2) as fleet:
        same_bits(train(fleet, lambda worker: MessageFaults(worker, 0.25, 0.25)), expected)


def test_embedded_equals_one_server_and_one_worker() -> None:
    """A script without a cluster gives the bits of one with 1 server and 1 worker."""
    alone = EmbeddedRuntime()
    TRAINING.run(alone)
    with LocalFleet(1, 1) as fleet:
        same_bits(train(fleet), TRAINING.result(alone))


def test_two_workers_equal_one_with_the_doubled_batch() -> None:
    """The mean of two workers' gradients is that of the joined batch, to 1e-6 of the weights."""
    states = []
    for workers in (1, 2):
        with LocalFleet(2, workers) as fleet:
            states.append(_averaged(fleet))
    one, other = states
    assert np.abs(one - other).max() <= 1e-6 * np.abs(one).max()


def _averaged(fleet: LocalFleet) -> np.ndarray[Any, Any]:
    """Weights after 5 steps whose gradients are means over 8 samples, dealt to the workers."""
    result: list[np.ndarray[Any, Any]] = []
    spec = TRAINING.dense

    def work(worker: int) -> None:
        runtime = ClusterRuntime(fleet.environment(worker), "sync")
        runtime.create(spec, np.ones(spec.shape, np.float32))
        for step in range(5):
            samples = np.random.default_rng(step).standard_normal((8, *spec.shape), np.float32)
            mine = samples[worker :: fleet.workers]
            runtime.push([Gradient(spec.key, mine.mean(0), None, 0.01)])
        runtime.barrier()
        if worker == 0:
            result.extend(runtime.pull([Read(spec.key)]))
        runtime.barrier()
        runtime.close()

    in_threads([partial(work, worker) for worker in range(fleet.workers)])
    return result[0]
