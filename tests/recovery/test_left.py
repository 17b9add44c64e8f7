"""A worker that dies after it has left the fleet has nothing to come back to."""

import sys
from pathlib import Path

from tests.programs import ended

SCRIPT = """
import os, signal
from psfleet import fleet

fleet.init()
fleet.barrier_worker()
fleet.stop_worker()
if fleet.worker_index() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_that_was_killed_after_it_had_left_is_done(tmp_path: Path) -> None:
    """With --restart-workers: it is not started again, the job ends at once and says so."""
    script = tmp_path / "leaving.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "psfleet_launch", "--servers", "2", "--workers", "2"]
    command += ["--no-progress", "--log-dir", str(tmp_path / "logs"), "--restart-workers", "2"]
    process = ended([*command, str(script)])
    assert process.returncode == 0, process.stderr
    assert "worker 1 ended with signal 9; it had left the fleet" in process.stderr
    assert "restart" not in process.stderr
