"""State, figures, processes and alerts of a job at one time, for the page, the report and the terminal.

`view_of` computes a `JobView` from the history of a job. `page_and_report.py` shows it in a browser and
`console/top.py` in a terminal. If a figure, a state or an alert is wrong in all of them, look for the error
here.
"""

import operator
import re
import signal
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from psfleet.core.base.panels.panel import counted, number_text, rate_text
from psfleet_launch.observability.job_history import Figures, PastJob
from psfleet_launch.observability.job_timeline import Fault, Process, exit_words

_LATEST_REPLY = 10.0  # seconds after its start in which a server need not answer
_MOST_MARKS = 400
_MINUTE = 60.0
_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {"==": operator.eq, ">": operator.gt}
_RECENT = 30  # frames in which a worker of a running job is slow: a minute

SLOW = 1.5
"""A worker is slow if its steps take at least this many times the median of the other workers' steps."""

Ask = Callable[[str], Figures]
"""Function that returns the figures of a panel, given its title."""


@dataclass(frozen=True)
class Figure:
    """A number in the overview, with a note. `mood` is `bad` to show it as an error, or empty."""

    label: str
    value: str
    note: str = ""
    mood: str = ""


@dataclass(frozen=True)
class ProcessView:
    """A process of the job, with its figures as texts.

    Attributes:
        words: State in words, such as `runs, restarted once`.
        mood: Colour of the state: `good`, `warn` or `bad`, or empty for a process that has ended regularly.
        speed: Steps per second of a worker, or pushes per second of a server.
    """

    name: str
    series: str
    words: str
    mood: str
    machine: str = ""
    speed: str = ""
    memory: str = ""
    cores: str = ""


@dataclass(frozen=True)
class FiredAlert:
    """An alert that is active now or was active.

    Attributes:
        name: Name, as in docs/alerts.yml.
        severity: `warning` or `critical`.
        title: Title of the alert's panel.
        when: Condition, such as `> 0.9`.
        series: Series of the panel, or "" if the panel has only one.
        until: Time at which the alert ended, or None while it is active.
    """

    name: str
    severity: str
    title: str
    when: str
    series: str
    since: float
    until: float | None = None


@dataclass(frozen=True)
class JobView:
    """State of a job at one time, as it is shown to users.

    Attributes:
        state: Sentence that says whether the job is over, how it has ended, and when it ran.
        badge: State in one or a few words, and its mood (`good`, `warn`, `bad` or empty).
        processes: Processes, servers first.
        alerts: Active alerts. For a job that is over, all alerts that were active.
        faults: Faults, oldest first.
        marks: Time, kind and text of each vertical line in the charts.
    """

    job: PastJob
    is_running: bool
    state: str
    badge: tuple[str, str]
    figures: Sequence[Figure]
    processes: Sequence[ProcessView]
    alerts: Sequence[FiredAlert]
    faults: Sequence[Fault]
    marks: Sequence[tuple[float, str, str]]

    @property
    def ask(self) -> Ask:
        """Function that returns the figures to show for a panel.

        For a running job these are the present values, for a job that is over the last values. Rates at the
        end are 0, so for a job that is over the median is shown instead.
        """
        return _ask(self.job, self.is_running)


def view_of(job: PastJob, is_running: bool) -> JobView:
    """Return the view of a job.

    Args:
        is_running: True if the launcher is running. A job whose history has an end is over in any case.
    """
    is_running = is_running and job.code is None  # the launcher writes the report at its end
    processes = list(_processes(job, is_running))
    alerts = [alert for alert in fired_alerts(job) if alert.until is None or not is_running]
    return JobView(
        job,
        is_running,
        state(job, is_running),
        _badge(job, is_running, processes, alerts),
        list(_figures(job, is_running)),
        processes,
        alerts,
        list(job.timeline.faults),
        _marks(job),
    )


