"""Forty plausible mistakes of a new user: each ends with one clear sentence and the right exit code."""

import os
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

import psfleet
from psfleet.core.base.errors import PsfleetError
from psfleet.core.graph.program import names
from psfleet.core.graph.program.program import Program, program_guard
from psfleet.core.runtime.process_runtime import current
from psfleet_launch.commands.launch_command import main as launch
from psfleet_worker.session.retry_policy import Patience
from tests.mistakes.by_hand import BY_HAND, MODEL, TABLE
from tests.programs import ended

ROOT = Path(__file__).parents[2]
IMPORTS = "import numpy as np\nimport psfleet\nfrom psfleet import fleet, layers, optimizer\n"
Run = Callable[..., tuple[int, list[str]]]


def environment() -> dict[str, str]:
    """This process's, without what would give a child a role."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("PSFLEET_", "PADDLE_", "TRAINING_ROLE"))
    }
    folders = [ROOT, *(ROOT / name for name in ("server", "worker", "launch"))]
    return kept | {"PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a script, or `psfleet-launch` with arguments; the exit code and the lines of standard error."""

    def one(script: str, *arguments: str, **variables: str) -> tuple[int, list[str]]:
        command = ["-m", "psfleet_launch", *arguments]
        if script:
            (tmp_path / "train.py").write_text(script)
            command = ["train.py"]
        process = ended([sys.executable, *command], cwd=tmp_path, env=environment() | variables)
        return process.returncode, process.stderr.splitlines()

    return one


PROCESSES = ["gradients of another width", "a missing feed", "no minimize"]
PROCESSES += [name for name, mistake in BY_HAND.items() if mistake.variables or not mistake.code]


