"""Memory of a server for rows, small tables and workers.

    python benchmarks/memory.py [--rows 1000000 5000000] [--precision float32 bfloat16]
                                [--tables 300 1000] [--workers 256]

Each part has its own server process. Figures are the growth of RssAnon (private memory) and RssShmem (memory
shared with workers of this host) in its /proc/PID/status.

- A row: 16 weights under Adam. In float32 that is 192 bytes of values and state; the remaining bytes are the
  index, and pages allocated ahead. Each precision is measured.
- A small table: 100 rows of 16 under Adam.
- A worker: it is connected, has pushed and pulled 100 rows, and stays connected.
- A burst: one worker pushes 262,144 rows 40 times to two servers without waiting for these pushes. Both
  servers map the same shared memory.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import get_args

import numpy as np

from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Read, Runtime
from psfleet.core.engine.schema.table import RowPrecision, TableSpec
from psfleet.fleet.testing.local_fleet import LocalFleet

DIM = 16
BATCH = 250_000
FEW = 100
BURST = 262_144


def spec(name: str, precision: RowPrecision = "float32") -> TableSpec:
    """Return a sparse table under Adam."""
    return TableSpec(name, "sparse", (DIM,), make_rule("adam", {}), precision=precision)


def push(runtime: Runtime, table: TableSpec, first: int, count: int) -> None:
    """Update rows `first` to `first + count - 1` of the table."""
    ids = np.arange(first, first + count)
    runtime.push([Gradient(table.key, np.ones((count, DIM), np.float32), ids, 0.1)])
    runtime.flush()


def memory(fleet: LocalFleet) -> np.ndarray:
    """Return RssAnon and RssShmem of the server, in bytes."""
    lines = Path(f"/proc/{fleet.processes[0].pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return np.array([int(fields[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem")])


def rows(sizes: list[int], precision: RowPrecision) -> Iterator[str]:
    """Yield the private bytes per row as one table grows to each of these sizes."""
    with LocalFleet(servers=1, workers=1) as fleet:
        runtime, table, row_count = fleet.connect(0, "async"), spec("rows", precision), 0
        first_table = spec("first", precision)
        runtime.create(first_table)
        push(runtime, first_table, 0, BATCH)  # compiled, and buffers of a batch are there
        before = memory(fleet)
        runtime.create(table)
        for size in sorted(sizes):
            for first in range(row_count, size, BATCH):
                push(runtime, table, first, min(BATCH, size - first))
            row_count = size
            private, _ = (memory(fleet) - before) / size
            yield f"{size:>12,} rows of {DIM} under Adam, {precision}: {private:.0f} private bytes a row"
        runtime.close()


def tables(counts: list[int]) -> Iterator[str]:
    """Yield the private bytes per small table."""
    with LocalFleet(servers=1, workers=1) as fleet:
        runtime, table_count = fleet.connect(0, "async"), 0
        runtime.create(spec("first"))
        push(runtime, spec("first"), 0, FEW)
        before = memory(fleet)
        for count in sorted(counts):
            for number in range(table_count, count):
                runtime.create(spec(f"t{number}"))
                push(runtime, spec(f"t{number}"), 0, FEW)
            table_count = count
            private, _ = (memory(fleet) - before) / count / 1024
            yield f"{count:>12,} tables of {FEW} rows: {private:.0f} KiB a table"
        runtime.close()


def workers(count: int) -> Iterator[str]:
    """Yield the bytes of the server for each connected worker."""
    with LocalFleet(servers=1, workers=count) as fleet, ExitStack() as stack:
        table = spec("rows")
        before = memory(fleet)
        for seat in range(count):
            runtime = fleet.connect(seat, "async")
            stack.callback(runtime.close)
            runtime.create(table)
            push(runtime, table, 0, FEW)
            runtime.pull([Read(table.key, np.arange(FEW))])
            if not seat:
                before = memory(fleet)
        private, shared = (memory(fleet) - before) / max(count - 1, 1) / 1024
        yield f"{count:>12,} workers: {private:.0f} KiB private and {shared:.0f} KiB shared each"


def burst(pushes: int) -> Iterator[str]:
    """Yield the memory that a worker and its servers share for large pushes."""
    with LocalFleet(servers=2, workers=1) as fleet:
        runtime, table = fleet.connect(0, "async"), spec("rows")
        runtime.create(table)
        ids, values = np.arange(BURST), np.ones((BURST, DIM), np.float32)
        size = (ids.nbytes + values.nbytes) >> 20
        for waits in (False, True):
            for _ in range(pushes):
                ticket = runtime.push([Gradient(table.key, values, ids, 0.1)])
                if waits:
                    ticket.wait()
            runtime.flush()
            shared = memory(fleet)[1] >> 20
            how = "each waited for" if waits else "none waited for"
            yield f"{pushes:>12,} pushes of {size} MiB, {how}: {shared} MiB shared"
        runtime.close()


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", default=[1_000_000, 2_000_000, 5_000_000])
    every = get_args(RowPrecision)
    parser.add_argument("--precision", nargs="*", default=every, choices=every)
    parser.add_argument("--tables", type=int, nargs="*", default=[300, 1000])
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--pushes", type=int, default=40, help="of a burst")
    options = parser.parse_args()
    parts = [rows(options.rows, precision) for precision in options.precision]
    parts += [tables(options.tables), workers(options.workers), burst(options.pushes)]
    for lines in parts:
        for line in lines:
            print(line, flush=True)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