def _ask(job: PastJob, is_running: bool) -> Ask:
    if is_running:
        return job.newest
    units = {panel["title"]: panel["unit"] for panel in job.heading["panels"]}

    def at_end(title: str) -> Figures:
        if title == "Time left":
            return {}
        # Rates are 0 at the end, so show the median.
        is_rate = units.get(title) in ("cps", "Bps") or title == "CPU cores in use"
        return job.usual(title) if is_rate else job.last(title)

    return at_end


def state(job: PastJob, is_running: bool) -> str:
    """Return a sentence that says whether the job is over, how it has ended, and when it ran."""
    seconds, began = _seconds(job), job.heading["began"]
    span, (day, since), (last_day, until) = (
        number_text(seconds, "s"),
        moment(began).split(" ", 1),
        moment(began + seconds).split(" ", 1),
    )
    if is_running and job.code is None:
        return f"Running for {span} (since {since if day == last_day else f'{day} {since}'})"
    until = until if day == last_day else f"{last_day} {until}"
    period = f"{day}, {since.rpartition(' ')[0]} to {until}"
    if job.code is None:
        return f"No end is recorded: its launcher was killed after {span} ({period})"
    return f"Ended with exit code {job.code} after {span} ({period})"


def _seconds(job: PastJob) -> float:
    began = job.heading["began"]
    last = job.frames[-1]["at"] if job.frames else began
    return float(max(began, job.timeline.last, last) - began)


def moment(at: float) -> str:
    """Return date, time of day and name of the time zone of this machine."""
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def zone(at: float) -> tuple[float, str]:
    """Return how many seconds the clock of this machine is ahead of UTC, and the name of its time zone."""
    here = datetime.fromtimestamp(at).astimezone()
    return (here.utcoffset() or timedelta()).total_seconds(), here.strftime("%Z")


def clock(at: float) -> str:
    """Return the time of day on this machine."""
    return datetime.fromtimestamp(at).strftime("%H:%M:%S.%f")[:-5]


def _badge(
    job: PastJob, is_running: bool, processes: Sequence[ProcessView], alerts: Sequence[FiredAlert]
) -> tuple[str, str]:
    if job.code is not None:
        return ("finished", "good") if job.code == 0 else ("failed", "bad")
    if not is_running:
        return "killed", "bad"
    if dead := [process.name for process in processes if process.mood == "bad"]:
        return f"runs without {', '.join(dead)}", "bad"
    if not alerts:
        slow = [process.name for process in processes if process.mood == "warn"]
        return (f"runs, {', '.join(slow)} slow", "warn") if slow else ("runs", "good")
    is_critical = any(alert.severity == "critical" for alert in alerts)
    return f"runs, {counted(len(alerts), 'alert')}", "bad" if is_critical else "warn"


def _processes(job: PastJob, is_running: bool) -> Iterator[ProcessView]:
    machines = {
        member: machine
        for machine, members in job.heading["machines"].items()
        for member in members
    }
    only = next(iter(job.heading["machines"]), "") if len(job.heading["machines"]) == 1 else ""
    ask = _ask(job, is_running)
    steps, pushes = ask("Steps per second"), ask("Pushes per second by server")
    memory, cores = ask("Resident memory"), ask("CPU cores in use")
    ratios = _slow_workers(job, is_running)
    for process in _in_order(job):
        words, mood = _state_of(job, process, is_running)
        if process.series in ratios and (mood == "good" or words == "finished"):
            words += f", {ratios[process.series]:.1f} times slower"
            mood = "warn" if mood == "good" else mood
        yield ProcessView(
            process.name,
            process.series,
            words,
            mood,
            process.machine or machines.get(process.name, only),
            _text(steps, process.series, lambda value: rate_text(value, "steps"))
            or _text(pushes, process.series, lambda value: rate_text(value, "pushes")),
            _text(memory, process.series, lambda value: number_text(value, "bytes")),
            _text(cores, process.series, lambda value: number_text(value, "short")),
        )


def _in_order(job: PastJob) -> Iterator[Process]:
    """Yield the processes of the job, servers first, each with the name that its metrics have (`series`).

    The metrics count all worker processes through, also if a worker has several (the stages of a pipeline).
    """

    def order(process: Process) -> tuple[str, list[int]]:
        numbers = [int(number) for number in re.findall(r"\d+", process.name)]
        return process.name.partition(" ")[0], numbers

    number = 0
    for process in sorted(job.timeline.processes.values(), key=order):
        is_worker = process.name.startswith("worker")
        yield replace(process, series=f"worker {number}") if is_worker else process
        number += is_worker


