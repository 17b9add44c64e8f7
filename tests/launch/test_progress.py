"""How servers' counts become one line, and how they are asked."""

import os
import sys
from pathlib import Path

import numpy as np

from psfleet.core.client import Client
from psfleet.core.engine.schema.table import OWN
from psfleet.core.net.v1.shard_pb2 import StatusReply, TableStatus, TornStep
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.optimizer import SGD
from psfleet_launch.console.screen import FleetProgress, add_up, line
from psfleet_launch.job import job_folder
from psfleet_launch.job.status_poller import StatusPoller
from tests.programs import ended
from tests.waiting import until


def reply(steps: int, rows: int, samples: dict[int, int], losses: dict[int, float]) -> StatusReply:
    """What one server says."""
    tables = [
        TableStatus(name="t", kind="sparse", count=rows),
        TableStatus(name="d", kind="dense", count=1000),
        TableStatus(name=f"{OWN}metrics/auc", kind="sparse", count=1000),
    ]
    return StatusReply(
        progress=steps,
        tables=tables,
        samples=samples,
        losses=losses,
        bytes_in=1_000_000,
        bytes_out=2_000_000,
    )


def test_add_up() -> None:
    """Steps are the furthest server's, samples and losses count once per worker, rows and bytes add up; rows
    of tables that are psfleet's own do not."""
    replies = [reply(40, 10, {0: 500, 1: 300}, {0: 0.5, 1: 0.9}), reply(41, 20, {1: 320}, {1: 0.7})]
    assert add_up(replies, at=3.0) == FleetProgress(3.0, 41, 820, 0.6, 30, 6_000_000)


def test_staleness() -> None:
    """The 99th percentile of the pushes of all servers together."""
    replies = [StatusReply(staleness={0: 60, 1: 30}), StatusReply(staleness={2: 9, 40: 1})]
    now = add_up(replies, at=0.0)
    assert now.staleness == 2
    assert line(now) == "0 steps · staleness p99 2 · 0 rows · 0 B"


def test_torn_steps() -> None:
    """They are counted in the line once there are any."""
    step = TornStep(worker=1, incarnation=4, sequences={0: 7, 1: 8})
    now = add_up([StatusReply(torn=[step, step]), StatusReply()], at=0.0)
    assert line(now) == "0 steps · 2 torn steps · 0 rows · 0 B"


def test_nothing_yet() -> None:
    """Servers that have no table and no loss make a line too."""
    assert line(add_up([StatusReply()], at=0.0)) == "0 steps · 0 rows · 0 B"


def test_line() -> None:
    """Rates are those between two pictures."""
    before = FleetProgress(at=1.0, steps=100, samples=10_000)
    now = FleetProgress(
        at=3.0, steps=1_404, samples=90_000, loss=0.4713, rows=41_207, bytes=312 << 20
    )
    assert line(now, before) == (
        "1,404 steps · 652 steps/s · 40 k samples/s · loss 0.4713 · 41,207 rows · 312 MiB"
    )


def test_the_time_that_is_left() -> None:
    """By what the fleet has still to hand out and the present rate; unknown without either."""
    before = FleetProgress(at=1.0, samples=10_000)
    now = add_up([StatusReply(samples={0: 20_000}, samples_left=365_500), StatusReply()], at=3.0)
    assert " · 5 k samples/s · 0:01:13 left · " in line(now, before)
    assert "left" not in line(now)
    assert "left" not in line(add_up([StatusReply(samples={0: 20_000})], at=3.0), before)


def test_the_age_of_the_snapshot(tmp_path: Path) -> None:
    """Of the last complete one: one without a manifest is not complete."""
    assert job_folder.age(str(tmp_path / "snapshots")) is None
    for number in (1, 2):
        (tmp_path / "snapshots" / f"snapshot-{number:06}").mkdir(parents=True)
    assert job_folder.age(str(tmp_path / "snapshots")) is None
    complete = tmp_path / "snapshots" / "snapshot-000001" / "manifest.json"
    complete.touch()
    os.utime(complete, (0, 0))
    age = job_folder.age(str(tmp_path / "snapshots"))
    assert age is not None
    assert age > 1e9
    assert line(FleetProgress(0.0), snapshot=90.2).endswith(" · snapshot 90 s ago")


def test_steps_are_those_of_one_worker() -> None:
    """Of two workers with 5 and 3 pushes the line says 5 steps, as the page, `top` and the report do."""
    with LocalFleet(2, 2, in_process=True) as fleet:
        runtimes = [fleet.connect(worker, "async") for worker in (0, 1)]
        for runtime, steps in zip(runtimes, (5, 3), strict=True):
            table = Client(runtime).sparse_table("rows", 2, SGD(0.5))
            for _ in range(steps):
                table.push(np.arange(20), np.ones((20, 2), np.float32))
            runtime.flush()
        poller = StatusPoller(fleet.environment(0).servers, add_up, every=0.1)
        poller.start()
        until(lambda: poller.history, "a picture")
        poller.stop()
        assert poller.history[-1].steps == 5
        for runtime in runtimes:
            runtime.close()


FORKS = """
import os, socket, sys, time
from psfleet_launch.job.spawn import spawn
from psfleet_launch.console.screen import add_up
from psfleet_launch.job.status_poller import StatusPoller

silent = socket.socket(socket.AF_UNIX)  # half of the time the poller is within a call
silent.bind(sys.argv[1])
silent.listen()
poller = StatusPoller(["unix:" + sys.argv[1]], add_up, every=0.05)
poller.start()
while "grpc" not in sys.modules:
    time.sleep(0.01)
with open(os.devnull, "wb") as log:
    codes = {spawn(["/bin/true"], dict(os.environ), log, False).wait() for _ in range(60)}
poller.stop()
assert codes == {0}, codes
assert "GRPC_ENABLE_FORK_SUPPORT" not in os.environ
"""


def test_processes_are_started_beside_the_poller(tmp_path: Path) -> None:
    """gRPC does nothing of its own when the launcher starts a process again, and its variable stays here."""
    variables = {name: said for name, said in os.environ.items() if not name.startswith("GRPC_")}
    process = ended(
        [sys.executable, "-c", FORKS, str(tmp_path / "silent")],
        env={**variables, "GRPC_VERBOSITY": "info", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.returncode == 0, process.stderr
    assert "fork" not in process.stderr, process.stderr
