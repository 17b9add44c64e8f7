"""Pushes 1 to every row of a table, step after step, until there is the file that is named.

python stepping.py FILE

It prints the number of each step, and then what the rows should be and are.
"""

import sys
from pathlib import Path

import numpy as np

from psfleet.core.base.settings.environment import read_environment
from psfleet.core.engine.runtime_interface import Gradient, Read
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.trainings import zero_rows

ROWS = zero_rows("rows", 2)
IDS = np.arange(6)
GRADIENT = Gradient(ROWS.key, np.ones((6, 2), np.float32), IDS, 1.0)


def main(over: Path) -> None:
    """The worker."""
    runtime = ClusterRuntime(read_environment(), "async")
    runtime.create(ROWS)
    step = 0
    while not over.exists():
        step += 1
        runtime.push([GRADIENT])
        runtime.pull([Read(ROWS.key, IDS)])
        print(step, flush=True)
    (rows,) = runtime.pull([Read(ROWS.key, IDS)])
    print("rows", -step, *sorted({*rows.ravel().tolist()}), flush=True)
    runtime.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
