"""Every N rounds means after the rounds N, 2 N, 3 N, ..., whatever else is saved in between; and a fleet that
goes on from a snapshot closes its rounds with all workers."""

import threading
from functools import partial
from pathlib import Path

import numpy as np

from psfleet.checkpoint import load_shard, read_manifest
from psfleet.core.base.errors import CheckpointError
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.runtime.strategy import ConsistencySettings
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.consistency.workers import DENSE, ROWS, give, ready
from tests.trainings import TrainingWorkload, in_threads
from tests.waiting import until

EVERY, STEPS = 3, 12
TRAINING = TrainingWorkload(steps=1)


def has(folder: Path, number: int) -> bool:
    """Whether the snapshot of that round is there."""
    for path in folder.glob("snapshot-*"):
        try:
            if read_manifest(path).cut.round == number:
                return True
        except CheckpointError:  # it is just being removed
            continue
    return False


def test_snapshots_lie_on_their_rounds(tmp_path: Path) -> None:
    """Two servers and two workers; another snapshot is asked for while the next one is awaited."""
    seen: list[int] = []

    def work(worker: int) -> None:
        runtime = ClusterRuntime(fleet.environment(worker), "sync")
        for step in range(1, STEPS + 1):
            TRAINING.run(runtime)
            if step % EVERY == 0:
                until(partial(has, fleet.snapshots, step), f"snapshot of round {step}")
                seen.append(step)
            if step % EVERY == 1 and worker == 0:
                runtime.save(str(tmp_path / str(step)))
        runtime.barrier()
        runtime.close()

    with LocalFleet(2, 2, snapshot_every=f"{EVERY} rounds", in_process=True) as fleet:
        in_threads([partial(work, worker) for worker in range(2)])
        assert fleet.wait() == [0, 0]
        log = fleet.log(0)
        for path in sorted(fleet.snapshots.glob("snapshot-*")):
            shard = Shard()
            load_shard(path, shard)
            cut = read_manifest(path).cut
            assert {table.step for table in shard.tables.values()} == {cut.round}
            assert cut.round % EVERY == 0
    assert sorted(seen) == sorted(2 * [*range(EVERY, STEPS + 1, EVERY)])
    assert "was not taken" not in log
    assert read_manifest(tmp_path / "4").cut.round == 4


def test_who_goes_on_first_waits_for_the_others(tmp_path: Path) -> None:
    """Workers have met at barriers before the snapshot, which counts for nothing after it: no round closes
    without the one that comes last, though the first one is done with its step by then."""
    path, ids, pushed = str(tmp_path / "snapshot"), np.arange(40), threading.Event()

    def work(worker: int, is_later: bool) -> None:
        if is_later and worker == 0:
            assert pushed.wait(60)
        runtime = ready(fleet, worker, ConsistencySettings("sync"))
        give(runtime, ids)
        if is_later:
            pushed.set()
        runtime.barrier()
        if is_later:
            assert {runtime.read_table(spec.key).step for spec in (DENSE, ROWS)} == {2}
        elif worker == 0:
            runtime.save(path)
        runtime.barrier()
        runtime.close()

    for count, is_later in ((2, False), (3, True)):
        with LocalFleet(count, 2, resume=path if is_later else "", in_process=True) as fleet:
            in_threads([partial(work, worker, is_later) for worker in range(2)])
            assert fleet.wait() == [0] * count
