"""Growth: the longest pause of a push of new ids while a table grows from empty, and the CPU of a new row.

One table in this process, dim 16, Adam; no other process takes part. With "reserved", SparseTable.reserve has
allocated the memory before. Otherwise a thread allocates it ahead of the growth. "ms" is wall-clock time,
which on a busy machine includes the work of other processes. "CPU ms" is the time of the pushing thread.
"first" is the first push of the table. "M rows / CPU-s" counts all threads, and "system" is the kernel's part
of their time, which is spent on new pages. "pull + push" is the CPU ms of 65,536 ids of the full table.
Before each run, as much memory is used and released: a virtual machine gets memory that it uses for the first
time from its host, which takes up to 5 ms for a huge page. `--cold` leaves that out.
"""

import resource
import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from reporting import Report, arguments, finish

from psfleet.core.engine import rules
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.tables.arena import Arena
from psfleet.core.engine.tables.sparse import SparseTable

DIM, PICKED = 16, 65_536
ROW_BYTES = 230  # of a row and its index, at most

Floats = NDArray[np.float64]


class Growth(NamedTuple):
    """Run of one table.

    Attributes:
        pauses: Wall-clock seconds and the thread's CPU seconds of each push: float64 [pushes, 2].
        rate: New rows of a CPU second of all threads, in millions.
        system: Part of these CPU seconds that the kernel took, from 0 to 1.
        row_bytes: Bytes of the table for each row.
        both: CPU ms of a pull and a push of PICKED ids.
    """

    pauses: Floats
    rate: float
    system: float
    row_bytes: float
    both: float


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--batch", type=int, default=4096, help="ids of a push")
    parser.add_argument("--cold", action="store_true", help="do not use the memory before")
    options = parser.parse_args()
    rows = min(options.rows, 1_000_000) if options.short else options.rows
    title = f"pushes of {options.batch:,} new ids, empty to {rows:,} rows, dim {DIM}, Adam"
    report = Report("growth", f"Growth: {title}")
    costs = []
    for memory in ("reserved", "as it grows"):
        runs = [
            grow(rows, options.batch, memory == "reserved", not options.cold)
            for _ in range(options.runs)
        ]
        quantiles = {"worst": 1.0, "99.9 %": 0.999, "99 %": 0.99, "median": 0.5}
        for name in ("first", *quantiles):
            values = np.array([_pause(run.pauses, quantiles.get(name)) * 1e3 for run in runs])
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
        rates = [run.rate for run in runs]
        costs.append(
            {
                "memory": memory,
                "M rows / CPU-s": float(np.median(rates)),
                "smallest": min(rates),
                "largest": max(rates),
                "system": float(np.median([run.system for run in runs])),
                "bytes / row": float(np.median([run.row_bytes for run in runs])),
                "pull + push": float(np.median([run.both for run in runs])),
            }
        )
    report.rows += costs
    finish(report, options.json)


def _pause(pauses: Floats, at: float | None) -> Floats:
    """Return the first push, or a quantile of the later ones: wall-clock and CPU seconds."""
    return pauses[0] if at is None else np.quantile(pauses[1:], at, axis=0)


def grow(rows: int, batch: int, reserved: bool, warm: bool) -> Growth:
    """Grow a table from empty and measure it."""
    if warm:
        Arena(rows * ROW_BYTES).populate(0, rows * ROW_BYTES)
    dice = np.random.default_rng(1)
    order = dice.permutation(rows // batch * batch).astype(np.int64)
    gradients = np.full((max(batch, PICKED), DIM), 0.01, np.float32)
    table = SparseTable(TableSpec("growth", "sparse", (DIM,), rules.Adam()))
    if reserved:
        table.reserve(rows)
    durations, before = [], resource.getrusage(resource.RUSAGE_SELF)
    for ids in order.reshape(-1, batch):
        start, cpu = time.perf_counter(), time.thread_time()
        table.push(ids, gradients[:batch], 1e-3)
        durations.append((time.perf_counter() - start, time.thread_time() - cpu))
    after = resource.getrusage(resource.RUSAGE_SELF)
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    both, every = [], max(len(order) // PICKED, 1)
    out = np.empty((PICKED, DIM), np.float32)
    for _ in range(20):
        # Every k-th new id, shuffled: rows at random places among all.
        ids = dice.permutation(order[dice.integers(every) :: every][:PICKED])
        cpu = time.thread_time()
        table.pull_into(ids, out)
        table.push(ids, gradients[: len(ids)], 1e-3)
        both.append(time.thread_time() - cpu)
    return Growth(
        np.array(durations),
        len(order) / (user + system) / 1e6,
        system / (user + system),
        table.bytes / len(table),
        float(np.median(both)) * 1e3,
    )


if __name__ == "__main__":
    main()
