"""Jobs whose workers are killed: what the launcher does, says, and what comes out."""

import sys
from pathlib import Path

from tests.programs import ended

SCRIPT = str(Path(__file__).with_name("scripts") / "dying.py")


def job(folder: Path, *options: str, dies: int = -1, at: int = 4) -> tuple[int, str, str]:
    """Exit code, output and messages of a job of two workers of which one may be killed."""
    name = f"job{len(list(folder.iterdir()))}"
    command = [sys.executable, "-m", "psfleet_launch", "--servers", "2", "--workers", "2"]
    command += ["--no-progress", "--job", name, "--log-dir", str(folder / "logs"), *options]
    process = ended([*command, SCRIPT, "2", str(dies), str(at), str(folder / f"mark-{name}")])
    return process.returncode, process.stdout, process.stderr


def test_a_killed_worker_is_started_again(tmp_path: Path) -> None:
    """With --restart-workers it takes its seat again, one line says so, and no bit changes."""
    code, expected, errors = job(tmp_path)
    assert code == 0, errors
    code, actual, errors = job(tmp_path, "--restart-workers", "1", dies=1)
    assert code == 0, errors
    assert "worker 1 ended with signal 9; a new process takes its seat (restart 1 of 1)" in errors
    assert actual == expected
    assert actual.startswith(f"used {[2] * 60}")


def test_the_job_goes_on_without_a_killed_worker(tmp_path: Path) -> None:
    """With --dead-after its samples are dealt to those that are left."""
    code, actual, errors = job(tmp_path, "--dead-after", "5s", dies=1)
    assert code == 0, errors
    assert "worker 1 ended with signal 9; the job goes on without it" in errors
    assert actual.startswith(f"used {[2] * 60}")
