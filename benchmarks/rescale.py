"""Another number of servers while a worker trains: how long it waits, and how fast it trains meanwhile.

One worker in async mode pulls and pushes 2,000 of a million rows of 16 under Adam, uniform ids; the number of
servers goes to 4, 3 and 2. The pause is the collective at which the rows that changed last move.
"""

import os
import statistics
import threading
import time

import numpy as np
from numpy.typing import NDArray
from reporting import Report, arguments, finish

from psfleet.core.engine.interface import Gradient, Read, Runtime
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.schema.table import TableSpec
from psfleet.fleet.testing.local_fleet import LocalFleet

ROWS = TableSpec("rows", "sparse", (16,), make_rule("adam", {}))
BATCH, ALONE = 2000, 3.0


class Training:
    """Steps of the worker.

    Attributes:
        longest: Seconds of the longest step of the last `rate`.
    """

    def __init__(self, runtime: Runtime, rows: int) -> None:
        self._runtime = runtime
        self._rows = rows
        self._dice = np.random.default_rng(0)
        self.longest = 0.0

    def fill(self) -> None:
        """Give every id a row."""
        self._runtime.create(ROWS)
        for start in range(0, self._rows, 50_000):
            self._step(np.arange(start, min(start + 50_000, self._rows)))
        self._runtime.flush()

    def _step(self, ids: NDArray[np.int64]) -> None:
        [values] = self._runtime.pull([Read(ROWS.key, ids)])
        self._runtime.push([Gradient(ROWS.key, values, ids, 0.01)])

    def rate(self, over: threading.Event) -> float:
        """Train until then; steps per second."""
        began, steps, self.longest = time.perf_counter(), 0, 0.0
        while not over.is_set():
            step = time.perf_counter()
            self._step(np.unique(self._dice.integers(0, self._rows, BATCH)))
            self.longest = max(self.longest, time.perf_counter() - step)
            steps += 1
        return steps / (time.perf_counter() - began)


def move(fleet: LocalFleet, training: Training, runtime: Runtime, servers: int) -> dict[str, float]:
    """Figures of one move."""
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
    found: dict[int, list[dict[str, float]]] = {4: [], 3: [], 2: []}
    with LocalFleet(2, 1) as fleet:
        runtime = fleet.connect(0, "async")
        training = Training(runtime, options.rows)
        training.fill()
        for _ in range(options.runs):
            for servers, figures in found.items():
                figures.append(move(fleet, training, runtime, servers))
        held = runtime.read_table(ROWS.key)
        assert held.ids is not None
        assert len(held.ids) == options.rows
        runtime.close()
    for servers, figures in found.items():
        pauses = [each["pause s"] for each in figures]
        medians = {name: statistics.median(each[name] for each in figures) for name in figures[0]}
        report.rows.append({"to servers": servers, **medians, "longest pause s": max(pauses)})
    finish(report, options.json)


if __name__ == "__main__":
    main()
