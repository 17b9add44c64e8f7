"""State of a job after its events so far: its processes, its faults, and how often each process has died.

`Timeline.add` adds the events of a job one by one. The launcher calls it while the job runs, and
`read_history` calls it with the events of a file. So metrics, page, report and `psfleet top` always show
the same numbers.
"""

from collections import Counter, deque
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from psfleet.core.base.logs import FIRST_NONFINITE
from psfleet.core.base.panels.panel import number_text

_MOST_FAULTS = 4000
Who = tuple[str, str]
"""Role and rank of a process, such as ("worker", "1"), as in the labels of its metrics."""


@dataclass(frozen=True)
class JobEvent:
    """An event of a job, as a line of its history.

    Attributes:
        at: Time, in seconds since the epoch.
        kind: `started`, `ready`, `ended`, `hung`, `takeover`, `moved`, `stop`, `said` or `finished`.
        member: Process that the event is about, or "" for the whole job.
        code: Exit code of a process or of the job, as in subprocess.
        text: For `started` the machine, for `takeover` the previous primary, otherwise a cause or a sentence.
    """

    at: float
    kind: str
    member: str = ""
    code: int | None = None
    text: str = ""

    def document(self) -> dict[str, Any]:
        """Return the event as JSON."""
        return dict(vars(self))


@dataclass(frozen=True)
class Process:
    """State of a process of a job, according to the events so far.

    Attributes:
        series: Name of the process in the figures. A standby that has taken over has the name of its server.
        started: Time of the last start, in seconds since the epoch.
        starts: Number of starts.
        machine: Machine of the last start, or "" if unknown.
        code: Exit code, or None while the process is running.
        cause: Cause of the end, or "" if it is not known.
        replaces: Primary that this process has replaced in a takeover, or "" if there was none.
    """

    name: str
    series: str
    started: float = 0.0
    starts: int = 0
    machine: str = ""
    code: int | None = None
    cause: str = ""
    replaces: str = ""


@dataclass(frozen=True)
class Fault:
    """A death, hang, takeover, restart or request to end, or the first NaN.

    Attributes:
        member: Process, or "" for the whole job.
        mark: Kind of the vertical line in the charts at this time.
        text: Description, without the name of the process.
    """

    at: float
    member: str
    mark: str
    text: str


class Timeline:
    """State of a job after the events so far.

    Attributes:
        processes: Processes by name, in the order of their starts, without servers that were replaced by a
            standby.
        faults: The last faults, oldest first.
        moves: Time and text of each change of the number of servers.
        servers: Number of servers after the last change, or None if there was no change.
        code: Exit code of the job, or None if the job has not ended.
        first_nonfinite: Message about the first NaN or infinity, or "".
        last: Time of the last event, in seconds since the epoch.
        known: Roles and ranks of all processes, in the order of their starts. Keys of the counters.
        alive: Names of the running processes.
        promotions: Number of takeovers that have begun.
        takeovers: For each rank, the number of completed takeovers, and their total seconds from the death
            of the server to the first reply of its standby.
    """

    def __init__(self) -> None:
        self.processes: dict[str, Process] = {}
        self.faults: deque[Fault] = deque(maxlen=_MOST_FAULTS)
        self.moves: list[tuple[float, str]] = []
        self.servers: int | None = None
        self.code: int | None = None
        self.first_nonfinite = ""
        self.last = 0.0
        self.known: dict[Who, None] = {}
        self.alive: set[str] = set()
        self.deaths: Counter[Who] = Counter()
        self.restarts: Counter[Who] = Counter()
        self.silences: Counter[Who] = Counter()
        self.promotions = 0
        self.takeovers: dict[str, tuple[int, float]] = {}
        self._ends: dict[str, float] = {}
        self._heirs: dict[
            str, tuple[str, float]
        ] = {}  # for each standby that takes over: its server, and the time of its death
        self._leaders: dict[
            str, str
        ] = {}  # standbys that took over, with the names of their series

    def __copy__(self) -> "Timeline":
        """Return a copy that later events do not change."""
        twin = Timeline()
        vars(twin).update({name: copy(value) for name, value in vars(self).items()})
        return twin

    def who(self, member: str) -> Who:
        """Return role and rank of a process. A standby that has taken over has the role "server"."""
        role, rank = self._series(member).split()
        return role, rank

    def add(self, event: JobEvent) -> None:
        """Add the next event."""
        self.last = max(self.last, event.at)
        member, text = event.member, event.text
        match event.kind:
            case "started":
                self._start(event)
            case "ended":
                self._end(event)
            case "hung":
                self.silences[self.who(member)] += 1
                self._add_fault(event, "death", text)
            case "takeover":
                self._promote(event)
            case "ready" if member in self._heirs:
                before, died = self._heirs.pop(member)
                rank, seconds = self.who(member)[1], event.at - died
                count, total = self.takeovers.get(rank, (0, 0.0))
                self.takeovers[rank] = count + 1, total + seconds
                words = f"has the place of {before} {number_text(seconds, 's')} after its end"
                self._add_fault(event, "takeover", words)
            case "moved":
                self.servers = int(text.split()[0])
                self.moves.append((event.at, text))
            case "said" if text.startswith(FIRST_NONFINITE):
                sentence = text.removeprefix(FIRST_NONFINITE)
                self.first_nonfinite = self.first_nonfinite or sentence
                worker, _, cause = sentence.partition(", ")
                said_of = replace(event, member=worker)
                self._add_fault(said_of, "death", f"{FIRST_NONFINITE}{cause}")
            case "stop":
                self._add_fault(event, "death", f"the job is asked to end by {text}")
            case "finished":
                self.code = event.code

    def _start(self, event: JobEvent) -> None:
        member = event.member
        if member in self._ends:
            self.restarts[self.who(member)] += 1
            self._add_fault(event, "restart", "is started again")
        self.known[self.who(member)] = None
        self.alive.add(member)
        starts = self.processes[member].starts if member in self.processes else 0
        self.processes[member] = Process(
            member, self._series(member), event.at, starts + 1, event.text
        )

    def _end(self, event: JobEvent) -> None:
        member, code = event.member, event.code
        self.alive.discard(member)
        self._ends[member] = event.at
        if member in self.processes:
            self.processes[member] = replace(
                self.processes[member], code=code or 0, cause=event.text
            )
        if code:
            self.deaths[self.who(member)] += 1
            self._add_fault(event, "death", f"ended with {exit_words(code, event.text)}")

    def _promote(self, event: JobEvent) -> None:
        member, before = event.member, event.text
        self.promotions += 1
        self._heirs[member] = before, self._ends.get(before, event.at)
        self._leaders[member] = series = self._series(before.partition(" copy")[0])
        if member in self.processes:
            self.processes.pop(before, None)
            self.processes[member] = replace(self.processes[member], series=series, replaces=before)
        self._add_fault(event, "takeover", f"takes over from {before}")

    def _add_fault(self, event: JobEvent, mark: str, text: str) -> None:
        self.faults.append(Fault(event.at, event.member, mark, text))

    def _series(self, member: str) -> str:
        """Return the name of a process in the figures, such as `worker 1` for `worker 1 stage 0`."""
        role, rank, *copy_number = member.split()
        is_standby = role == "server" and copy_number
        return self._leaders.get(member, f"{'standby' if is_standby else role} {rank}")


def exit_words(code: int, cause: str = "") -> str:
    """Return an exit code in words, `signal 9` or `exit code 1`, with the cause if it is known."""
    words = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"{words}: {cause}" if cause else words
