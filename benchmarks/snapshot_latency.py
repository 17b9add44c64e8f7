"""Duration of pushes while a snapshot is taken, compared with other pushes.

    python benchmarks/snapshot_latency.py [--rows 500000] [--seconds 8]

Two servers and two workers in async mode. Each push updates 2,048 random rows of a table under Adam with 16
weights, and the worker waits for it. In the second half, one more worker requests one snapshot after the
other. A push counts as during a snapshot if any part of it lies between the first server's cut and the
manifest. That includes pushes that began earlier and wait at the cut. Compare the two lines of one run.
"""

import argparse
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np

from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, TableState
from psfleet.core.engine.schema.table import TableSpec
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from tests.trainings import in_threads  # noqa: E402 - found by the line before

TABLE = TableSpec("t", "sparse", (16,), make_rule("adam", {}), seed=1)
WORKERS, IDS = 2, 2048


def fill(runtime: ClusterRuntime, rows: int) -> None:
    """Create the rows."""
    ids = np.arange(rows, dtype=np.int64)
    values = [np.zeros((rows, 16), np.float32) for _ in TABLE.slot_names]
    runtime.write_table(TABLE.key, TableState(1, values, ids))


def train(
    fleet: LocalFleet,
    rows: int,
    over: threading.Event,
    durations: list[tuple[float, float]],
    worker: int,
) -> None:
    """Push until `over` is set, and record when each push began and how long it took."""
    runtime = ClusterRuntime(fleet.environment(worker), "async")
    runtime.create(TABLE)
    dice = np.random.default_rng(worker)
    gradient = dice.standard_normal((IDS, 16), np.float32)
    runtime.barrier()
    while not over.is_set():
        ids = dice.integers(0, rows, IDS)
        began = time.perf_counter()
        runtime.push([Gradient(TABLE.key, gradient, ids, 0.01)]).wait()
        durations.append((began, time.perf_counter() - began))
    runtime.close()


def save(runtime: ClusterRuntime, path: str) -> None:
    """Take a snapshot."""
    runtime.save(path)


def note_cut(folder: Path, files: str, began: list[float]) -> None:
    """Record when the first server begins its file, right after its cut.

    Workers are notified up to a second earlier.
    """
    while not began:
        if any(folder.glob(files)):
            began.append(time.perf_counter())
        time.sleep(0.002)


def take(
    fleet: LocalFleet,
    rows: int,
    seconds: float,
    over: threading.Event,
    spans: list[tuple[float, float]],
) -> None:
    """Wait, then take snapshots, and record from when to when each was written."""
    runtime = ClusterRuntime(fleet.environment(WORKERS), "async")
    runtime.create(TABLE)
    fill(runtime, rows)
    runtime.barrier()
    time.sleep(seconds / 2)
    try:
        with tempfile.TemporaryDirectory() as folder:
            until = time.perf_counter() + seconds / 2
            while time.perf_counter() < until:
                began: list[float] = []
                watch = partial(note_cut, Path(folder), f".{len(spans)}.*.partial/shard-*", began)
                in_threads([watch, partial(save, runtime, f"{folder}/{len(spans)}")])
                spans.append((began[0], time.perf_counter()))
    finally:
        over.set()
        runtime.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    over, spans = threading.Event(), list[tuple[float, float]]()
    durations: list[list[tuple[float, float]]] = [[] for _ in range(WORKERS)]
    with LocalFleet(2, WORKERS + 1) as fleet:
        works = [
            partial(train, fleet, options.rows, over, durations[worker], worker)
            for worker in range(WORKERS)
        ]
        in_threads([*works, partial(take, fleet, options.rows, options.seconds, over, spans)])
    pushes = [push for worker in durations for push in worker[5:]]
    times = {
        "outside": [took for began, took in pushes if began + took < spans[0][0]],
        "during": [
            took
            for began, took in pushes
            if any(began <= b and began + took >= a for a, b in spans)
        ],
    }
    length = np.median([b - a for a, b in spans])
    print(f"{len(spans)} snapshots of {options.rows:,} rows, {length:.2f} s from cut to manifest")
    points = {name: np.percentile(those, (50, 90, 99, 100)) for name, those in times.items()}
    for name, seconds in points.items():
        p50, p90, p99, worst = (f"{1e3 * point:.2f} ms" for point in seconds)
        count = f"{name:8} {len(times[name]):6,} pushes"
        print(f"{count}   p50 {p50}   p90 {p90}   p99 {p99}   worst {worst}")
    ratios = points["during"] / points["outside"]
    print("during / outside: " + "   ".join(f"{ratio:.2f}" for ratio in ratios))


if __name__ == "__main__":
    main()
