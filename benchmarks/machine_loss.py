"""Time for which a fleet stands still when a machine loses its power.

    python benchmarks/machine_loss.py [--times 10] [--load 0]

Needs root, because each machine is a network namespace. A job of 2 servers and 1 worker runs on 3 machines,
in sync mode with --replicas 1. The worker pushes to both servers without a pause. The machine of a server,
alternately of server 0 and server 1, is cut off and all of its processes are killed. A measurement is the
time from there to the acknowledgement of the first push after the takeover. `--load N` starts N processes
that only consume CPU. At the end a table that counts pushes shows that none is lost.
"""

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Read
from psfleet.core.engine.schema.table import TableSpec

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]
from tests.agents.machines import NETWORK, Lab, laboratory  # noqa: E402 - found by the line before

COUNTS = TableSpec("counts", "dense", (20_000,), make_rule("sgd", {}))
HOSTS = ("alpha", "beta", "gamma")
PRIMARIES = ("alpha", "beta")  # the machines of servers 0 and 1; the worker is on the third one
BEFORE, AFTER = 2.0, 5.0  # seconds of training on either side


def work(acknowledged: Path, over: Path) -> None:
    """Run the worker: push until `over` exists, and record when each push was acknowledged."""
    from psfleet import fleet
    from psfleet.core.runtime.process_runtime import current

    fleet.init()
    active = current().active()
    active.create(COUNTS, np.zeros(20_000, np.float32))
    gradient = Gradient(COUNTS.key, np.full(20_000, -1, np.float32), None, 1.0)
    pushes = 0
    with acknowledged.open("w", buffering=1) as log:
        while not over.exists():
            active.push([gradient])
            active.flush()
            pushes += 1
            log.write(f"{time.monotonic()}\n")
    counted = active.pull([Read(COUNTS.key)])[0]
    print("exact", bool((counted == pushes).all()))


class Run:
    """A job whose machine `victim` loses its power."""

    def __init__(self, lab: Lab, folder: Path, victim: str) -> None:
        self._lab = lab
        self._folder = folder
        self._victim = victim
        self._err = folder / "err"

    def seconds(self) -> float:
        """Return the seconds from the power-off to the next acknowledgement."""
        acknowledged, over = self._folder / "acknowledged", self._folder / "over"
        with self._launcher(acknowledged, over) as launcher, self._agents(launcher):
            for server in (0, 1):
                self._await(lambda rank=server: self._has_standby(rank), launcher)  # type: ignore[misc]
            self._await(lambda: acknowledged.exists() and acknowledged.stat().st_size > 0, launcher)
            time.sleep(BEFORE)
            at = time.monotonic()
            self._lab.power_off(self._victim)
            self._await(lambda: _first_after(acknowledged, at) > 0, launcher)
            time.sleep(AFTER)
            over.touch()
            out, _ = launcher.communicate()
        if launcher.returncode or "exact True" not in out:
            sys.exit(f"exit code {launcher.returncode}, {out}, {self._err.read_text()}")
        return _first_after(acknowledged, at) - at

    @contextlib.contextmanager
    def _launcher(self, *words: Path) -> Iterator["subprocess.Popen[str]"]:
        command = [*self._lab.inside, sys.executable, "-m", "psfleet_launch", "--engine", "join"]
        command += [
            "--agents",
            "3",
            "--listen",
            f"{NETWORK}.1",
            "--servers",
            "2",
            "--replicas",
            "1",
        ]
        command += ["--no-progress", __file__, *map(str, words)]
        with (
            self._err.open("w") as err,
            subprocess.Popen(
                command, cwd=self._folder, text=True, stdout=subprocess.PIPE, stderr=err
            ) as launcher,
        ):
            yield launcher

    @contextlib.contextmanager
    def _agents(self, launcher: "subprocess.Popen[str]") -> Iterator[None]:
        self._await(lambda: "agent --join" in self._err.read_text(), launcher)
        match = re.search(r"psfleet (agent --join \S+ --credentials \S+)", self._err.read_text())
        assert match
        program = [sys.executable, "-m", "psfleet_launch.commands.psfleet_cli", *match[1].split()]
        quiet = subprocess.DEVNULL
        with contextlib.ExitStack() as stack:
            for number, name in enumerate(HOSTS, 1):
                agent = [*self._lab.within(number), *program, "--name", name]
                stack.enter_context(subprocess.Popen(agent, stdout=quiet, stderr=quiet))
            yield

    def _await(self, condition: Callable[[], bool], launcher: "subprocess.Popen[str]") -> None:
        while not condition():
            if launcher.poll() is not None:
                sys.exit(f"exit code {launcher.returncode}: {self._err.read_text()}")
            time.sleep(0.05)

    def _has_standby(self, server: int) -> bool:
        logs = self._folder.glob(f"psfleet-logs/*/serverlog.{server}.copy.1")
        return any(f"standby 1 of server {server} ready" in log.read_text() for log in logs)


def _first_after(acknowledged: Path, at: float) -> float:
    """Return when the first push that had to wait for the takeover was acknowledged, or 0 if none was yet."""
    times = np.array([float(line) for line in acknowledged.read_text().splitlines()])
    late = times[1:][(times[1:] > at) & (np.diff(times) > 0.5)]
    return float(late[0]) if late.size else 0.0


def measure(times: int) -> None:
    """Turn off machines in turn, and print the times."""
    durations = []
    for number in range(times):
        with tempfile.TemporaryDirectory() as made, laboratory(Path(made), HOSTS) as lab:
            durations.append(Run(lab, Path(made), PRIMARIES[number % 2]).seconds())
        print(f"server {number % 2}: {durations[-1]:.2f} s", flush=True)
    for server in (0, 1):
        print(f"server {server}: median {statistics.median(durations[server::2]):.2f} s")
    print(
        f"{times} machines: median {statistics.median(durations):.2f} s, worst {max(durations):.2f} s; "
        f"every push counted once; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )


def main() -> None:
    """Run the worker in a job's worker process; otherwise start the jobs."""
    if os.environ.get("PSFLEET_ROLE") == "worker":
        work(*map(Path, sys.argv[1:]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--load", type=int, default=0)
    options = parser.parse_args()
    load = [subprocess.Popen([sys.executable, "-c", "while 1: pass"]) for _ in range(options.load)]
    try:
        measure(options.times)
    finally:
        for process in load:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
