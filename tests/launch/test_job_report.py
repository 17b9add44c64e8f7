"""The report of a job that did not come to its end."""

import contextlib
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from psfleet_launch.commands.psfleet_cli import main
from psfleet_launch.observability.job_history import read_history
from psfleet_launch.observability.job_report import state
from tests.launch.conftest import Launch
from tests.programs import ended
from tests.waiting import until


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


def test_top_ends_with_the_job(job: Launch, tmp_path: Path) -> None:
    """In a terminal it follows the job until that is over; NO_COLOR takes the colours away."""
    launcher = job("hangs", "--job", "j")
    launcher.until_logged("workerlog.0", "hanging")
    ours, terminal = pty.openpty()
    words = [sys.executable, "-m", "psfleet_launch.commands.psfleet_cli", "top", "j"]
    variables = {**os.environ, "NO_COLOR": "1", "TERM": "xterm"}
    top = subprocess.Popen(words, cwd=tmp_path, stdout=terminal, stderr=terminal, env=variables)
    os.close(terminal)
    shown = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # nobody writes any more
            while data := os.read(ours, 4096):
                shown.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    until(lambda: b"runs: " in shown, lambda: shown)
    launcher.process.terminate()
    launcher.ends()
    assert top.wait(120) == 0
    reader.join()
    os.close(ours)
    assert b"ended with exit code 143 after" in shown
    assert b"job: the job is asked to end by signal 15" in shown
    assert not re.search(rb"\x1b\[[0-9;]*3\d[;m]", shown)


def test_top_without_a_terminal_shows_once(
    job: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It does not wait for the end of the job."""
    launcher = job("hangs", "--job", "j")
    launcher.until_logged("workerlog.0", "hanging")
    assert main(["top", "j", "--log-dir", str(tmp_path / "psfleet-logs")]) == 0
    assert capsys.readouterr().out.startswith("j  runs: ")
    launcher.process.terminate()
    launcher.ends()


def test_a_locale_without_utf_8(tmp_path: Path) -> None:
    """Job files are UTF-8 as TOML says, and so is the page, wherever the job runs."""
    (tmp_path / "job.toml").write_text("[servers]\ncount = 1 # größer\n", "utf-8")
    where = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    script = str(Path(__file__).with_name("trainer.py"))
    command = [sys.executable, "-m", "psfleet_launch", "--config", "job.toml", "--job", "j"]
    done = ended(
        [*command, script, "2", "0", ""],
        cwd=tmp_path,
        env={**os.environ, **where},
        encoding="ascii",
    )
    assert done.returncode == 0, done.stderr
    assert "µs" in (tmp_path / "psfleet-logs" / "j" / "report.html").read_text("utf-8")
