"""psfleet jobs, logs, stop, mode and top, and the small questions that every command answers."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import psfleet
from psfleet.core.base.errors import ConfigError
from psfleet.core.base.settings.declaration import settings_of
from psfleet_launch.commands.psfleet_cli import main
from psfleet_launch.engines.launch_engine import load_engine
from psfleet_launch.job import job_request
from tests.launch.conftest import STAND_IN, Launch
from tests.programs import ended
from tests.waiting import until

HOLDER = """
import sys
from pathlib import Path
from psfleet_launch.job.job_folder import claimed

with claimed(Path(sys.argv[1]), "held") as folder:
    (folder / "serverlog.0").touch()
    print("held", flush=True)
    sys.stdin.read()
"""


def test_jobs_and_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job that has ended is listed, as JSON too, and its members' output is printed."""
    folder = tmp_path / "train-1"
    folder.mkdir()
    (folder / "serverlog.0").touch()
    (folder / "workerlog.1").write_text("loss 0.5\n")
    assert main(["jobs", "--log-dir", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {"job": "train-1", "state": "ended", "logs": str(folder)}
    assert main(["logs", "train-1", "worker.1", "--log-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "loss 0.5\n"
    assert main(["logs", "train-1", "--log-dir", str(tmp_path)]) == 2
    assert "has no log of 'worker.0'; it has server.0, worker.1" in capsys.readouterr().err
    assert main(["stop", "train-1", "--log-dir", str(tmp_path)]) == 2
    assert "job 'train-1' does not run on this machine" in capsys.readouterr().err


def test_stop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The process that holds a running job's folder gets SIGTERM, as from a terminal that ends it."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "held\n"
        assert main(["jobs", "--log-dir", str(tmp_path)]) == 0
        assert "held  running" in capsys.readouterr().out
        assert main(["stop", "held", "--log-dir", str(tmp_path)]) == 0
        assert launcher.wait(60) == -15


@pytest.mark.parametrize("words", [[], ["-h"], ["jobs", "-h"]])
def test_help(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    """`psfleet` alone and -h print help and exit with 0."""
    assert main(words) == 0
    assert "Usage: psfleet" in capsys.readouterr().out


def test_version_and_module(capsys: pytest.CaptureFixture[str]) -> None:
    """The command says the version that psfleet.__version__ has."""
    command = [sys.executable, "-m", "psfleet_launch.commands.psfleet_cli", "--version"]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    assert process.stdout == f"psfleet, version {psfleet.__version__}\n"


def test_engines_in_the_help() -> None:
    """The help of --engine names every engine."""
    (help_text,) = [one.help for one in settings_of(job_request.Launch) if one.flag == "--engine"]
    with pytest.raises(ConfigError) as error:
        load_engine("none")
    for name in str(error.value).partition("one of ")[2].split(", "):
        assert name in help_text


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
        message = f"the workers of j have met and were told to go on in mode {mode}\n"
        assert capsys.readouterr().out == message
    job.ends_with(0, 120)
    for worker in range(2):
        assert (tmp_path / str(worker)).read_text() == "ssp half-async geo"


def test_top(job: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a terminal it follows the job until that is over; NO_COLOR takes the colours away. Without one it
    shows the job once and does not wait for its end."""
    launcher = job("hangs", "--job", "j")
    launcher.until_logged("workerlog.0", "hanging")
    once = ["top", "j", "--log-dir", str(tmp_path / "psfleet-logs")]
    assert main(once) == 0
    assert capsys.readouterr().out.startswith("j  Running for ")
    assert main([*once, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["job"], document["is_running"], document["exit_code"]) == ("j", True, None)
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
    until(lambda: b"Running for " in shown, lambda: shown)
    launcher.process.terminate()
    launcher.ends()
    assert top.wait(120) == 0
    reader.join()
    os.close(ours)
    assert b"Ended with exit code 143 after" in shown
    assert b"job: the job is asked to end by signal 15" in shown
    assert not re.search(rb"\x1b\[[0-9;]*3\d[;m]", shown)


def test_a_locale_without_utf_8(tmp_path: Path) -> None:
    """Job files are UTF-8 as TOML says, and so is the page, wherever the job runs."""
    (tmp_path / "job.toml").write_text("[servers]\ncount = 1 # größer\n", "utf-8")
    where = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "psfleet_launch", "--config", "job.toml", "--job", "j"]
    process = ended(
        [*command, "--server-script", str(STAND_IN), "tells"],
        cwd=tmp_path,
        env={**os.environ, **where},
        encoding="ascii",
    )
    assert process.returncode == 0, process.stderr
    assert "µs" in (tmp_path / "psfleet-logs" / "j" / "report.html").read_text("utf-8")
