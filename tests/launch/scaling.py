"""A trainer script that meets after every step: scaling.py STEPS FOLDER [SERVERS].

It waits with its last steps for the file `go`, at collectives, and stands still while there is a file `hold`.
Worker 0 asks for SERVERS, if they are named.
"""

import hashlib
import sys
import time
from pathlib import Path

import numpy as np

from psfleet import fleet
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Read
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.runtime.process_runtime import active
from psfleet.core.runtime.strategy import DistributedStrategy

ROWS = TableSpec("rows", "sparse", (4,), make_rule("adam", {}))
W = TableSpec("w", "dense", (70_000,), make_rule("adam", {}))


def main(steps: int, out: Path, servers: str) -> None:
    """One worker."""
    fleet.init(strategy=DistributedStrategy(a_sync=False))
    active().create(W, np.zeros(70_000, np.float32))
    active().create(ROWS)
    for step in range(steps):
        while step == steps // 2 and not together(out / "go"):
            time.sleep(0.02)  # who waits for this job may use the cores
        dice = np.random.default_rng((fleet.worker_index(), step))
        ids = np.unique(dice.integers(0, 2000, 300))
        rows, w = active().pull([Read(ROWS.key, ids), Read(W.key)])
        active().push(
            [
                Gradient(ROWS.key, rows * np.float32(0.2) - 1, ids, 0.01),
                Gradient(W.key, w * np.float32(0.2) - 1, None, 0.01),
            ]
        )
        fleet.barrier_worker()
        (out / f"runs.{fleet.worker_index()}").touch()
        if servers and not step and fleet.is_first_worker():
            fleet.scale_servers(int(servers))
    (out / f"servers.{fleet.worker_index()}").write_text(str(fleet.server_num()))
    fleet.barrier_worker()
    if fleet.is_first_worker():
        states = [active().read_table(spec.key) for spec in (ROWS, W)]
        held = hashlib.sha256(b"".join(a.tobytes() for state in states for a in state.values))
        print(f"digest {held.hexdigest()}")


def together(file: Path) -> bool:
    """Whether all workers have seen the file, each at this collective."""
    while file.with_name("hold").exists():
        file.with_name(f"held.{fleet.worker_index()}").touch()
        time.sleep(0.02)
    seen = active().all_reduce(np.array([file.exists()], np.int64), "min")
    return bool(seen[0])


main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
