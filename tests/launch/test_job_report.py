"""The report of a job that did not come to its end."""

from pathlib import Path

import pytest

from psfleet_launch.commands.psfleet_cli import main
from psfleet_launch.observability.job_history import read_history
from psfleet_launch.observability.job_report import state
from tests.launch.conftest import Launch


def test_a_job_whose_launcher_was_killed_is_reported(
    job: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From what is on the disk: what ran, and that no end is recorded."""
    launcher = job("hangs", "--workers", "2", "--job", "j")
    folder, logs = tmp_path / "psfleet-logs" / "j", ["--log-dir", str(tmp_path / "psfleet-logs")]
    launcher.until(lambda: launcher.log("workerlog.1") != "", "workers")
    assert main(["report", "j", *logs]) == 0
    assert state(read_history(folder), is_running=True).startswith("runs: ")
    launcher.process.kill()
    launcher.ends()
    launcher.until(lambda: not launcher.family(), "end of all processes")
    assert main(["report", "j", *logs]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n" * 2
    page = (folder / "report.html").read_text()
    assert "no end is recorded: its launcher was killed after" in page
    assert '["worker 1","local","1","0","running"]' in page
