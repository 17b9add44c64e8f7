"""A snapshot is one cut through all servers, taken while training goes on."""

import threading
import time
from functools import partial
from pathlib import Path

import numpy as np

from psfleet.checkpoint import load_shard, read_manifest
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Read
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.core.engine.tables.sparse import SparseTable
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.trainings import in_threads, one_more, zero_rows

COUNTS = zero_rows("counts", 5)
SHARE = TableSpec("share", "dense", (3 * 4096 * 3,), make_rule("sgd", {}))
SERVERS, WORKERS, IDS = 3, 3, 60


def push(runtime: ClusterRuntime) -> None:
    """Count one more in this worker's rows, which lie on all servers, and in its part of `share`."""
    ids = runtime.worker_index * IDS + np.arange(IDS)
    mine = np.zeros(SHARE.size, np.float32)
    mine[runtime.worker_index :: WORKERS] = -1
    runtime.push([one_more(COUNTS, ids), Gradient(SHARE.key, mine, None, 1.0)])


def train(
    fleet: LocalFleet, steps: threading.Semaphore, stop: threading.Event, worker: int
) -> None:
    """Push and pull until it is enough; at different speeds. `steps`: counts what is done."""
    runtime = ClusterRuntime(fleet.environment(worker), "async")
    runtime.create(COUNTS)
    runtime.create(SHARE, np.zeros(SHARE.size, np.float32))
    while not stop.is_set():
        push(runtime)
        runtime.pull([Read(COUNTS.key, np.arange(IDS * WORKERS))])
        steps.release()
        time.sleep(0.002 * (1 + worker))
    runtime.barrier()
    runtime.close()


def await_pushes(steps: threading.Semaphore) -> None:
    """Return when some worker has pushed since: of so many steps one must have done three."""
    while steps.acquire(blocking=False):
        pass
    for _ in range(2 * WORKERS + 1):
        assert steps.acquire(timeout=60), "the workers have stopped"


def loaded(path: Path) -> Shard:
    """The whole snapshot on one server."""
    shard = Shard()
    load_shard(path, shard)
    return shard


def counted(shard: Shard) -> list[set[float]]:
    """Of each worker the numbers of pushes that its rows and its part of `share` say."""
    counts, share = shard.tables[COUNTS.key], shard.tables[SHARE.key]
    assert isinstance(counts, SparseTable)
    assert isinstance(share, DenseTable)
    found = []
    for worker in range(WORKERS):
        rows = counts.rows(worker * IDS + np.arange(IDS)).values
        found.append({*np.unique(rows), *np.unique(share.state()[0][worker::WORKERS])})
    return found


def test_every_push_is_wholly_inside_or_outside(tmp_path: Path) -> None:
    """Under load: all servers hold the same pushes of each worker, those that the manifest names."""
    steps, stop = threading.Semaphore(0), threading.Event()

    def take(fleet: LocalFleet) -> None:
        try:
            runtime = ClusterRuntime(fleet.environment(WORKERS), "async")
            runtime.create(COUNTS)
            runtime.create(SHARE, np.zeros(SHARE.size, np.float32))
            for number in range(3):
                await_pushes(steps)
                runtime.save(str(tmp_path / f"{number}"))
        finally:
            stop.set()
        runtime.barrier()
        runtime.close()

    with LocalFleet(SERVERS, WORKERS + 1, in_process=True) as fleet:
        works = [partial(train, fleet, steps, stop, worker) for worker in range(WORKERS)]
        in_threads([*works, partial(take, fleet)])
    totals = [0]
    for number in range(3):
        cut = read_manifest(tmp_path / f"{number}").cut
        shard = loaded(tmp_path / f"{number}")
        assert counted(shard) == [{float(cut.pushes[worker][1])} for worker in range(WORKERS)]
        total = sum(last for _, last in cut.pushes.values())
        assert {table.step for table in shard.tables.values()} == {total}
        assert total > totals[-1]
        totals.append(total)
        assert cut.number == number + 1
