"""Trains in sync mode; worker 0 sends signals to servers and standbys once others are ready.

python killing.py STEP:SIGNAL:READY:AWAITED ...

Before that step it sends the signal to the process that has written the ready file READY, once there is
the file AWAITED: `5:KILL:ready.0:ready.0.1` kills server 0 once its first standby is ready. Whom it sends
STOP it prints. With SNAPSHOT=FOLDER it takes a snapshot at the end.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from psfleet import fleet
from psfleet.core.base.settings.environment import read_environment
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Read
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.runtime.process_runtime import current
from psfleet.core.runtime.strategy import DistributedStrategy

STEPS = 30
WEIGHTS = TableSpec("weights", "dense", (9000,), make_rule("adam", {}))


def pid(ready: str) -> int:
    """The process that wrote this file, once it has."""
    endpoint = read_environment(os.environ).servers[0].removeprefix("unix:")
    file = Path(endpoint).with_name(ready)
    deadline = time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} does not come"
        time.sleep(0.01)
    document: int = json.loads(file.read_text())["pid"]
    return document


def inject(blow: str) -> None:
    """Send one signal."""
    _, name, ready, awaited = blow.split(":")
    pid(awaited)
    os.kill(pid(ready), signal.Signals[f"SIG{name}"])
    if name == "STOP":
        print("stopped", pid(ready), flush=True)


def main(blows: list[str]) -> None:
    """One worker."""
    strategy = DistributedStrategy()
    strategy.a_sync = False
    fleet.init(strategy=strategy)
    active, me = current().active(), fleet.worker_index()
    active.create(WEIGHTS, np.linspace(-1, 1, 9000, dtype=np.float32))
    for step in range(STEPS):
        for blow in blows:
            if me == 0 and blow.startswith(f"{step}:"):
                inject(blow)
        weights = active.pull([Read(WEIGHTS.key)])[0]
        noise = np.random.default_rng((me, step)).standard_normal(9000, np.float32)
        active.push([Gradient(WEIGHTS.key, weights * np.float32(0.1) + noise, None, 0.05)])
    if me == 0 and "SNAPSHOT" in os.environ:
        active.save(os.environ["SNAPSHOT"])
    fleet.barrier_worker()
    if me == 0:
        print("weights", active.pull([Read(WEIGHTS.key)])[0].tobytes().hex())


main(sys.argv[1:])
