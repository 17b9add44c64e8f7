"""Starts followers of a job under chaos, and kills, pauses and cuts them off at times that depend on the
seed.

The launcher's job runner calls `FollowerProcesses` in its loop. Each follower runs audited_follower.py,
which writes the results of its checks to files. report.py reads the files with `noted_cuts`.
"""

import json
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from psfleet_launch.chaos.fault_schedule import ChaosSchedule

_PROGRAM = "psfleet_launch.chaos.audited_follower"
_LASTS = (0.2, 1.5)  # seconds of a pause, or of a cut network
_FAULTS: tuple[Literal["kill", "pause", "cut"], ...] = ("kill", "pause", "cut")
_WORDS = {"kill": "is killed", "pause": "is paused", "cut": "is cut off from the servers"}


@dataclass(frozen=True)
class NotedCut:
    """Result of a follower's check of one cut, its copy of the tables at one point of training.

    Attributes:
        round: Round of the cut, or None in a mode without rounds.
        tables: SHA-256 of the weights of each table, if the mode has rounds.
        wrong: Errors, as sentences: acknowledged pushes that the cut lacks.
    """

    round: int | None
    tables: dict[str, str]
    wrong: tuple[str, ...]


def noted_cuts(folder: Path) -> Iterator[NotedCut]:
    """Yield the results that all followers have written to a folder."""
    for path in sorted(folder.glob("cuts.*")):
        # Ignore the text after the last newline: a killed follower may have written part of a line.
        for line in path.read_text().split("\n")[:-1]:
            note = json.loads(line)
            yield NotedCut(note["round"], note["tables"], tuple(note["wrong"]))


class FollowerProcesses:
    """Processes of followers on the launcher's machine. A process that has ended is restarted.

    Args:
        chaos: Faults of the job. Faults of followers are added to them.
    """

    def __init__(self, chaos: ChaosSchedule, job: Path, count: int) -> None:
        self._chaos, self._job, self._count = chaos, job, count
        self._dice = random.Random(f"followers {chaos.seed}")
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._next = self._began = 0.0
        self._endings: dict[int, float] = {}  # end of each follower's pause or cut of the network

    def due(self, at: float) -> list[str]:
        """Start missing followers and inject faults that are due at time `at`. Return lines for the user.

        Called repeatedly while the job trains.
        """
        for number in range(self._count):
            process = self._processes.get(number)
            if process is None or process.poll() is not None:
                self._processes[number] = self._spawn(number)
        for number in [number for number, end in self._endings.items() if end <= at]:
            self._let_go_on(number)
        if self._chaos.is_calm or not self._count:
            return []
        if not self._began:
            self._began, self._next = at, at + self._pause()
        if at < self._next:
            return []
        self._next = at + self._pause()
        return self._inject(at)

    def _pause(self) -> float:
        return self._chaos.pace * self._dice.uniform(0.5, 1.5)

    def _spawn(self, number: int) -> "subprocess.Popen[bytes]":
        program = [sys.executable, "-m", _PROGRAM, str(self._job), str(self._chaos.folder)]
        with (self._job / f"followerlog.{number}").open("ab") as log:
            return subprocess.Popen(
                [*program, str(number)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def _inject(self, at: float) -> list[str]:
        number, kind = self._dice.randrange(self._count), self._dice.choice(_FAULTS)
        seconds = 0.0 if kind == "kill" else self._dice.uniform(*_LASTS)
        if number in self._endings or not self._has_cut(number):
            return []
        if kind == "cut":
            self._mark(number).touch()
        else:
            process = self._processes[number]
            process.send_signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        if seconds:
            self._endings[number] = at + seconds
        fault = {"at": at - self._began, "kind": kind, "member": f"follower {number}"}
        self._chaos.followed.append({**fault, "seconds": seconds})
        return [f"chaos: follower {number} {_WORDS[kind]}"]

    def _has_cut(self, number: int) -> bool:
        """Return whether the follower's present process has completed an update.

        A process without one is not killed. Otherwise each process might be killed before its first update.
        """
        return (self._chaos.folder / f"cuts.{number}.{self._processes[number].pid}").exists()

    def _let_go_on(self, number: int) -> None:
        del self._endings[number]
        self._mark(number).unlink(missing_ok=True)
        self._processes[number].send_signal(signal.SIGCONT)

    def _mark(self, number: int) -> Path:
        return self._chaos.folder / f"cut.{number}"

    def close(self) -> None:
        """Kill all followers."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
