"""The folder of a job's logs belongs to one running job; the launcher's streams and its first moments."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from psfleet_launch.commands.launch_command import main as launch
from psfleet_launch.commands.psfleet_cli import main
from tests.launch.conftest import STAND_IN, Launch
from tests.programs import ended

INTERRUPTED = """
import sys

class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == "psfleet_launch.commands.launch_command":
            raise KeyboardInterrupt

import psfleet_launch.__main__ as door
sys.meta_path.insert(0, Interrupt())
sys.exit(door.main())
"""


def test_a_second_job_of_the_name_is_refused(
    job: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While a job runs its logs are nobody else's: another of its name starts nothing and removes nothing.
    When it is over its name is free, and `psfleet mode` says at once that nobody is there to follow."""
    first = job("hangs", "--job", "j", "--durability", "log")
    first.until_logged("workerlog.0", "hanging")
    logs = first.folder / "psfleet-logs"
    assert launch(["--job", "j", "--log-dir", str(logs), str(STAND_IN)]) == 2
    assert f"a job is running in log folder '{logs}/j'" in capsys.readouterr().err
    assert "hanging" in first.log("workerlog.0")
    assert job("tells", "--job", "k").ends()[0] == 0
    first.process.send_signal(signal.SIGTERM)
    assert first.ends()[0] == 128 + signal.SIGTERM
    assert main(["mode", "j", "async", "--log-dir", str(logs)]) == 2
    assert "'j' is not running" in capsys.readouterr().err
    assert not list(logs.glob("j/mode*"))
    assert job("tells", "--job", "j").ends()[0] == 0


@pytest.mark.parametrize("name", ["link", "dangling", "other"])
def test_a_folder_that_another_user_has_planted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """A link in place of the job's folder is not followed and its target keeps its mode; neither is a
    folder of another user taken. Agents and batch jobs ask the same function."""
    logs, target = tmp_path / "logs", tmp_path / "target"
    logs.mkdir()
    target.mkdir(mode=0o755)
    if name == "other":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        (logs / name).mkdir(mode=0o755)
        os.chown(logs / name, 65534, 65534)
    else:
        (logs / name).symlink_to(target if name == "link" else tmp_path / "nothing")
    assert launch(["--job", name, "--log-dir", str(logs), str(STAND_IN), "tells"]) == 2
    why = "it belongs to user 65534" if name == "other" else "it is a symbolic link"
    assert f"{str(logs / name)!r} cannot be used ({why}); choose another" in capsys.readouterr().err
    assert [target.stat().st_mode & 0o777, *target.iterdir()] == [0o755]
    if name == "other":
        assert [(logs / name).stat().st_mode & 0o777, *(logs / name).iterdir()] == [0o755]


def test_streams_that_are_closed(tmp_path: Path) -> None:
    """A launcher without standard streams, as some service managers start it, runs its job."""
    command = [sys.executable, "-m", "psfleet_launch", "--server-script", str(STAND_IN), "tells"]
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]
    process = subprocess.run(closed, cwd=tmp_path, timeout=60, check=False)
    assert process.returncode == 0
    assert list(tmp_path.glob("psfleet-logs/*/workerlog.0"))


def test_an_interrupt_while_the_launcher_loads() -> None:
    """Ctrl-C in the first moments ends with 130, without a traceback."""
    process = ended(
        [sys.executable, "-c", INTERRUPTED],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert (process.returncode, process.stderr) == (130, "")


def test_a_log_that_takes_no_more(tmp_path: Path) -> None:
    """Where the log of worker 0 cannot be written, as on a full disk, that is said and the job goes on."""
    command = [sys.executable, "-m", "psfleet_launch", "--no-progress", "--server-script"]
    limited = ["sh", "-c", 'ulimit -f 16; exec "$@"', "sh", *command, str(STAND_IN), "talks"]
    # Python would keep what fits of a compiled module, and every later process would find that.
    process = ended(limited, cwd=tmp_path, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == "line 3999"
    assert process.stderr.count("cannot be written (File too large); the job goes on") == 1
