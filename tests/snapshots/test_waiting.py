"""What a snapshot waits for while a script waits for it: never for a heartbeat, never for that script."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psfleet.checkpoint import read_manifest
from psfleet.core.base.settings.environment import Environment
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine import worker_state
from psfleet.fleet.data_loops import DataLoops
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.trainings import on_fleet, one_more, zero_rows

COUNTS = zero_rows("counts", 1)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_snapshot_within_a_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: Mode
) -> None:
    """Worker 0 saves in the middle of a step, and the other waits for it in a collective. Both keep states,
    and heartbeats are a minute apart. The snapshot is complete within its time limits, which are ten seconds
    for what workers have to do."""
    monkeypatch.setattr(Environment, "heartbeat_seconds", 60.0)
    monkeypatch.setattr(worker_state, "_STEP_END_TIMEOUT", 600.0)

    def work(fleet: LocalFleet, worker: int) -> None:
        runtime: Any = ClusterRuntime(fleet.environment(worker), mode)
        loops = DataLoops(worker, 2, runtime.barrier, runtime=lambda: runtime, snapshots=True)
        runtime.create(COUNTS)
        runtime.barrier()
        for number in loops.shard(range(6), True):
            runtime.push([one_more(COUNTS, np.array([number]))])
            if worker == 0:
                runtime.save(str(tmp_path / f"{number}"))
            runtime.all_reduce(np.ones(1))
        runtime.close()

    on_fleet(work)
    for number in (0, 2, 4):
        assert read_manifest(tmp_path / f"{number}").workers.keys() == {0, 1}