def test_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of a script with a mistake names its kind and says in one sentence what is wrong, with the
    value. These scripts run in this process, each with a runtime and programs of its own.
    """
    monkeypatch.chdir(tmp_path)
    wrong = []
    for name in BY_HAND.keys() - PROCESSES:
        mistake = BY_HAND[name]
        if mistake.script.startswith("import torch") and find_spec("torch") is None:
            continue
        script = IMPORTS + (MODEL if mistake.model else "") + mistake.script
        before = current().use(None)
        message = "nothing"
        try:
            with names.guard(), program_guard(Program(), Program()):
                exec(script, {"__name__": "__main__"})
        except PsfleetError as error:
            message = f"{type(error).__name__}: {error}"
        finally:
            psfleet.reset()
            current().use(before)
        if not re.fullmatch(f"{mistake.sentence}.*", message):
            wrong.append(f"{name}: {message}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", PROCESSES)
def test_a_script_that_is_run_by_hand(run: Run, name: str) -> None:
    """The last line that a process prints is this sentence with the place in the script; no traceback."""
    mistake = BY_HAND[name]
    script = IMPORTS + (MODEL if mistake.model else "") + mistake.script + "\n"
    code, lines = run(script, **dict(mistake.variables))
    print(*lines[-1:])
    assert lines, "it said nothing"
    assert re.fullmatch(rf"(psfleet\.)?{mistake.sentence}.*", lines[-1]), lines[-1]
    if lines[-1].startswith("psfleet."):
        assert not any(line.startswith("Traceback") for line in lines), "more than the sentence"
        assert lines[-1].endswith(")"), "the place in the script is missing"
    assert code == mistake.code


OPTIONS = {
    "no such script": (["trian.py"], r"script 'trian.py' does not exist; name a Python file"),
    "no workers": (["--workers", "0", "train.py"], r"--workers is 0; it must be at least 1; to .*"),
    "no servers": (
        ["--servers", "0", "train.py"],
        r"--servers is 0; it must be a number from 1 .*",
    ),
    "a mode that there is not": (
        ["--mode", "synch", "train.py"],
        r".*'synch' is not one of 'sync'.*",
    ),
    "an option with a slip": (["--wrokers", "2", "train.py"], r".*--wrokers.*--workers.*"),
    "a resume from nothing": (
        ["--resume", ".", "train.py"],
        r"--resume is '\.', which is no complete.*",
    ),
    "restarts below 0": (["--restart-workers", "-1", "train.py"], r"--restart-workers is -1; .*"),
    "no micro-batches": (
        ["--micro-batches", "0", "train.py"],
        r"--micro-batches is 0; it must be at least 1",
    ),
    "staleness without ssp": (["--async", "--staleness", "4", "train.py"], r".*staleness.*"),
    "a log that is no choice": (["--durability", "logs", "train.py"], r".*'logs' is not one of.*"),
    "a setting that there is not": (["--strategy", "s.toml", "train.py"], r".*synchronous.*"),
}


def test_options_of_the_launcher(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A wrong option is one line that quotes it, with exit code 2, and nothing starts: all of them in this
    process, and one in a process of its own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "s.toml").write_text("[synchronous]\n")
    wrong = []
    for name, (arguments, sentence) in OPTIONS.items():
        code, output = launch(arguments), capfd.readouterr().err
        if code != 2 or not re.fullmatch(f"psfleet-launch: {sentence}\n", output):
            wrong.append(f"{name}: {code} {output}")
    assert not wrong, "\n".join(wrong)
    code, lines = run("", "--workers", "0", "train.py")
    assert (code, len(lines)) == (2, 1), lines


def launched(folder: Path, script: str, *options: str) -> tuple[int, list[str]]:
    """Run a script under a launcher of its own; the exit code and the lines on the screen."""
    (folder / "train.py").write_text(IMPORTS + script + "\n")
    process = ended(
        [sys.executable, "-m", "psfleet_launch", "--no-progress", *options, "train.py"],
        cwd=folder,
        env=environment(),
    )
    return process.returncode, process.stderr.splitlines()


JOBS = {
    "no fleet.init": (
        MODEL.replace("fleet.init()", "") + "exe.run(feed={'x': X, 'y': Y})",
        ["--workers", "2"],
        1,
        r"worker \d failed first: psfleet\.ConfigError: PSFLEET_ROLE says that this process is "
        r"worker \d of 2, but the script has not called fleet\.init\(\) and would train alone; .*",
    ),
    "nothing of the fleet": (
        "print(np.ones(3).sum())",
        [],
        1,
        r"no worker has used the fleet: train\.py trained nothing on the servers\. .* Job exit code 1\.",
    ),
    "no minimize": (
        "fleet.init()\nx = layers.data('x', [None, 2])\nloss = layers.mean(layers.fc(x, 1))\n"
        "exe = psfleet.Executor()\n"
        "for batch in fleet.shard([np.ones((4, 2), np.float32)] * 4):\n"
        "    exe.run(feed={'x': batch}, fetch_list=[loss])",
        ["--workers", "2"],
        1,
        r"worker \d failed first: psfleet\.UsageError: a program with parameters was run 2 times .*",
    ),
    "an error of the script's own": (
        "def read(row):\n    return row['late']\n\nread({})",
        [],
        1,
        r"worker 0 failed first: KeyError: 'late'",
    ),
    "a wrong shape in one worker": (
        TABLE
        + "if ps.worker_index == 1:\n    t.push(ids, np.ones((3, 5)))\nps.barrier()\nps.close()",
        ["--workers", "2"],
        1,
        r"worker 1 failed first: psfleet\.ShapeError: table 'users' has rows of 4; .*",
    ),
    "two modes": (
        "fleet.init(strategy=fleet.DistributedStrategy(a_sync=True))\npsfleet.connect(mode='sync')",
        [],
        1,
        r"worker 0 failed first: psfleet\.ConfigError: this process is in its fleet already, in mode "
        r"'async', and psfleet\.connect\(\) asks for 'sync'; .*",
    ),
    "NaN": (
        TABLE + "t.push(ids, np.full((3, 4), np.nan))\nps.close()",
        [],
        0,
        r".+ WARNING worker\.0 psfleet: worker 0, step 1: the gradient for table 'users' has nan for id 0, "
        r"and is .*",
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_script_under_the_launcher(tmp_path: Path, name: str) -> None:
    """The screen has the sentence, no traceback and no line of the library; the exit code is right."""
    script, options, expected, sentence = JOBS[name]
    code, lines = launched(tmp_path, script, *options)
    screen = "\n".join(lines)
    assert code == expected, screen
    assert [line for line in lines if re.fullmatch(sentence, line)], screen
    assert "Traceback (most recent call last)" not in screen
    assert "psfleet/" not in screen
    if "traceback:" in screen:
        log = next(line.partition("traceback: ")[2] for line in lines if "traceback:" in line)
        assert "Traceback (most recent call last)" in (tmp_path / log).read_text()


def test_servers_that_were_never_started(run: Run) -> None:
    """When its patience is over the worker names server and endpoint, and says what to do."""
    hasty = "from psfleet_worker.session.retry_policy import Patience\n"
    hasty += "Patience.of = classmethod(lambda kind, environment: kind(start=1.0))\n"
    role = {"PSFLEET_ROLE": "worker", "PSFLEET_SERVERS": "unix:/nonexistent/none"}
    code, lines = run(hasty + IMPORTS + TABLE, **role)
    assert code == 1
    said = (
        r"psfleet\.ServerUnavailable: server 0 at unix:/nonexistent/none has not answered for "
        r".*; start the servers first, or correct PSFLEET_SERVERS \(train\.py, line 7\)"
    )
    assert re.fullmatch(said, lines[-1]), lines
    assert Patience().start == 120


def test_the_traceback_can_be_had(run: Run) -> None:
    """PSFLEET_TRACEBACK=1 prints an error of psfleet with its whole traceback."""
    script = f"{IMPORTS}fleet.set_mode(3)\n"
    code, lines = run(script, PSFLEET_TRACEBACK="1")
    assert code == 1
    assert lines[0] == "Traceback (most recent call last):"
    code, lines = run(script)
    assert code == 1
    assert len(lines) == 1, lines
    assert re.fullmatch(r"psfleet\..* \(train\.py, line 4\)", lines[0])
