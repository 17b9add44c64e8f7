"""Sync mode gives the same bits whatever the fleet and the network do; in async mode a push counts once."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import pytest

from psfleet.core.engine.interface import TableState
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_launch.chaos.message_faults import MessageFaults
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.push_counts import CountingWorkload
from tests.trainings import TrainingWorkload, in_threads, same_bits, train_together

TRAINING = TrainingWorkload()


def train(
    fleet: LocalFleet, inject_faults: Callable[[int], Any] = lambda worker: None
) -> list[TableState]:
    """Sync training by every worker; the tables."""

    def connect(worker: int) -> ClusterRuntime:
        return ClusterRuntime(
            fleet.environment(worker), "sync", inject_faults=inject_faults(worker)
        )

    states = train_together(fleet.workers, TRAINING, connect)
    assert fleet.wait() == [0] * fleet.servers
    return states


@pytest.fixture(scope="module")
def expected() -> list[TableState]:
    """The result of 2 workers with one server and no fault."""
    with LocalFleet(servers=1, workers=2, in_process=True) as fleet:
        return train(fleet)


@pytest.mark.parametrize(("servers", "transport"), [(1, "tcp"), (2, "unix"), (3, "tcp")])
def test_any_fleet_gives_the_same_bits(
    expected: list[TableState], servers: int, transport: Literal["unix", "tcp"]
) -> None:
    """1, 2 and 3 servers over unix sockets and TCP end with the same weights and optimizer state."""
    with LocalFleet(servers, 2, transport, in_process=True) as fleet:
        same_bits(train(fleet), expected)


@pytest.mark.parametrize("servers", [1, 2])
def test_lost_and_repeated_messages_do_not_change_a_bit(
    expected: list[TableState], servers: int
) -> None:
    """With a quarter of answers lost and a quarter of requests repeated the result is that without faults."""
    faults = [MessageFaults(seed=worker, drop=0.25, duplicate=0.25) for worker in range(2)]
    with LocalFleet(servers, 2, in_process=True) as fleet:
        same_bits(train(fleet, lambda worker: faults[worker]), expected)
    assert sum(fault.dropped for fault in faults) > 3
    assert sum(fault.duplicated for fault in faults) > 3


def test_every_push_is_counted_once() -> None:
    """Two workers push under repeats and lost answers; both tables count each push once."""
    counting = CountingWorkload(60)
    faults = [MessageFaults(worker, 0.2, 0.2) for worker in range(2)]

    def work(worker: int) -> None:
        runtime = ClusterRuntime(fleet.environment(worker), "async", inject_faults=faults[worker])
        counting.run(runtime)
        runtime.close()

    with LocalFleet(2, 2, in_process=True) as fleet:
        in_threads([partial(work, worker) for worker in range(2)])
        assert fleet.wait() == [0, 0]
    counting.check(2)
    assert all(fault.duplicated > 5 for fault in faults)
