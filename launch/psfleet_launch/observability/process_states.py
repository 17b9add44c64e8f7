"""State of each process of a job, as its history shows it: whether it runs, answers, and is slow."""

import re
import signal
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from psfleet_launch.observability.job_history import PastJob, exit_words

_STARTS = 10.0  # seconds after its start from which on a server has to answer


SLOW = 1.5
"""A process is called slow from this multiple of the median of the others on."""
_RECENT = 30  # frames in which a worker of a running job is slow: a minute


@dataclass
class ProcessState:
    """One process of a job, as its events show it.

    Attributes:
        series: Its name in the figures: of a standby that has taken over that of its server.
        mood: `good`, `warn`, `bad`; empty: it is over.
        deaths: Number of its ends with an error or by a signal.
        began: Time of its last start, in seconds since the epoch.
        is_stopped: It ended with SIGTERM.
        machine: Machine on which it was started last; empty: not known.
    """

    name: str
    series: str
    words: str = "runs"
    mood: str = "good"
    starts: int = 0
    deaths: int = 0
    began: float = 0.0
    is_stopped: bool = False
    machine: str = ""

    @property
    def rank(self) -> int:
        """Index of its server, or seat of the worker."""
        return int(self.series.split()[1])


def process_states(job: PastJob) -> list[ProcessState]:
    """Each process of the job, servers first; one whose place a standby has taken is left out."""
    states: dict[str, ProcessState] = {}
    for one in job.events:
        match one.kind:
            case "started":
                process = states.setdefault(
                    one.member, ProcessState(one.member, _series(one.member))
                )
                process.starts += 1
                process.began, process.machine = one.at, one.text
                process.mood, process.words = "good", "runs"
                if process.series.startswith("standby"):
                    process.words = f"standby of {one.member.partition(' copy')[0]}"
                if process.starts > 1:
                    process.words = f"runs, restarted {_times(process.starts - 1)}"
            case "ended" if one.member in states:
                process = states[one.member]
                process.deaths += bool(one.code)
                process.mood = "bad" if one.code else ""
                process.words = (
                    f"dead: {exit_words(one.code, one.text)}" if one.code else "finished"
                )
                process.is_stopped = one.code == -signal.SIGTERM
            case "takeover" if one.member in states:
                process = states[one.member]
                primary = states.pop(one.text, None)
                process.series = _series(one.text.partition(" copy")[0])
                process.words = f"in place of {one.text}"
                process.deaths += 0 if primary is None else primary.deaths
    for process in states.values():
        if process.is_stopped and process.mood == "bad" and job.code is not None:
            process.words, process.mood = "stopped", ""  # by the launcher, when another had failed
            process.deaths -= 1
    order = sorted(states.values(), key=lambda process: _place(process.name))
    seats = [one for one in order if one.name.startswith("worker")]
    for seat, process in enumerate(seats):
        process.series = f"worker {seat}"  # each process of a pipeline has one
    return order


def mark_silent(job: PastJob, processes: Sequence[ProcessState]) -> None:
    """Servers that run and do not answer: those that are stopped, or whose machine cannot be reached."""
    answering, decided = job.newest("Resident memory"), job.servers
    for one in processes:
        if one.mood == "good" and one.series.startswith("server") and one.rank >= decided:
            one.words = "waits for its rows"
            continue
        is_due = bool(job.frames) and job.frames[-1]["at"] - one.began > _STARTS
        is_silent = one.series.startswith("server") and one.series not in answering
        if one.mood == "good" and is_due and is_silent:
            one.words, one.mood = "does not answer", "bad"


def mark_slow(job: PastJob, is_running: bool, processes: Sequence[ProcessState]) -> None:
    """Say of a slow worker by how much; of a job that is over, over all of its time."""
    recent = replace(job, frames=job.frames[-_RECENT:]) if is_running else job
    ratios = {worker: ratio for worker, _, _, ratio in step_times(recent)}
    for one in processes:
        if one.series in ratios and ratios[one.series] >= SLOW:
            if one.mood == "good":
                one.mood = "warn"
            if one.mood == "warn" or one.words == "finished":
                one.words += f", {ratios[one.series]:.1f} times slower"


def _series(member: str) -> str:
    role, rank, *copy = member.split()
    return f"{'standby' if role == 'server' and copy else role} {rank}"


def _place(member: str) -> tuple[str, list[int]]:
    return member.partition(" ")[0], [int(number) for number in re.findall(r"\d+", member)]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def step_times(job: PastJob) -> Iterator[tuple[str, float, float, float]]:
    """Yield each worker, its step time with and without waiting, and the latter against that of the others.

    In sync mode all workers have the step time of the slowest; the time in pulls and waits of the others
    tells which one that is. The slowest comes first.
    """
    steps = _means(job.panel("Step time by worker"))
    pulls, waits = _means(job.panel("Time in pulls")), _means(job.panel("Time waiting"))
    own = {
        worker: time * max(1 - pulls.get(worker, 0.0) - waits.get(worker, 0.0), 0.0)
        for worker, time in steps.items()
    }
    for worker in sorted(own, key=lambda worker: -own[worker]):
        others = [time for other, time in own.items() if other != worker]
        usual = statistics.median(others) if others else 0.0
        yield worker, steps[worker], own[worker], own[worker] / usual if usual else 1.0


def _means(frames: Iterable[dict[str, float | None]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for frame in frames:
        for name, value in frame.items():
            if value is not None:
                values.setdefault(name, []).append(value)
    return {name: statistics.fmean(each) for name, each in values.items()}
