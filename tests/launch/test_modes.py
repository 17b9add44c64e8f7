"""psfleet mode: a running job goes on in another mode."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.conftest import Launch, launch
from tests.programs import ended

__all__ = ["launch"]

SCRIPT = str(Path(__file__).with_name("meeting.py"))


def wish(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """The command, where the job was started."""
    return ended(
        [sys.executable, "-m", "psfleet_launch.commands.psfleet_cli", "mode", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


@pytest.mark.timeout(300)
def test_a_running_job_changes_its_mode(launch: Launch, tmp_path: Path) -> None:
    """All workers go on in the modes that are wished for, one after the other, at their barriers; what
    is no mode is refused before it reaches the job."""
    job = launch(
        "--no-progress",
        "--job",
        "j",
        "--servers",
        "2",
        "--workers",
        "2",
        SCRIPT,
        "1000000",
        str(tmp_path),
    )
    job.until(lambda: (tmp_path / "runs.1").exists(), "a first barrier")
    for wrong, says in (
        ("sometimes", "'sometimes'"),
        ("async:3", "'async:3' is none"),
        ("ssp:x", "none"),
    ):
        refused = wish(job.folder, "j", wrong)
        assert (refused.returncode, says in refused.stderr) == (2, True), refused.stderr
    assert "has no job 'k'" in wish(job.folder, "k", "async").stderr
    for mode in ("ssp:4", "half-async:3", "geo:2"):
        done = wish(job.folder, "j", mode, "--wait", "120")
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"the workers of j have met and were told to go on in mode {mode}\n"
    code, _, err = job.ends(120)
    assert code == 0, err
    for worker in range(2):
        assert (tmp_path / str(worker)).read_text() == "ssp half-async geo"
