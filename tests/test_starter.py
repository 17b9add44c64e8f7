"""Programs that tests/starter.py forks are what new interpreters would be."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import starter
from tests.leaks import children

_PROGRAM = """
import json, os, random, signal, sys, threading
import numpy as np
handlers = [str(signal.getsignal(number)) for number in range(1, signal.NSIG)]
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path, "flags": sys.flags[:2],
    "folder": os.getcwd(), "environment": dict(os.environ), "umask": os.umask(0),
    "shown": open("/proc/self/environ").read().rstrip(chr(0)).split(chr(0)),
    "files": sorted(int(name) for name in os.listdir("/proc/self/fd") if int(name) != 3),
    "handlers": [text for text in handlers if " at 0x" not in text],
    "parent": os.getppid(), "group": os.getpgid(0), "session": os.getsid(0) == os.getpid(),
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "buffered": [sys.stdout.line_buffering, sys.stdout.write_through, sys.stderr.line_buffering],
    "below": [type(stream.buffer).__name__ for stream in (sys.stdout, sys.stderr)],
    "text": sys.stdin.read(), "encoding": sys.stdout.encoding, "threads": threading.active_count(),
}))
print(random.random(), np.random.random(), file=sys.stderr)
"""


def _start(kind: Any, tmp_path: Path, *command: str, **options: Any) -> Any:
    return kind(
        [sys.executable, *command],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.fixture(scope="module")
def forking() -> Any:
    """`subprocess.Popen` that forks, whatever the environment asks of this run."""
    starter.start_zygote()
    return starter.Forking


@pytest.mark.parametrize(
    ("program", "is_session", "unbuffered"),
    [
        *((["-P", "{folder}/program.py"], False, ""), (["-P", "{folder}/program.py"], True, "1")),
        *((["program.py"], False, "1"), (["program.py"], True, "")),
    ],
)
def test_a_fork_finds_what_an_interpreter_finds(
    forking: Any, tmp_path: Path, program: list[str], is_session: bool, unbuffered: str
) -> None:
    """Arguments, environment, folder, path, open files, signals, streams and process group are the same.

    The order of the environment and the numbers of random generators are not.
    """
    (tmp_path / "program.py").write_text(_PROGRAM)
    words = [word.format(folder=tmp_path) for word in program]
    numbers, drawn = [], []
    reading, writing = os.pipe()
    for kind in (forking, starter.exec_popen):
        process = _start(
            kind,
            tmp_path,
            *words,
            "one",
            env={**os.environ, "PYTHONPATH": f"{tmp_path}/a:b", "PYTHONUNBUFFERED": unbuffered},
            pass_fds=[writing],
            start_new_session=is_session,
        )
        out, drawn_here = process.communicate("said")
        assert process.returncode == 0, drawn_here
        facts = json.loads(out)
        assert facts["group"] == (process.pid if is_session else os.getpgid(0))
        del facts["group"]
        facts["shown"].sort()
        assert {*facts["files"]} == {0, 1, 2, writing}
        numbers.append(facts)
        drawn.append(drawn_here)
    os.close(reading)
    os.close(writing)
    assert numbers[0] == numbers[1]
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("raise SystemExit(7)", 7),
        ("raise SystemExit('why')", 1),
        ("raise ValueError('bad')", 1),
        ("import os; os._exit(9)", 9),
        ("import atexit; atexit.register(print, 'over')", 0),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", None),
        ("import faulthandler; print(faulthandler.is_enabled())", 0),
    ],
)
def test_a_fork_ends_as_an_interpreter_ends(
    forking: Any, tmp_path: Path, line: str, code: int | None
) -> None:
    """Exit codes, fatal signals and the last line of what is printed are the same.

    No code is expected of signals that whoever runs the tests may ignore.
    """
    (tmp_path / "program.py").write_text(line)
    ends = []
    for kind in (forking, starter.exec_popen):
        process = _start(kind, tmp_path, "program.py")
        out, err = process.communicate()
        ends.append((process.returncode, out, err.splitlines()[-1:]))
    assert ends[0] == ends[1]
    assert code in (None, ends[0][0])


def test_a_fork_shows_its_environment_at_once(forking: Any, tmp_path: Path) -> None:
    """A job finds a process by its environment as soon as it has been started."""
    (tmp_path / "program.py").write_text("import sys; sys.stdin.read()")
    command = [sys.executable, str(tmp_path / "program.py")]
    for number in range(20):
        environment = {**os.environ, "PSFLEET_JOB_ID": f"job {number}"}
        with forking(command, env=environment, stdin=subprocess.PIPE) as process:
            shown = Path(f"/proc/{process.pid}/environ").read_bytes()
            assert f"PSFLEET_JOB_ID=job {number}".encode() in shown.split(b"\0")


def test_a_fork_leaves_no_zygote_to_whoever_asked(
    forking: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that ends at once, while the other process is slow to go on."""
    subreaper = starter._subreaper

    @contextlib.contextmanager
    def slow() -> Iterator[None]:
        with subreaper():
            yield
            time.sleep(0.3)

    monkeypatch.setattr(starter, "_subreaper", slow)
    (tmp_path / "program.py").write_text("# it may start others: subprocess\n")
    before = children()
    forking([sys.executable, str(tmp_path / "program.py")]).wait()
    assert children() <= before


def test_a_module_is_run_as_an_interpreter_runs_it(forking: Any, tmp_path: Path) -> None:
    """`-m` names the file of the module in its usage, and refuses an option with the same words."""
    ends = []
    for kind in (forking, starter.exec_popen):
        process = _start(kind, tmp_path, "-m", "psfleet_server", "--no-such-option")
        ends.append((*process.communicate(), process.returncode))
    assert ends[0] == ends[1]
    assert ends[0][2] == 2


def test_files_of_a_fork_of_a_fork_stay_open(forking: Any, tmp_path: Path) -> None:
    """No connection of a zygote closes a file that has its number now, not even when the program ends."""
    (tmp_path / "outer.py").write_text(
        "import subprocess, sys\nsys.exit(subprocess.call([sys.executable, 'inner.py']))"
    )
    (tmp_path / "inner.py").write_text(
        "import atexit, os\n"
        "numbers = [os.open('inner.py', os.O_RDONLY) for _ in range(20)]\n"
        "atexit.register(lambda: print(sum(os.fstat(number).st_size > 0 for number in numbers)))\n"
    )
    process = _start(forking, tmp_path, "outer.py")
    assert process.communicate() == ("20\n", "")


def test_a_worker_of_xdist_is_a_fork_with_a_zygote(forking: Any, tmp_path: Path) -> None:
    """It finds what an interpreter finds, and starts what it starts as the process that asked for it does."""
    facts = "import sys; print(sys.argv, sys.path, __name__, sys.stdout.write_through)"
    own = "; from tests.starter import _zygote; print(_zygote.is_started, _zygote.is_inner)"
    command, ends = starter._XDIST_WORKER, []
    for kind, code in ((forking, facts + own), (starter.exec_popen, facts)):
        process = _start(kind, tmp_path, *command, env={**os.environ, "PYTHONUNBUFFERED": "1"})
        ends.append(process.communicate(f"{code!r}\n"))
    (out, _), (expected, _) = ends
    assert out == expected + "True False\n"
