"""What is known of a job after its end: its last figures, and all processes that it has had."""

import re
from pathlib import Path

import pytest

from psfleet.core.base.job_files import SERVERS
from psfleet_launch.commands.psfleet_cli import main
from psfleet_launch.observability.job_history import read_history
from psfleet_launch.observability.job_view import view_of
from psfleet_launch.observability.page_and_report import overview
from tests.launch.conftest import Launch, launches
from tests.observability.ending import AFTERWARDS


@pytest.mark.timeout(300)
def test_the_end_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Report and `psfleet top` have the steps and losses with which the workers left. A server that was
    added is a process of the job, the move is marked, and the tables are the user's."""
    with launches(tmp_path) as launch:
        check_end(launch, tmp_path, capsys)


def check_end(launch: Launch, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the job to its end, with a second server on the way."""
    script = str(Path(__file__).with_name("ending.py"))
    job = launch("--servers", "1", "--workers", "2", "--job", "j", script)
    job.until(lambda: (folder / "psfleet-logs" / "j" / SERVERS).exists(), "workers")
    words = ("--log-dir", str(folder / "psfleet-logs"))
    assert main(["scale", "j", "--servers", "2", "--wait", "120", *words]) == 0
    out, _ = job.ends_with(0)
    steps = int(re.findall(r"(\d+) steps of each worker", out)[0])
    past = read_history(folder / "psfleet-logs" / "j")
    assert past.last("Loss") == {f"worker {n}": pytest.approx(1 / AFTERWARDS) for n in (0, 1)}
    assert past.last("Steps") == {"": steps}
    assert past.last("Logged values") == {f"left worker {n}": AFTERWARDS for n in (0, 1)}
    assert {*past.last("Rows"), *past.last("Memory of tables")} == {"rows"}
    shown = overview(view_of(past, is_running=False))
    processes = next(table for table in shown["tables"] if table["title"] == "Processes")
    assert [row[:3] for row in processes["rows"]] == [
        [name, "local", "finished"] for name in ("server 0", "server 1", "worker 0", "worker 1")
    ]
    assert ["move", "2 servers from now on"] in [mark[1:] for mark in shown["marks"]]
    assert ["Final loss", "0.025", "mean of 2 workers", ""] in shown["figures"]
    capsys.readouterr()
    assert main(["top", "j", "--once", *words]) == 0
    assert f"{steps:,} steps" in capsys.readouterr().out
