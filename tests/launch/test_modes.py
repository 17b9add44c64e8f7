"""psfleet mode: a running job goes on in another mode."""

from pathlib import Path

import pytest

from psfleet_launch.commands.psfleet_cli import main
from tests.launch.conftest import Launch

SCRIPT = str(Path(__file__).with_name("meeting.py"))


@pytest.mark.timeout(300)
def test_a_running_job_changes_its_mode(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All workers go on in the modes that are wished for, one after the other, at their barriers; what
    is no mode is refused before it reaches the job."""
    two = ("--servers", "2", "--workers", "2", "--no-progress")
    job = launch(*two, "--job", "j", SCRIPT, "1000000", str(tmp_path))
    job.until(lambda: (tmp_path / "runs.1").exists(), "a first barrier")
    logs = ("--log-dir", str(tmp_path / "psfleet-logs"))
    for name, wrong, says in (
        ("j", "sometimes", "'sometimes'"),
        ("j", "async:3", "'async:3' is none"),
        ("j", "ssp:x", "none"),
        ("k", "async", "has no job 'k'"),
    ):
        assert main(["mode", name, wrong, *logs]) == 2
        assert says in capsys.readouterr().err
    for mode in ("ssp:4", "half-async:3", "geo:2"):
        assert main(["mode", "j", mode, "--wait", "120", *logs]) == 0
        said = f"the workers of j have met and were told to go on in mode {mode}\n"
        assert capsys.readouterr().out == said
    code, _, err = job.ends(120)
    assert code == 0, err
    for worker in range(2):
        assert (tmp_path / str(worker)).read_text() == "ssp half-async geo"
