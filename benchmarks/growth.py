"""Growth: the longest pause of a push of 4,096 new ids while a table grows from empty to 4 M rows.

One table in this process, dim 16, Adam; no other process takes part. With "reserved", SparseTable.reserve has
allocated the memory before. Otherwise a thread allocates it ahead of the growth. "ms" is wall-clock time,
which on a busy machine includes the work of other processes. "CPU ms" is the time of the pushing thread.
Before each run, as much memory is used and released: a virtual machine gets memory that it uses for the first
time from its host, which takes up to 5 ms for a huge page.
"""

import time

import numpy as np
from numpy.typing import NDArray
from reporting import Report, arguments, finish

from psfleet.core.engine import rules
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.tables.arena import Arena
from psfleet.core.engine.tables.sparse import SparseTable

DIM, BATCH = 16, 4096
ROW_BYTES = 230  # of a row and its index, at most

Floats = NDArray[np.float64]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rows", type=int, default=4_000_000)
    options = parser.parse_args()
    rows = min(options.rows, 1_000_000) if options.short else options.rows
    report = Report(
        "growth", f"Growth: pushes of {BATCH:,} new ids, empty to {rows:,} rows, dim {DIM}, Adam"
    )
    for memory in ("reserved", "as it grows"):
        runs = [pauses(rows, memory == "reserved") for _ in range(options.runs)]
        for name, at in (("worst", 1.0), ("99.9 %", 0.999), ("99 %", 0.99), ("median", 0.5)):
            values = np.array([np.quantile(run, at, axis=0) * 1e3 for run in runs])
            wall, cpu = (float(value) for value in np.median(values, axis=0))
            report.rows.append(
                {
                    "memory": memory,
                    "pause": name,
                    "ms": wall,
                    "CPU ms": cpu,
                    "CPU smallest": float(values[:, 1].min()),
                    "CPU largest": float(values[:, 1].max()),
                    "runs": len(runs),
                }
            )
    finish(report, options.json)


def pauses(rows: int, reserved: bool) -> Floats:
    """Return wall-clock seconds and this thread's CPU seconds for each push: [pushes, 2]."""
    Arena(rows * ROW_BYTES).populate(0, rows * ROW_BYTES)
    table = SparseTable(TableSpec("growth", "sparse", (DIM,), rules.Adam()))
    gradients = np.full((BATCH, DIM), 0.01, np.float32)
    if reserved:
        table.reserve(rows + BATCH)
    table.push(np.arange(-BATCH, 0, dtype=np.int64), gradients, 1e-3)
    order = np.random.default_rng(1).permutation(rows // BATCH * BATCH).astype(np.int64)
    durations = []
    for ids in order.reshape(-1, BATCH):
        start, cpu = time.perf_counter(), time.thread_time()
        table.push(ids, gradients, 1e-3)
        durations.append((time.perf_counter() - start, time.thread_time() - cpu))
    return np.array(durations)


if __name__ == "__main__":
    main()
