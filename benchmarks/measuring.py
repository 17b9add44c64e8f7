"""How a figure is taken: contenders in turn, CPU seconds of all processes, medians and spread."""

import math
import os
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

__all__ = [
    "Sample",
    "Subject",
    "Summary",
    "cpu_seconds",
    "in_turn",
    "machine",
    "paired_ratio",
    "quantile",
    "samples_in_turn",
    "summarize",
]

_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Sample:
    """One measured run.

    Attributes:
        wall: Seconds from the first process's start of the run to the last one's end.
        cpu: User and system seconds, by group of processes ("servers", "workers").
        others: Cores that processes of nobody in this run used meanwhile.
        report: What the workers said of the run.
    """

    wall: float
    cpu: dict[str, float]
    others: float
    report: list[dict[str, Any]] = field(default_factory=list)

    @property
    def total(self) -> float:
        """CPU seconds of all processes."""
        return sum(self.cpu.values())


@dataclass(frozen=True)
class Summary:
    """Medians of several samples, and how far they lie apart: (largest - smallest) / median."""

    runs: int
    wall: float
    wall_spread: float
    cpu: float
    cpu_spread: float
    parts: dict[str, float]
    others: float

    @property
    def noise(self) -> dict[str, float]:
        """The columns of a report that say how far its figures can be trusted."""
        return {
            "CPU spread": self.cpu_spread,
            "wall spread": self.wall_spread,
            "others' cores": self.others,
            "runs": self.runs,
        }


class Subject(Protocol):
    """A contender whose processes are up and wait."""

    name: str

    def processes(self) -> dict[str, list[int]]:
        """Process ids by group."""

    def run(self, steps: int) -> list[dict[str, Any]]:
        """Have every worker make `steps` steps; return when all are done."""


def in_turn(subjects: Sequence[Subject], *, warm: int, steps: int, runs: int) -> dict[str, Summary]:
    """Measure every subject `runs` times, one after the other, round by round."""
    samples = samples_in_turn(subjects, warm=warm, steps=steps, runs=runs)
    return {name: summarize(taken) for name, taken in samples.items()}


def samples_in_turn(
    subjects: Sequence[Subject], *, warm: int, steps: int, runs: int
) -> dict[str, list[Sample]]:
    """The samples themselves, by the subject's name. Every second round goes the other way round."""
    for subject in subjects:
        subject.run(warm)
    samples: dict[str, list[Sample]] = {subject.name: [] for subject in subjects}
    for number in range(runs):
        for subject in subjects[:: -1 if number % 2 else 1]:
            samples[subject.name].append(_measure(subject, steps))
    return samples


def paired_ratio(of: Sequence[Sample], to: Sequence[Sample]) -> tuple[float, float, float]:
    """The median ratio of the CPU of two subjects in the same round, and the bounds of its 95 % interval.

    Rounds lie close together in time, so what else the machine does cancels out in most ratios. The
    bounds are order statistics (Hahn and Meeker, Statistical Intervals, 1991, chapter 5).
    """
    ratios = sorted(one.total / other.total for one, other in zip(of, to, strict=True))
    out = max(math.floor((len(ratios) - 1.96 * math.sqrt(len(ratios))) / 2), 0)
    return statistics.median(ratios), ratios[out], ratios[-1 - out]


def summarize(samples: Sequence[Sample]) -> Summary:
    """Medians and spread."""
    walls, cpus = [s.wall for s in samples], [s.total for s in samples]
    parts = {group: statistics.median(s.cpu[group] for s in samples) for group in samples[0].cpu}
    return Summary(
        len(samples),
        statistics.median(walls),
        _spread(walls),
        statistics.median(cpus),
        _spread(cpus),
        parts,
        statistics.median(s.others for s in samples),
    )


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time of live processes, all threads, to the nanosecond."""
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    with open("/proc/cpuinfo", encoding="ascii") as file:
        model = next((line.split(":")[1].strip() for line in file if "model name" in line), "?")
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "time": time.strftime("%Y-%m-%d %H:%M"),
    }


def _measure(subject: Subject, steps: int) -> Sample:
    groups = subject.processes()
    before = {group: cpu_seconds(pids) for group, pids in groups.items()}
    busy, start = _busy(), time.perf_counter()
    report = subject.run(steps)
    wall = time.perf_counter() - start
    cpu = {group: cpu_seconds(pids) - before[group] for group, pids in groups.items()}
    others = max(_busy() - busy - sum(cpu.values()), 0.0) / wall
    return Sample(wall, cpu, others, report)


def _busy() -> float:
    """Seconds that all cores together have worked since the machine started."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, irq, soft = map(int, file.readline().split()[1:8])
    return (user + nice + system + irq + soft) / _TICK


def _spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)


def quantile(histograms: Iterable[Mapping[int, int]], fraction: float) -> int | None:
    """Return the staleness that this fraction of all pushes did not exceed, or None without pushes."""
    total: dict[int, int] = {}
    for histogram in histograms:
        for staleness, count in histogram.items():
            total[staleness] = total.get(staleness, 0) + count
    remaining = fraction * sum(total.values())
    for staleness in sorted(total):
        remaining -= total[staleness]
        if remaining <= 0:
            return staleness
    return None
