"""Makes every thread of a job work: pushes 24 MB, takes a snapshot, trains on, until one has failed."""

import os
import time
from pathlib import Path

import numpy as np

from psfleet import fleet
from psfleet.rules import make_rule
from psfleet.runtime import interface
from psfleet.runtime.interface import Gradient, Read
from psfleet.schema.table import TableSpec
from psfleet.strategy import DistributedStrategy

WEIGHTS = TableSpec("weights", "dense", (250_000,), make_rule("sgd", {}))

strategy = DistributedStrategy()
strategy.a_sync = False  # unless --mode says something else
fleet.init(strategy=strategy)
active = interface.active()
active.create(WEIGHTS, np.zeros(250_000, np.float32))
fleet.barrier_worker()  # a snapshot is given up when a worker joins that it does not know of
for step in range(24):
    if step == 12 and fleet.worker_index() == 0:
        fleet.snapshot()
    active.pull([Read(WEIGHTS.key)])
    active.push([Gradient(WEIGHTS.key, np.ones(250_000, np.float32), None, 0.1)])
active.flush()
fleet.barrier_worker()
logs, deadline = Path(os.environ["LOGS_OF_THE_TEST"]), time.monotonic() + 60
while time.monotonic() < deadline:  # a standby may begin later than the job is done
    if any(b" has failed, and process" in log.read_bytes() for log in logs.glob("*/*log.*")):
        break
    time.sleep(0.05)
