"""A trainer script that meets after every few steps until the mode is another one: meeting.py STEPS OUT."""

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

W = TableSpec("w", "dense", (3,), make_rule("sgd", {}))


def main(limit: int, out: Path) -> None:
    """One worker."""
    fleet.init(strategy=DistributedStrategy(a_sync=False))
    active().create(W, np.zeros(3, np.float32))
    seen = ["sync"]
    for _ in range(limit):
        for _ in range(2):
            active().pull([Read(W.key)])
            active().push([Gradient(W.key, np.ones(3, np.float32), None, 1.0)])
        time.sleep(0.02)  # who waits for this job may use the cores
        fleet.barrier_worker()
        seen.append(active().consistency.mode)  # type: ignore[attr-defined]  # a cluster's runtime
        if seen[-1] == "geo":
            break
        (out / f"runs.{fleet.worker_index()}").touch()
    fleet.barrier_worker()
    names = [name for name, before in zip(seen[1:], seen, strict=False) if name != before]
    (out / f"{fleet.worker_index()}").write_text(" ".join(names))


main(int(sys.argv[1]), Path(sys.argv[2]))
