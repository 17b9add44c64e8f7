"""psfleet jobs, logs and stop, and the small questions that every command answers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import psfleet
from psfleet.errors import ConfigError
from psfleet.settings.declaration import settings_of
from psfleet_launch.commands.psfleet_cli import main
from psfleet_launch.engines.launch_engine import load_engine
from psfleet_launch.job.job_request import Launch

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
    said = json.loads(capsys.readouterr().out)
    assert said == {"job": "train-1", "state": "ended", "logs": str(folder)}
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
    """`python -m psfleet` is the command, and says the version that psfleet.__version__ has."""
    done = subprocess.run(
        [sys.executable, "-m", "psfleet", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"psfleet, version {psfleet.__version__}\n"


def test_engines_in_the_help() -> None:
    """The help of --engine names every engine."""
    (help_text,) = [one.help for one in settings_of(Launch) if one.flag == "--engine"]
    with pytest.raises(ConfigError) as caught:
        load_engine("none")
    for name in str(caught.value).partition("one of ")[2].split(", "):
        assert name in help_text
