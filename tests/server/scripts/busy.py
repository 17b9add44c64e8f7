"""Makes every thread of a job work: pushes 24 MB, then waits until one has failed."""

import contextlib
import os
import time
from pathlib import Path

import grpc
import numpy as np

from psfleet import fleet
from psfleet.core.base.settings.environment import read_environment
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Read
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.net.connections.access import Access
from psfleet.core.net.connections.channel import open_channel
from psfleet.core.net.v1.metrics_pb2 import CollectRequest
from psfleet.core.runtime.process_runtime import current
from psfleet.core.runtime.strategy import DistributedStrategy

WEIGHTS = TableSpec("weights", "dense", (250_000,), make_rule("sgd", {}))

strategy = DistributedStrategy()
strategy.a_sync = False  # unless --mode says something else
fleet.init(strategy=strategy)
active = current().active()
active.create(WEIGHTS, np.zeros(250_000, np.float32))
for _ in range(24):
    active.pull([Read(WEIGHTS.key)])
    active.push([Gradient(WEIGHTS.key, np.ones(250_000, np.float32), None, 0.1)])
active.flush()
fleet.barrier_worker()
environment = read_environment()
access = Access.of(environment)
channels = [open_channel(endpoint, access) for endpoint in environment.servers]
logs, deadline = Path(os.environ["LOGS_OF_THE_TEST"]), time.monotonic() + 60
while time.monotonic() < deadline:  # a standby may begin later than the job is done
    if any(b" has failed, and process" in log.read_bytes() for log in logs.glob("*/*log.*")):
        break
    for channel in channels:  # so that standbys are asked for their metrics
        collect = channel.unary_unary("/psfleet.v1.Metrics/Collect", None, None)
        with contextlib.suppress(grpc.RpcError):  # of a server that has ended
            collect(CollectRequest().SerializeToString(), timeout=2, metadata=access.metadata)
    time.sleep(0.05)
