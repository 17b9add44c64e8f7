"""Runs a job under chaos for a given time and looks for leaks: python tools/soak.py MINUTES [SEED].

While `psfleet-launch --chaos` injects faults, this tool reads /proc once a second: resident memory, file
descriptors and threads of the launcher and of every process of the job.

At the end it prints, for each process that lived a minute or longer, the figures after a third of its life
and in its last tenth, then the number of faults, and the shared memory left behind. The exit code is 1 if
anything has grown or is left, or the job failed.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

_TRAINER = Path(__file__).parents[1] / "tests" / "chaos" / "scripts" / "trainer.py"
_EVERY = 1.0
_PACE = 45  # seconds between two faults: servers live a few minutes, long enough for a trend
_LATE = 900.0  # seconds that the job gets to end and to check its guarantees, before a SIGTERM
_EPOCHS = 10  # per second: more than two workers reach, whose 40 steps each pause for 10 ms
_LONG = 60  # samples that a process needs, so that its growth is judged
_PAGE = os.sysconf("SC_PAGE_SIZE")
_GROWTH = {"memory": 8 << 20, "descriptors": 4, "threads": 2}
"""Allowed growth of a process after the first third of its life: bytes of memory, or a count."""


@dataclass
class Life:
    """Resources of one process, sampled once a second."""

    name: str
    memory: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def look(self, pid: int) -> None:
        """Take one sample of the process from /proc."""
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        threads = len(os.listdir(f"/proc/{pid}/task"))
        self.memory.append(pages * _PAGE)
        self.descriptors.append(descriptors)
        self.threads.append(threads)

    def grown(self) -> list[str]:
        """Return a line for each resource that has grown by more than `_GROWTH` allows."""
        grown = []
        for resource, allowed in _GROWTH.items():
            early, late = self.early_and_late(resource)
            if late > early + allowed:
                grown.append(f"{self.name}: {resource} {early:,.0f} -> {late:,.0f}")
        return grown

    def early_and_late(self, resource: str) -> tuple[float, float]:
        """Return the median of a resource after a third of the samples, and the median of the last tenth."""
        series = getattr(self, resource)
        count = len(series)
        tenth = max(count // 10, 1)
        return (
            statistics.median(series[count // 3 : count // 3 + tenth]),
            statistics.median(series[-tenth:]),
        )


def members(launcher: int) -> dict[int, str]:
    """Return role and rank of the launcher and of its child processes, by process id."""
    roles = {launcher: "launcher"}
    listed = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for pid in map(int, listed):
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        variables = dict(
            word.decode(errors="replace").split("=", 1) for word in words if b"=" in word
        )
        role = variables.get("PSFLEET_ROLE", "guard")
        roles[pid] = f"{role} {variables.get('PSFLEET_RANK', '')}".strip()
    return roles


def watch(job: "subprocess.Popen[bytes]", until: float) -> dict[int, Life]:
    """Sample the processes until the job ends. At the time `until` the job is asked to end.

    Only times with a running worker are sampled: before and after, the launcher reads logs and does other
    work that is no part of the training.
    """
    incarnations: dict[int, Life] = {}
    while job.poll() is None:
        if time.monotonic() > until:
            job.send_signal(signal.SIGTERM)
            until = float("inf")
        try:
            roles = members(job.pid)
            if not any(name.startswith("worker") for name in roles.values()):
                continue
            for pid, name in roles.items():
                incarnation = incarnations.setdefault(pid, Life(name))
                incarnation.name = name  # a process that has only just been forked has none
                incarnation.look(pid)
        except OSError:  # a process has ended meanwhile
            continue
        finally:
            time.sleep(_EVERY)
    return incarnations


def shared_memory() -> set[str]:
    """Return the names of psfleet's segments of shared memory."""
    return {path.name for path in Path("/dev/shm").iterdir() if "psfleet" in path.name}


def main(minutes: float, seed: int) -> int:
    """Run the job and print the findings. Returns the exit code."""
    before = shared_memory()
    with tempfile.TemporaryDirectory(prefix="psfleet-soak-") as folder:
        command = [sys.executable, "-m", "psfleet_launch", "--servers", "2", "--workers", "2"]
        command += ["--durability", "log", "--snapshot-every", "20s", "--chaos", str(seed)]
        command += [
            "--chaos-pace",
            str(_PACE),
            "--no-progress",
            "--log-dir",
            folder,
            "--job",
            "soak",
        ]
        # The trainer ends by itself at this time: the launcher's report checks that, too.
        environment = {**os.environ, "SOAK_UNTIL": str(time.time() + minutes * 60)}
        epochs = str(round(minutes * 60 * _EPOCHS))
        job = subprocess.Popen([*command, str(_TRAINER), "async", epochs], env=environment)
        incarnations = watch(job, time.monotonic() + minutes * 60 + _LATE)
        report = json.loads(Path(folder, "soak", "chaos.json").read_text())
    return tell(incarnations, report, shared_memory() - before, job.returncode)


def tell(
    incarnations: dict[int, Life], report: dict[str, object], left: set[str], code: int
) -> int:
    """Print the figures. Returns the exit code: 1 if something has grown or was left, or the job failed."""
    by_name: dict[str, list[Life]] = defaultdict(list)
    for incarnation in incarnations.values():
        by_name[incarnation.name].append(incarnation)
    wrong = [f"shared memory {name}" for name in sorted(left)]
    for name, every in sorted(by_name.items()):
        long = [incarnation for incarnation in every if len(incarnation.memory) >= _LONG]
        wrong += [text for incarnation in long for text in incarnation.grown()]
        for incarnation in long:
            (early, late), fds, threads = map(
                incarnation.early_and_late, ("memory", "descriptors", "threads")
            )
            print(
                f"{name}: {len(incarnation.memory)} s, memory {early / 2**20:.1f} -> {late / 2**20:.1f} MiB, "
                f"descriptors {fds[0]:.0f} -> {fds[1]:.0f}, threads {threads[0]:.0f} -> {threads[1]:.0f}"
            )
        print(f"{name}: {len(every)} processes, {len(long)} of a minute or more")
    print(f"faults: {len(report['faults'])}; exit code {code}")  # type: ignore[arg-type]  # a list
    print("grown or left: " + ("; ".join(wrong) or "nothing"))
    return 1 if wrong or code else 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1))
