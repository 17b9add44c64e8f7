"""Tables larger than memory: rows on disk, with a part of them in memory, compared with all rows in memory.

    python benchmarks/disk.py [--rows 4000000] [--share 0.1] [--scattered]

- Tables: pulls and pushes of the distinct ids of 65,536 Zipf(1.05) ids, rows of 16 under Adam, in one
  process. Three variants: in memory; on disk, with the fraction --share of the rows in memory; and in RocksDB
  through rocksdict (pip), with a cache of the same size, which reads and writes rows of 192 bytes without any
  optimizer. Rows are inserted in descending order of frequency, or with --scattered in random order.
- W1 and W3 with two servers and one worker, as in benchmarks/w1_sparse.py and w3_ctr.py, with rows on disk
  and in memory in turn.
"""

import contextlib
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from data import W1_BATCH, W3_IDS, Ids
from measuring import in_turn
from processes import psfleet_crew
from reporting import Report, arguments, finish

from psfleet.core.engine.rules import Adam
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.tables.budget import MemoryBudget
from psfleet.core.engine.tables.row_memory import ROW_BYTES
from psfleet.core.engine.tables.sparse import SparseTable

HERE = Path(__file__).parent
DIM, ROW = 16, 192
WARM = 20
MIB = 1 << 20
Step = Callable[[Ids], None]


def table_steps(kind: str, rows: int, share: float, folder: str) -> tuple[Step, Step, Any]:
    """Return functions that pull from and push to a table of psfleet, and the table."""
    index = rows * ROW_BYTES * 5 // 4  # what a table without more ids may reserve ahead
    host = MemoryBudget(limit=int(index + rows * ROW * share) if kind == "disk" else None)
    spec = TableSpec("t", "sparse", (DIM,), Adam(), seed=1)
    device_budget = MemoryBudget(folder=folder)
    table = SparseTable(spec, budget=host, device=kind, device_budget=device_budget)  # type: ignore[arg-type]
    out = np.empty((W1_BATCH, DIM), np.float32)
    gradients = np.full((W1_BATCH, DIM), 0.01, np.float32)
    return (
        lambda ids: table.pull_into(ids, out[: len(ids)]),
        lambda ids: table.push(ids, gradients[: len(ids)], 1e-3),
        table,
    )


def rocks_steps(rows: int, share: float, folder: str) -> tuple[Step, Step, Any]:
    """Return the same functions for RocksDB, whose values are rows with their optimizer state."""
    from rocksdict import BlockBasedOptions, Cache, Options, Rdict, WriteBatch

    blocks, options = BlockBasedOptions(), Options(raw_mode=True)
    blocks.set_block_cache(Cache(int(rows * ROW * share)))
    options.set_block_based_table_factory(blocks)
    store = Rdict(folder, options)

    def keys(ids: Ids) -> list[bytes]:
        text = ids.astype(">i8").tobytes()
        return [text[at : at + 8] for at in range(0, len(text), 8)]

    def pull(ids: Ids) -> None:
        np.frombuffer(b"".join(store[keys(ids)]), np.float32)

    def push(ids: Ids) -> None:
        batch, value = WriteBatch(raw_mode=True), b"\1" * ROW
        for key in keys(ids):
            batch.put(key, value)
        store.write(batch)

    return pull, push, store


