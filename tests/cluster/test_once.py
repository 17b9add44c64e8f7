"""Async mode: an acknowledged push takes effect once."""

from functools import partial

import pytest

from psfleet.faults import MessageFaults
from psfleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.push_counts import CountingWorkload
from tests.trainings import in_threads


@pytest.mark.parametrize(("drop", "duplicate"), [(0.0, 0.3), (0.2, 0.2)])
def test_every_push_is_counted_once(drop: float, duplicate: float) -> None:
    """Two workers push under repeats and lost answers; both tables count each push once."""
    counting = CountingWorkload(60)
    faults = [MessageFaults(worker, drop, duplicate) for worker in range(2)]

    def work(worker: int) -> None:
        runtime = ClusterRuntime(fleet.environment(worker), "async", meddle=faults[worker])
        counting.run(runtime)
        runtime.close()

    with LocalFleet(2, 2, in_process=True) as fleet:
        in_threads([partial(work, worker) for worker in range(2)])
        assert fleet.wait() == [0, 0]
    counting.check(2)
    assert all(fault.duplicated > 5 for fault in faults)
