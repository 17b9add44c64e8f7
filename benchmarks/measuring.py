"""Measures contenders in turn: CPU seconds of all processes, medians and spread.

A benchmark starts its contenders (`Subject`, usually `processes.Crew`) and calls `in_turn`. All contenders
are warmed up, and then run alternately, so that changes of the machine's load affect every contender. CPU
seconds are comparable on a busy machine; wall-clock times are not.
"""

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
    """Measured run.

    Attributes:
        wall: Seconds from the start of the first process's run to the end of the last one's.
        cpu: User and system seconds, by group of processes ("servers", "workers").
        others: Number of cores that processes outside this run used meanwhile.
        report: Results that the workers have printed for the run.
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
    """Medians of several samples, and their spread: (largest - smallest) / median."""

    runs: int
    wall: float
    wall_spread: float
    cpu: float
    cpu_spread: float
    parts: dict[str, float]
    others: float

    @property
    def noise(self) -> dict[str, float]:
        """Report columns that show how reliable the figures are."""
        return {
            "CPU spread": self.cpu_spread,
            "wall spread": self.wall_spread,
            "others' cores": self.others,
            "runs": self.runs,
        }


class Subject(Protocol):
    """A contender whose processes are started and wait."""

    name: str

    def processes(self) -> dict[str, list[int]]:
        """Return the process ids by group."""

    def run(self, steps: int) -> list[dict[str, Any]]:
        """Make every worker run `steps` steps, and return when all are done."""


def in_turn(subjects: Sequence[Subject], *, warm: int, steps: int, runs: int) -> dict[str, Summary]:
    """Measure every subject `runs` times, in alternating order, and return the summaries by name."""
    samples = samples_in_turn(subjects, warm=warm, steps=steps, runs=runs)
    return {name: summarize(subject_samples) for name, subject_samples in samples.items()}


def samples_in_turn(
    subjects: Sequence[Subject], *, warm: int, steps: int, runs: int
) -> dict[str, list[Sample]]:
    """Return the samples by the subject's name. Every second round goes in reverse order."""
    for subject in subjects:
        subject.run(warm)
    samples: dict[str, list[Sample]] = {subject.name: [] for subject in subjects}
    for number in range(runs):
        for subject in subjects[:: -1 if number % 2 else 1]:
            samples[subject.name].append(_measure(subject, steps))
    return samples


def paired_ratio(of: Sequence[Sample], to: Sequence[Sample]) -> tuple[float, float, float]:
    """Return the median ratio of two subjects' CPU times in the same round, and its 95 % confidence interval.

    Runs of a round are close together in time, so the load of other processes cancels out in most ratios. The
    bounds are order statistics (Hahn and Meeker, Statistical Intervals, 1991, chapter 5).
    """
    ratios = sorted(
        first_sample.total / second_sample.total
        for first_sample, second_sample in zip(of, to, strict=True)
    )
    out = max(math.floor((len(ratios) - 1.96 * math.sqrt(len(ratios))) / 2), 0)
    return statistics.median(ratios), ratios[out], ratios[-1 - out]


def summarize(samples: Sequence[Sample]) -> Summary:
    """Return medians and spread."""
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
    """Return user and system time of live processes, over all threads, with nanosecond resolution."""
    return sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)


def machine() -> dict[str, Any]:
    """Return a description of the machine: processor, cores, load and time."""
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
    other_cores = max(_busy() - busy - sum(cpu.values()), 0.0) / wall
    return Sample(wall, cpu, other_cores, report)


def _busy() -> float:
    """Return the seconds that all cores together have worked since the machine started."""
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