def measure(kind: str, rows: int, share: float, scattered: bool, steps: int, folder: str) -> None:
    """Print the figures of one table as JSON."""
    make = rocks_steps if kind == "rocksdict" else lambda *sizes: table_steps(kind, *sizes)
    pull, push, table = make(rows, share, folder)
    random = np.random.default_rng(1)
    order = random.permutation(rows) if scattered else np.arange(rows)
    for start in range(0, rows, W1_BATCH):
        push(order[start : start + W1_BATCH])
    weights = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -1.05)
    batches = [
        np.unique(np.searchsorted(weights, random.random(W1_BATCH) * weights[-1]))
        for _ in range(steps + WARM)
    ]
    pulls: list[float] = []
    for number, ids in enumerate(batches):
        if number == WARM:
            begin, cpu = time.perf_counter(), time.process_time()
            read = paging.read if (paging := getattr(table, "paging", None)) else 0
            pulls.clear()
        start = time.perf_counter()
        pull(ids)
        pulls.append(time.perf_counter() - start)
        push(ids)
    wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
    named = sum(map(len, batches[WARM:]))
    figures = {
        "rows / batch": named / steps,
        "M rows / CPU-s": 2 * named / cpu / 1e6,
        "M ids / s": steps * W1_BATCH / wall / 1e6,
        "pull, 50 %, ms": float(np.percentile(pulls, 50)) * 1e3,
        "99 %, ms": float(np.percentile(pulls, 99)) * 1e3,
        "rows read / batch": (paging.read - read) / steps if paging else 0.0,
        "rows in memory, MiB": table._index.resident_bytes / MIB if paging else 0.0,
        "peak, MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(json.dumps(figures))


def idle_server() -> int:
    """Return the memory of a server without tables, as the server measures it."""
    code = (
        "from psfleet_server.process import warm_up; from psfleet.core.base.memory import resident; "
        "warm_up(); print(resident())"
    )
    return int(subprocess.check_output([sys.executable, "-c", code]))


def jobs(options: Any, report: Report, rows: int) -> None:
    """Measure W1 and W3, in memory and on disk."""
    idle = idle_server()
    for script, count, program in (
        ("w1_sparse.py", rows + 500_000, [str(rows), "100"]),  # it brings more ids
        ("w3_ctr.py", W3_IDS, ["40", "program"]),
    ):
        memory = idle + (96 << 20) + int(count / 2 * (ROW_BYTES * 1.25 + ROW * options.share))
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.folder))
            on_disk = {"PSFLEET_DISK": folder, "PSFLEET_MEMORY": str(memory)}
            words = [str(HERE / script), "--worker", *program]
            crews = [
                stack.enter_context(psfleet_crew("memory", words)),
                stack.enter_context(psfleet_crew("disk", words, variables=on_disk)),
            ]
            steps = options.steps or (5 if options.short else 20)
            summaries = in_turn(crews, warm=40, steps=steps, runs=options.runs)
        wall = summaries["memory"].wall
        report.rows += [
            {
                "job": script[:2],
                "rows": name,
                "steps / s": steps / summary.wall,
                "of memory": wall / summary.wall,
                "CPU ms / step": summary.cpu / steps * 1e3,
                **summary.noise,
            }
            for name, summary in summaries.items()
        ]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--share", type=float, default=0.1, help="of the rows that is in memory")
    parser.add_argument("--scattered", action="store_true")
    parser.add_argument("--folder", default="/var/tmp", help="on the disk that is measured")
    options = parser.parse_args()
    rows, steps = (200_000, 5) if options.short else (options.rows, options.steps or 40)
    report = Report(
        "disk", f"{rows:,} rows of {DIM} under Adam, {options.share:.0%} of them in memory"
    )
    for kind in ("cpu", "disk", "rocksdict"):
        if kind == "rocksdict" and options.no_peers:
            continue
        folder = tempfile.mkdtemp(dir=options.folder)
        try:
            job_arguments = [kind, rows, options.share, int(options.scattered), steps, folder]
            command = [sys.executable, __file__, "--measure", *map(str, job_arguments)]
            process = subprocess.run(command, capture_output=True, text=True, check=False)
            if process.returncode:
                report.skipped[kind] = process.stderr.strip().splitlines()[-1]
                continue
            report.rows.append({"table": kind, **json.loads(process.stdout)})
        finally:
            shutil.rmtree(folder)
    jobs(options, report, rows)
    finish(report, options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        kind, rows, share, scattered, steps, folder = sys.argv[2:]
        measure(kind, int(rows), float(share), scattered == "1", int(steps), folder)
    else:
        main()
