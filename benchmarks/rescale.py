"""Change of the number of servers while a worker trains: its pause, and its speed meanwhile.

One worker in async mode pulls and pushes 2,000 of a million rows of 16 under Adam, uniform ids. The number of
servers changes to 4, 3 and 2. The pause is the collective at which the rows that changed last are moved.
"""

import os
import statistics
import threading
import time

import numpy as np
from numpy.typing import NDArray
from reporting import Report, arguments, finish

from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Read, Runtime
from psfleet.core.engine.schema.table import TableSpec
from psfleet.fleet.testing.local_fleet import LocalFleet

ROWS = TableSpec("rows", "sparse", (16,), make_rule("adam", {}))
BATCH, ALONE = 2000, 3.0


class Training:
    """Training steps of the worker.

    Attributes:
        longest: Seconds of the longest step of the last `rate`.
    """

    def __init__(self, runtime: Runtime, rows: int) -> None:
        self._runtime = runtime
        self._rows = rows
        self._dice = np.random.default_rng(0)
        self.longest = 0.0

    def fill(self) -> None:
        """Create a row for every id."""
        self._runtime.create(ROWS)
        for start in range(0, self._rows, 50_000):
            self._step(np.arange(start, min(start + 50_000, self._rows)))
        self._runtime.flush()

    def _step(self, ids: NDArray[np.int64]) -> None:
        [values] = self._runtime.pull([Read(ROWS.key, ids)])
        self._runtime.push([Gradient(ROWS.key, values, ids, 0.01)])

    def rate(self, over: threading.Event) -> float:
        """Train until `over` is set. Returns the steps per second."""
        began, steps, self.longest = time.perf_counter(), 0, 0.0
        while not over.is_set():
            step = time.perf_counter()
            self._step(np.unique(self._dice.integers(0, self._rows, BATCH)))
            self.longest = max(self.longest, time.perf_counter() - step)
            steps += 1
        return steps / (time.perf_counter() - began)


def move(fleet: LocalFleet, training: Training, runtime: Runtime, servers: int) -> dict[str, float]:
    """Change the number of servers once, and return the figures."""
    over = threading.Event()
    threading.Timer(ALONE, over.set).start()
    alone = training.rate(over)
    over, began = threading.Event(), time.perf_counter()

    def ask() -> None:
        fleet.scale(servers)
        over.set()

    asking = threading.Thread(target=ask)
    asking.start()
    meanwhile = training.rate(over)
    asking.join()
    copied = time.perf_counter()
    runtime.barrier()
    pause = time.perf_counter() - copied
    assert not fleet.settle()
    return {
        "pause s": pause,
        "servers started and rows copied s": copied - began,
        "steps/s alone": alone,
        "steps/s meanwhile": meanwhile,
        "longest step meanwhile s": training.longest,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rows", type=int, default=1_000_000)
    options = parser.parse_args()
    report = Report("rescale", f"2 -> 4 -> 3 -> 2 servers with {options.rows:,} rows of 16")
    figures_by_servers: dict[int, list[dict[str, float]]] = {4: [], 3: [], 2: []}
    with LocalFleet(2, 1) as fleet:
        runtime = fleet.connect(0, "async")
        training = Training(runtime, options.rows)
        training.fill()
        for _ in range(options.runs):
            for servers, figures in figures_by_servers.items():
                figures.append(move(fleet, training, runtime, servers))
        state = runtime.read_table(ROWS.key)
        assert state.ids is not None
        assert len(state.ids) == options.rows
        runtime.close()
    for servers, figures in figures_by_servers.items():
        pauses = [figure["pause s"] for figure in figures]
        medians = {
            name: statistics.median(figure[name] for figure in figures) for name in figures[0]
        }
        report.rows.append({"to servers": servers, **medians, "longest pause s": max(pauses)})
    finish(report, options.json)


if __name__ == "__main__":
    main()
