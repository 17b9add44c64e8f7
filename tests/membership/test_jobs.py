"""Jobs whose workers are killed: what the launcher does, says, and what comes out."""

import sys
from pathlib import Path

from tests.programs import ended

SCRIPT = str(Path(__file__).with_name("scripts") / "dying.py")


def test_the_job_goes_on_without_a_killed_worker(tmp_path: Path) -> None:
    """With --dead-after its samples are dealt to those that are left. (One that is started again:
    test_sample_jobs.py.)"""
    command = [sys.executable, "-m", "psfleet_launch", "--servers", "2", "--workers", "2"]
    command += ["--no-progress", "--log-dir", str(tmp_path / "logs"), "--dead-after", "5s"]
    process = ended([*command, SCRIPT, "2", "1", "4", str(tmp_path / "mark")])
    assert process.returncode == 0, process.stderr
    assert "worker 1 ended with signal 9; the job goes on without it" in process.stderr
    assert process.stdout.startswith(f"used {[2] * 60}")
