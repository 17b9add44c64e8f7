"""psfleet top, and a job where the locale has no UTF-8."""

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

from psfleet_launch.commands.psfleet_cli import main
from tests.launch.conftest import Launch
from tests.programs import ended
from tests.waiting import until


def test_top(job: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a terminal it follows the job until that is over; NO_COLOR takes the colours away. Without one it
    shows the job once and does not wait for its end."""
    launcher = job("hangs", "--job", "j")
    launcher.until_logged("workerlog.0", "hanging")
    once = ["top", "j", "--log-dir", str(tmp_path / "psfleet-logs")]
    assert main(once) == 0
    assert capsys.readouterr().out.startswith("j  runs: ")
    assert main([*once, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["job"], said["is_running"], said["exit_code"]) == ("j", True, None)
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