def _state_of(job: PastJob, process: Process, is_running: bool) -> tuple[str, str]:
    if process.code is not None:
        if process.code == 0:
            return "finished", ""
        if process.code == -signal.SIGTERM and job.code is not None:
            return "stopped", ""  # by the launcher, after another process had failed
        return f"dead: {exit_words(process.code, process.cause)}", "bad"
    if not is_running and job.code is None:
        return "its end is not recorded", ""
    if is_running and process.series.startswith("server"):
        if int(process.series.split()[1]) >= job.servers:
            return "waits for its rows", "good"
        is_due = bool(job.frames) and job.frames[-1]["at"] - process.started > _LATEST_REPLY
        if is_due and process.series not in job.newest("Resident memory"):
            return "does not answer", "bad"
    if process.replaces:
        return f"in place of {process.replaces}", "good"
    if process.starts > 1:
        times = "once" if process.starts == 2 else f"{process.starts - 1} times"
        return f"runs, restarted {times}", "good"
    if process.series.startswith("standby"):
        return f"standby of {process.name.partition(' copy')[0]}", "good"
    return "runs", "good"


def _slow_workers(job: PastJob, is_running: bool) -> dict[str, float]:
    """Return, for each slow worker, its step time divided by the median of the other workers' step times.

    For a running job only recent steps are used, for a job that is over all steps.
    """
    recent = replace(job, frames=job.frames[-_RECENT:]) if is_running else job
    return {worker: ratio for worker, _, _, ratio in step_times(recent) if ratio >= SLOW}


def step_times(job: PastJob) -> Iterator[tuple[str, float, float, float]]:
    """Yield (worker, step time, step time without waiting, ratio) for each worker, the slowest first.

    The ratio is the step time without waiting, divided by the median of the other workers. Time in pulls
    and waits is left out, because in sync mode all workers have the step time of the slowest one, and
    faster workers wait longer.
    """
    steps = _means(job.panel("Step time by worker"))
    pulls, waits = _means(job.panel("Time in pulls")), _means(job.panel("Time waiting"))
    without_waiting = {
        worker: time * max(1 - pulls.get(worker, 0.0) - waits.get(worker, 0.0), 0.0)
        for worker, time in steps.items()
    }
    for worker, seconds in sorted(without_waiting.items(), key=lambda item: -item[1]):
        other_times = [time for name, time in without_waiting.items() if name != worker]
        usual = statistics.median(other_times) if other_times else 0.0
        yield worker, steps[worker], seconds, seconds / usual if usual else 1.0


