"""A small job on real tables: every worker pushes the same steps on every run; worker 0 tells.

Arguments: the number of steps, seconds to rest after each, and a file for which step 10 waits.
"""

import hashlib
import sys
import time
from pathlib import Path

import numpy as np

import psfleet
from psfleet import fleet

ROWS = 1000


def main(steps: int, rest: float, gate: str) -> None:
    """Train, then print a digest of all rows."""
    fleet.init()
    numbers = np.random.default_rng(fleet.worker_index())
    with psfleet.connect(mode="sync") as ps:
        table = ps.sparse_table("users", dim=8, optimizer=psfleet.optimizer.Adam(0.01))
        for step in range(steps):
            while gate and step == 10 and not Path(gate).exists():
                time.sleep(0.05)
            ids = numbers.integers(0, ROWS, 64)
            table.push(ids, table.pull(ids) - 0.5)
            time.sleep(rest)
            if step < 10:
                print(f"step {step}")
        ps.flush()
        if fleet.is_first_worker():
            rows = table.pull(np.arange(ROWS))
            print(f"digest {hashlib.sha256(rows.tobytes()).hexdigest()}")


if __name__ == "__main__":
    words = dict(enumerate(sys.argv))
    main(int(words[1]), float(words.get(2, 0.0)), words.get(3, ""))
