"""Runs a job under chaos for a stated time and looks for leaks: python tools/soak.py MINUTES [SEED].

While `psfleet-launch --chaos` runs, /proc is read once a second: memory (RSS), file descriptors and
threads of the launcher and of every process of the job. At the end: of each process that has lived for a
minute, what it had after a third of its life and in the last tenth; what the launcher's report says; and
processes and shared memory that were left behind. Exit code 1 if anything grows or is left.
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
_LATE = 900.0  # seconds after its time until the job is asked to end; it tells its promises first
_EPOCHS = 10  # a second: more than two workers can do, who rest 10 ms at each of their 40 steps
_LONG = 60  # samples of a process whose trend counts
_PAGE = os.sysconf("SC_PAGE_SIZE")
_GROWTH = {"memory": 8 << 20, "descriptors": 4, "threads": 2}
"""By how many bytes or pieces a process may grow from a third of its life on."""


@dataclass
class Life:
    """What one process had, second by second."""

    name: str
    memory: list[int] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def look(self, pid: int) -> None:
        """Read it from /proc."""
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        threads = len(os.listdir(f"/proc/{pid}/task"))
        self.memory.append(pages * _PAGE)
        self.descriptors.append(descriptors)
        self.threads.append(threads)

    def grown(self) -> list[str]:
        """In words: what has grown, of a long life."""
        found = []
        for what, more in _GROWTH.items():
            early, late = self.early_and_late(what)
            if late > early + more:
                found.append(f"{self.name}: {what} {early:,.0f} -> {late:,.0f}")
        return found

    def early_and_late(self, what: str) -> tuple[float, float]:
        """Medians around a third of the life, and of its last tenth."""
        series = getattr(self, what)
        count = len(series)
        tenth = max(count // 10, 1)
        return (
            statistics.median(series[count // 3 : count // 3 + tenth]),
            statistics.median(series[-tenth:]),
        )


def members(launcher: int) -> dict[int, str]:
    """The launcher and its children, by role."""
    found = {launcher: "launcher"}
    listed = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for pid in map(int, listed):
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        said = dict(word.decode(errors="replace").split("=", 1) for word in words if b"=" in word)
        role = said.get("PSFLEET_ROLE", "guard")
        found[pid] = f"{role} {said.get('PSFLEET_RANK', '')}".strip()
    return found


def watch(job: "subprocess.Popen[bytes]", until: float) -> dict[int, Life]:
    """Look at the processes while workers train, until the job ends; it is asked to end at `until`.

    Before and after, the launcher reads logs and does other things that are not the job.
    """
    incarnations: dict[int, Life] = {}
    while job.poll() is None:
        if time.monotonic() > until:
            job.send_signal(signal.SIGTERM)
            until = float("inf")
        try:
            found = members(job.pid)
            if not any(name.startswith("worker") for name in found.values()):
                continue
            for pid, name in found.items():
                incarnation = incarnations.setdefault(pid, Life(name))
                incarnation.name = name  # a process that has only just been forked has none
                incarnation.look(pid)
        except OSError:  # a process has ended meanwhile
            continue
        finally:
            time.sleep(_EVERY)
    return incarnations


def shared_memory() -> set[str]:
    """Names of psfleet's shared memory."""
    return {path.name for path in Path("/dev/shm").iterdir() if "psfleet" in path.name}


def main(minutes: float, seed: int) -> int:
    """Run, and say what was found."""
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
        # The script ends by itself, so that the promises can be told; that it does is one of them.
        environment = {**os.environ, "SOAK_UNTIL": str(time.time() + minutes * 60)}
        epochs = str(round(minutes * 60 * _EPOCHS))
        job = subprocess.Popen([*command, str(_TRAINER), "async", epochs], env=environment)
        incarnations = watch(job, time.monotonic() + minutes * 60 + _LATE)
        report = json.loads(Path(folder, "soak", "chaos.json").read_text())
    return tell(incarnations, report, shared_memory() - before, job.returncode)


def tell(
    incarnations: dict[int, Life], report: dict[str, object], left: set[str], code: int
) -> int:
    """Print the figures; the exit code."""
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
