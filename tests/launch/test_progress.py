"""The line of progress, which the launcher and `psfleet top` show, and how servers are asked for it."""

import io
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from psfleet.core.base.panels.process_panels import PANELS
from psfleet.core.client import Client
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.optimizer import SGD
from psfleet_launch.console.progress_line import frame_progress
from psfleet_launch.console.screen import Screen
from psfleet_launch.observability.fleet_reader import FleetReader, look_at, replies
from tests.programs import ended

STALENESS = "Staleness, 99th percentile"


def line(**series: dict[str, float]) -> str:
    """The line at step 1,404 with these panels, whose titles have a `_` in place of blanks."""
    figures = {"Steps": {"": 1404.0}} | {
        title.replace("_", " "): values for title, values in series.items()
    }
    assert figures.keys() <= {panel.title for panel in PANELS}
    panels = [figures.get(panel.title, {}) for panel in PANELS]
    return frame_progress({"at": 1e9, "panels": panels})


def test_the_line() -> None:
    """Losses are averaged, rows and bytes added up, and steps per second are the fastest worker's."""
    actual = line(
        Steps_per_second={"worker 0": 640.0, "worker 1": 652.0},
        Samples_per_second={"": 40_000.0},
        Loss={"worker 0": 0.5, "worker 1": 0.4426},
        Rows={"t": 41_000.0, "u": 207.0},
        Received_by_servers={"server 0": float(1 << 20), "server 1": float(1 << 20)},
        Sent_by_servers={"server 0": float(3 << 20)},
    )
    assert actual == (
        "1,404 steps · 652 steps/s · 40 k samples/s · loss 0.4713 · 41,207 rows · 5 MiB/s"
    )


def test_what_a_job_does_not_have_is_left_out() -> None:
    """Scripts may report no samples; torn steps are counted once there are any; no step, no line."""
    assert line() == "1,404 steps"
    assert line(Samples_per_second={"": 0.0}, Torn_steps={"": 0.0}) == "1,404 steps"
    assert line(Torn_steps={"": 1.0}) == "1,404 steps · 1 torn step"
    assert line(Torn_steps={"": 2.0}) == "1,404 steps · 2 torn steps"
    assert line(Steps={"": 0.0}, Rows={"t": 7.0}) == ""


def test_staleness_the_time_that_is_left_and_the_snapshot() -> None:
    """The line has the staleness that 99 % of the pushes do not exceed, and two times."""
    more: dict[str, Any] = {STALENESS: {"ssp": 2.0}}
    actual = line(Time_left={"": 73.1}, Age_of_the_last_snapshot={"": 90.2}, **more)
    assert actual == "1,404 steps · 73.1 s left · staleness p99 2 · last snapshot 90.2 s old"


def test_steps_are_those_of_one_worker() -> None:
    """Of two workers with 5 and 3 pushes the line says 5 steps, as the page and the report do."""
    with LocalFleet(2, 2, in_process=True) as fleet:
        runtimes = [fleet.connect(worker, "async") for worker in (0, 1)]
        for runtime, steps in zip(runtimes, (5, 3), strict=True):
            table = Client(runtime).sparse_table("rows", 2, SGD(0.5))
            for _ in range(steps):
                table.push(np.arange(20), np.ones((20, 2), np.float32))
            runtime.flush()
        reader = FleetReader("j", fleet.environment(0).servers, fleet.environment(0))
        look = look_at(reader.read())
        shown = frame_progress(replies(look, look))
        assert shown.startswith("5 steps")
        assert "20 rows" in shown
        reader.close()
        for runtime in runtimes:
            runtime.close()


def test_a_line_is_shown_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal each new line is printed, and nothing when the figures have gone at the end."""
    monkeypatch.setattr("psfleet_launch.console.screen._PLAIN_EVERY", 0.0)
    output = io.StringIO()
    screen = Screen(console=Console(file=output, soft_wrap=True))
    for text in ("", "1 steps", "1 steps", "2 steps", ""):
        screen.set_progress(text)
        screen.refresh()
    assert output.getvalue() == "  1 steps\n  2 steps\n"


FORKS = """
import os, socket, sys, threading, time
from psfleet.core.base.settings.environment import Environment
from psfleet_launch.engines.launch_engine import load_engine
from psfleet_launch.job.spawn import spawn
from psfleet_launch.observability.fleet_reader import FleetReader, Recorder

load_engine("local")
silent = socket.socket(socket.AF_UNIX)  # half of the time the recorder is within a call
silent.bind(sys.argv[1])
silent.listen()
reader = FleetReader("j", ["unix:" + sys.argv[1]], Environment())
recorder = Recorder(reader.read, every=0.05)
recorder.start()
while "grpc" not in sys.modules:
    time.sleep(0.01)
with open(os.devnull, "wb") as log:
    codes = {spawn(["/bin/true"], dict(os.environ), log, False).wait() for _ in range(60)}
recorder.stop()
reader.close()
assert codes == {0}, codes
assert "GRPC_ENABLE_FORK_SUPPORT" not in os.environ
"""


def test_processes_are_started_beside_the_recorder(tmp_path: Path) -> None:
    """gRPC does nothing of its own when the launcher starts a process again, and its variable stays here."""
    variables = {name: said for name, said in os.environ.items() if not name.startswith("GRPC_")}
    process = ended(
        [sys.executable, "-c", FORKS, str(tmp_path / "silent")],
        env={**variables, "GRPC_VERBOSITY": "info", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.returncode == 0, process.stderr
    assert "fork" not in process.stderr, process.stderr