def _means(frames: Iterable[Figures]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for frame in frames:
        for name, value in frame.items():
            if value is not None:
                values.setdefault(name, []).append(value)
    return {name: statistics.fmean(known) for name, known in values.items()}


def fired_alerts(job: PastJob) -> Iterator[FiredAlert]:
    """Yield each period in which an alert was active, for all series of all panels with an alert."""
    for panel in job.heading["panels"]:
        if alert := panel.get("alert"):
            yield from _of_panel(job, panel["title"], alert)


def _of_panel(job: PastJob, title: str, alert: Mapping[str, Any]) -> Iterator[FiredAlert]:
    sign, bound = alert["when"].split()
    lasts = float(alert["lasts"].removesuffix("m")) * _MINUTE

    def fired(series: str, since: float, until: float | None = None) -> FiredAlert:
        return FiredAlert(
            alert["name"], alert["severity"], title, alert["when"], series, since, until
        )

    starts: dict[str, float] = {}
    at = 0.0
    for frame, series in zip(job.frames, job.panel(title), strict=True):
        at = frame["at"]
        true = {
            name
            for name, value in series.items()
            if value is not None and _OPERATORS[sign](value, float(bound))
        }
        for name in [*starts]:
            if name not in true and (since := starts.pop(name) + lasts) <= at:
                yield fired(name, since, at)
        for name in true:
            starts.setdefault(name, at)
    for name, since in starts.items():
        if since + lasts <= at:
            yield fired(name, since + lasts)


def _marks(job: PastJob) -> list[tuple[float, str, str]]:
    """Return time, kind and text of deaths, restarts, takeovers, moves and snapshots, for the charts."""
    marks = [
        (fault.at, fault.mark, f"{fault.member or 'job'}: {fault.text}")
        for fault in job.timeline.faults
    ]
    marks += [(at, "move", text) for at, text in job.timeline.moves]
    last = -1.0
    for frame, series in zip(job.frames, job.panel("Age of the last snapshot"), strict=False):
        age = series.get("")
        # The time of the same snapshot differs a little between two frames, because clocks are not exact.
        if age is not None and (at := frame["at"] - age) > last + 0.01:
            last = at
            marks.append((round(at, 3), "snapshot", "snapshot"))
    return sorted(marks)[-_MOST_MARKS:]


def logged(series: Figures) -> Iterator[tuple[str, str]]:
    """Yield each name that scripts have logged, and the mean of its values over the workers, as text.

    Args:
        series: Figures of the panel "Logged values", by name and worker.
    """
    values: dict[str, list[float]] = {}
    for key, value in series.items():
        if value is not None:
            values.setdefault(key.rpartition(" worker ")[0], []).append(value)
    for name, by_worker in values.items():
        yield name, number_text(statistics.fmean(by_worker), "none")


def _figures(job: PastJob, is_running: bool) -> Iterator[Figure]:
    ask, timeline = job.newest if is_running else job.last, job.timeline

    def rate(title: str, total: Callable[[Iterable[float]], float]) -> str:
        values = known_values(ask(title))
        return number_text(total(values), "cps") if values and is_running else ""

    if steps := ask("Steps"):
        yield Figure("Steps", f"{sum(known_values(steps)):,.0f}", rate("Steps per second", max))
    if samples := sum(known_values(ask("Samples"))):
        yield Figure("Samples", f"{samples:,.0f}", rate("Samples per second", sum))
    if losses := ask("Loss"):
        yield _loss(losses, is_running)
    for name, text in logged(ask("Logged values")):
        yield Figure(name, text)
    left = sum(known_values(ask("Time left"))) if is_running else 0.0
    yield Figure(
        "Time", number_text(_seconds(job), "s"), f"{number_text(left, 's')} left" if left else ""
    )
    stopped = sum(process.code == -signal.SIGTERM for process in timeline.processes.values())
    deaths = timeline.deaths.total() - (stopped if job.code is not None else 0)
    recoveries = [
        counted(count, noun)
        for count, noun in (
            (timeline.restarts.total(), "restart"),
            (timeline.promotions, "takeover"),
        )
        if count
    ]
    yield Figure("Deaths", f"{deaths}", ", ".join(recoveries), "bad" if deaths else "")
    steps_with_nan = sum(known_values(ask("Steps with NaN or infinity")))
    first = timeline.first_nonfinite
    mood = "bad" if steps_with_nan or first else ""
    yield Figure("Steps with NaN", f"{steps_with_nan:,.0f}", first, mood)


def _loss(losses: Figures, is_running: bool) -> Figure:
    """Return the mean of the workers' losses. If a loss is not finite, name the workers instead."""
    label, finite = "Loss" if is_running else "Final loss", known_values(losses)
    if len(finite) < len(losses):
        nonfinite = ", ".join(name for name, value in losses.items() if value is None)
        return Figure(label, "NaN", nonfinite, "bad")
    note = f"mean of {len(finite)} workers" if len(finite) > 1 else ""
    return Figure(label, number_text(statistics.fmean(finite), "none"), note)


def known_values(figures: Figures) -> list[float]:
    """Return the values of all series that have one, without their names."""
    return [value for value in figures.values() if value is not None]


def _text(figures: Figures, series: str, words: Callable[[float], str]) -> str:
    value = figures.get(series)
    return "" if value is None else words(value)
