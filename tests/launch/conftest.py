"""Real jobs: a launcher started as a program, and the proof that nothing of it is left."""

import contextlib
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import starter
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = Path(__file__).with_name("stand_in.py")
_MARK = "PSFLEET_TEST"
_PATIENCE = 120.0


@dataclass
class Launcher:
    """A running `psfleet-launch`; its whole family is known by a variable of the environment."""

    process: subprocess.Popen[str]
    folder: Path
    mark: str

    def family(self) -> dict[int, str]:
        """Process ids and command lines of every living descendant, itself included."""
        processes = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                if f"{_MARK}={self.mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    line = Path(f"/proc/{pid}/cmdline").read_bytes()
                    processes[int(pid)] = line.replace(b"\0", b" ").decode()
            except OSError:
                continue
        return processes

    def pid_of(self, role: str, rank: int) -> int:
        """The process in a seat: it has the role, is no standby, and its parent has none."""
        expected = {f"PSFLEET_ROLE={role}", f"PSFLEET_RANK={rank}"}
        for pid in self.family():
            words = _words(pid)
            standby = any(word.startswith("PSFLEET_STANDBY=") for word in words)
            inner = any(word.startswith("PSFLEET_ROLE=") for word in _words(_parent(pid)))
            if expected <= words and not standby and not inner:
                return pid
        raise AssertionError(f"no {role} {rank} in {self.family()}")

    def log(self, name: str) -> str:
        """A log of its only job, as far as it is written."""
        logs = self.folder.glob(f"psfleet-logs/*/{name}")
        return "".join(path.read_text() for path in logs if path.is_file())

    def until_logged(self, name: str, text: str) -> None:
        """Wait until a log holds `text`."""
        ended = self.process.poll
        self.until(lambda: text in self.log(name) or ended() is not None, f"{text!r} in {name}")
        assert text in self.log(name), f"no {text!r} in {name}: {self.log('*')}"

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for a condition; say what was found where it does not come."""
        until(condition, lambda: f"no {what}: {self.family()}, {self.log('*')}")

    def ends(self, timeout: float = _PATIENCE) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, err

    def ends_with(self, code: int, timeout: float = _PATIENCE) -> tuple[str, str]:
        """Standard output and standard error of one that ends with this code."""
        found, out, err = self.ends(timeout)
        assert found == code, err
        return out, err


def _words(pid: int) -> set[str]:
    """The environment that a process was started with; none, if it has ended meanwhile."""
    with contextlib.suppress(OSError):
        return set(Path(f"/proc/{pid}/environ").read_text().split("\0"))
    return set()


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


Launch = Callable[..., Launcher]


def digest(text: str) -> str:
    """The digest of the final rows that worker 0 of trainer.py has printed, once."""
    matches = re.findall(r"digest ([0-9a-f]{64})\b", text)
    assert len(matches) == 1, text
    return str(matches[0])


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Start `psfleet-launch` in an empty folder; at the end nothing of it may be left."""
    with launches(tmp_path) as start:
        yield start


@contextlib.contextmanager
def launches(folder: Path) -> Iterator[Launch]:
    """What starts `psfleet-launch` in the folder; at the end nothing of it may be left.

    `fresh`: in new interpreters, as a user does, not in forks of one that has loaded everything.
    """
    started: list[Launcher] = []

    def start(
        *arguments: str, terminal: int = subprocess.PIPE, fresh: bool = False, **variables: str
    ) -> Launcher:
        mark = uuid.uuid4().hex
        process = (starter.exec_popen if fresh else subprocess.Popen)(
            [sys.executable, "-m", "psfleet_launch", *arguments],
            cwd=folder,
            text=True,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            env=_environment() | {_MARK: mark} | variables,
        )
        started.append(Launcher(process, folder, mark))
        return started[-1]

    yield start
    for launcher in started:
        left = launcher.family()
        if launcher.process.poll() is None:
            launcher.process.terminate()
            launcher.ends()
        assert not left, f"left running: {left}"


def _environment() -> dict[str, str]:
    """This process's, without what would make a child think that it has a role."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PSFLEET_", "PADDLE_", "TRAINING_ROLE", "OMP_"))
    }
    folders = [ROOT, *(ROOT / name for name in ("server", "worker", "launch"))]
    return kept | {"PYTHONPATH": os.pathsep.join(map(str, folders))}


@pytest.fixture
def job(launch: Launch) -> Launch:
    """Start a job of stand-ins: `job("fails@1", "--workers", "2")`."""
    return stand_in_job(launch)


def stand_in_job(launch: Launch) -> Launch:
    """What starts a job of stand-ins."""
    words = ("--no-progress", "--server-script")

    def start(behaviour: str, *options: str, **how: Any) -> Launcher:
        return launch(*words, *options, str(STAND_IN), behaviour, **how)

    return start
