"""Trains on fleet.dataset in the mode and with the number of epochs that it is told.

python trainer.py MODE EPOCHS [followed] [meets]

With `followed` it begins when a follower has a cut, and ends when one has the last. With `meets` workers
meet after each epoch, where rows may move to other servers.

With SOAK_UNTIL (seconds since 1970) it stops then, with SOAK_GATE once that file exists, which sync
mode does not allow.
"""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from psfleet import fleet
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Read
from psfleet.core.engine.schema.table import InitializerSpec, TableSpec
from psfleet.core.runtime.process_runtime import current
from psfleet.core.runtime.strategy import DistributedStrategy
from psfleet_launch.chaos.audit import ChaosSettings

SAMPLES = 200
UNTIL = float(os.environ.get("SOAK_UNTIL", "inf"))
GATE = os.environ.get("SOAK_GATE", "")
WEIGHTS = TableSpec("weights", "dense", (5000,), make_rule("adam", {}))
ROWS = TableSpec(
    "rows",
    "sparse",
    (4,),
    make_rule("adagrad", {}),
    initializer=InitializerSpec("uniform", -0.1, 0.1),
)


def main(mode: str, epochs: int, followed: bool, meets: bool) -> None:
    """One worker."""
    strategy = DistributedStrategy()
    strategy.a_sync = mode == "async"
    fleet.init(strategy=strategy)
    active = current().active()
    active.create(WEIGHTS, np.linspace(-1, 1, 5000, dtype=np.float32))
    active.create(ROWS)
    if followed:
        await_cuts(1)
    for chosen in batches(epochs, meets):
        weights, rows = active.pull([Read(WEIGHTS.key), Read(ROWS.key, chosen)])
        noise = np.random.default_rng(chosen).standard_normal(5000, np.float32)
        active.push(
            [
                Gradient(WEIGHTS.key, weights * np.float32(0.1) + noise, None, 0.05),
                Gradient(ROWS.key, rows + np.float32(0.1), chosen, 0.05),
            ],
            samples=len(chosen),
        )
        time.sleep(0.01)
        if time.time() > UNTIL or (GATE and os.path.exists(GATE)):
            break
    fleet.barrier_worker()
    if followed:
        await_cuts(cuts() + 2)  # the first may have been asked for before


def batches(epochs: int, meets: bool) -> Iterator[Any]:
    """The samples of each step."""
    if not meets:
        yield from fleet.dataset(SAMPLES, 5, epochs, shuffle_seed=3)
        return
    for epoch in range(epochs):
        yield from fleet.dataset(SAMPLES // 5, 5, 1, shuffle_seed=epoch)
        fleet.barrier_worker()


def cuts() -> int:
    """How many cuts followers have noted."""
    settings = ChaosSettings.from_environment()
    assert settings is not None
    return sum(path.read_bytes().count(b"\n") for path in Path(settings.folder).glob("cuts.*"))


def await_cuts(count: int) -> None:
    """Wait until so many are noted."""
    until = time.monotonic() + 100
    while cuts() < count:
        assert time.monotonic() < until, "no follower has a cut"
        time.sleep(0.05)


main(sys.argv[1], int(sys.argv[2]), "followed" in sys.argv[3:], "meets" in sys.argv[3:])
