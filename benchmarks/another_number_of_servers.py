"""Another number of servers while a worker trains: how long it waits, and how fast it trains meanwhile.

    python benchmarks/another_number_of_servers.py --rows 1000000 --runs 3

One worker in async mode pulls and pushes 2,000 rows of 16 under Adam; the number of servers goes to 4, 3, 2.
The pause is the barrier at which the rows that have changed since the copy move.
"""

import argparse
import os
import statistics
import threading
import time

import numpy as np

from psfleet.rules import make_rule
from psfleet.runtime.interface import Gradient, Read, Runtime
from psfleet.schema.table import TableSpec
from psfleet.testing.local_fleet import LocalFleet

ROWS = TableSpec("rows", "sparse", (16,), make_rule("adam", {}))
_BATCH, _ALONE = 2000, 3.0


class Training:
    """Steps of the worker."""

    def __init__(self, runtime: Runtime, rows: int) -> None:
        self._runtime = runtime
        self._rows = rows
        self._dice = np.random.default_rng(0)
        self.longest = 0.0

    def fill(self) -> None:
        """Give every id a row."""
        self._runtime.create(ROWS)
        for start in range(0, self._rows, 50_000):
            self._push(np.arange(start, min(start + 50_000, self._rows)))
        self._runtime.flush()

    def _push(self, ids: np.ndarray) -> None:  # type: ignore[type-arg]  # int64
        [values] = self._runtime.pull([Read(ROWS.key, ids)])
        self._runtime.push([Gradient(ROWS.key, values, ids, 0.01)])

    def rate(self, over: threading.Event) -> float:
        """Train until then; steps per second."""
        began, steps, self.longest = time.perf_counter(), 0, 0.0
        while not over.is_set():
            step = time.perf_counter()
            self._push(np.unique(self._dice.integers(0, self._rows, _BATCH)))
            self.longest = max(self.longest, time.perf_counter() - step)
            steps += 1
        return steps / (time.perf_counter() - began)


def main() -> None:
    """Print a line for each move."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=3)
    asked = parser.parse_args()
    pauses, shares = [], []
    with LocalFleet(2, 1) as fleet:
        runtime = fleet.connect(0, "async")
        training = Training(runtime, asked.rows)
        training.fill()
        for servers in (4, 3, 2) * asked.runs:
            over = threading.Event()
            threading.Timer(_ALONE, over.set).start()
            alone = training.rate(over)
            over, began = threading.Event(), time.perf_counter()

            def ask(servers: int = servers, over: threading.Event = over) -> None:
                fleet.scale(servers)
                over.set()

            asking = threading.Thread(target=ask)
            asking.start()
            meanwhile = training.rate(over)
            asking.join()
            copied, step = time.perf_counter() - began, training.longest
            began = time.perf_counter()
            runtime.barrier()
            pauses.append(time.perf_counter() - began)
            shares.append(meanwhile / alone)
            why = fleet.settle()
            print(
                f"to {servers}: pause {pauses[-1]:.3f} s, started and copied in {copied:.1f} s, "
                f"{alone:.0f} steps/s alone, {meanwhile:.0f} meanwhile, longest step {step:.3f} s, "
                f"load {os.getloadavg()[0]:.0f} {why}",
                flush=True,
            )
        held = runtime.read_table(ROWS.key)
        assert held.ids is not None
        assert len(held.ids) == asked.rows
        runtime.close()
    print(
        f"pause: median {statistics.median(pauses):.3f} s, longest {max(pauses):.3f} s; "
        f"rate while rows are copied: median {statistics.median(shares):.2f} of that alone"
    )


if __name__ == "__main__":
    main()
