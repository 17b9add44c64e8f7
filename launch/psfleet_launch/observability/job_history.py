"""Events of a job, in words too, and its figures over time: the file `history.jsonl` beside its logs.

The launcher appends a line for each event and each frame of figures, so that a job whose launcher is
killed has its history too. The file stays small: when it has many frames, all but the newest are thinned
out evenly over time; of the events the newest are kept. docs/formats.md describes the lines.
"""

import contextlib
import json
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from psfleet.core.base.errors import FrameError
from psfleet.core.base.files import let_appear, read_small
from psfleet.core.base.json_documents import Format, Misfit, exact, reading
from psfleet.core.base.logs import FIRST_NONFINITE
from psfleet.core.base.observability.panels import number_text
from psfleet_launch.job.job_folder import HISTORY
from psfleet_launch.job.job_plan import Job, Member
from psfleet_launch.observability.fleet_reader import panel_texts, thinned
from psfleet_launch.supervision.job_events import (
    Action,
    Event,
    FinishJob,
    KillHung,
    ProcessExited,
    ReportHung,
    Said,
    ServerReady,
    ServersMoved,
    Shown,
    StartProcesses,
    StopRequested,
)
from psfleet_launch.supervision.standbys import PromoteStandby

_FORMAT = Format("job history")
_HEADING = {
    "job": str,
    "psfleet": str,
    "engine": str,
    "script": str,
    "settings": dict,
    "machines": dict,
    "began": float,
    "panels": list,
}
_EVENT = {"at": float, "kind": str, "member": str, "code": int | None, "text": str}
_FRAME = {"at": float, "panels": list}
_DROPPED = {"events": int}

_MOST_FRAMES = 600
_NEWEST = 150  # frames that are never thinned out: 5 minutes
_MOST_EVENTS = 4000
_MOST_BYTES = 16 << 20
_READABLE = 2 * _MOST_BYTES


_MARKS = {
    "ended": "death",
    "hung": "death",
    "started": "restart",
    "takeover": "takeover",
    "ready": "takeover",
    "stop": "death",
    "said": "death",
}
_MOST_MARKS = 400


@dataclass(frozen=True)
class JobEvent:
    """Something that has happened.

    Attributes:
        at: Seconds since the epoch.
        kind: `started`, `ready`, `ended`, `hung`, `takeover`, `moved`, `stop`, `said` or `finished`.
        member: Whom it is about; empty: the job.
        code: With which a process or the job has ended, as in subprocess.
        text: Machine of a start; previous primary of a takeover; else a cause or a sentence for people.
    """

    at: float
    kind: str
    member: str = ""
    code: int | None = None
    text: str = ""

    def document(self) -> dict[str, Any]:
        """Return the event in the form in which it is written."""
        return {
            "at": self.at,
            "kind": self.kind,
            "member": self.member,
            "code": self.code,
            "text": self.text,
        }


def heading(job: Job, engine: str, version: str, machines: Mapping[str, Sequence[Member]]) -> Any:
    """The fields of the first line."""
    request = job.request
    settings = {
        "servers": request.servers,
        "workers": request.workers,
        "replicas": request.replicas,
        "durability": request.durability,
        "network": "unix sockets" if request.port is None else "TCP" if request.insecure else "TLS",
        "strategy": {part: dict(values) for part, values in request.strategy.items()},
    }
    return {
        "job": job.name,
        "psfleet": version,
        "engine": engine,
        "script": request.script,
        "settings": settings,
        "machines": {name: list(map(str, members)) for name, members in machines.items()},
        "began": time.time(),
        "panels": panel_texts(),
    }


@dataclass
class PastJob:
    """The history of a job, as far as it is written.

    Attributes:
        frames: Answers to the panels' questions, oldest first.
        dropped: Events that the history was too small for.
    """

    heading: dict[str, Any]
    events: list[JobEvent] = field(default_factory=list)
    frames: list[dict[str, Any]] = field(default_factory=list)
    dropped: int = 0

    @property
    def code(self) -> int | None:
        """The job's exit code; None: no end is recorded."""
        return next((one.code for one in reversed(self.events) if one.kind == "finished"), None)

    @property
    def servers(self) -> int:
        """Number of servers that the job has now; those that are being added do not count."""
        moves = [int(one.text.split()[0]) for one in self.events if one.kind == "moved"]
        return moves[-1] if moves else int(self.heading["settings"]["servers"])

    def last(self, title: str) -> dict[str, float | None]:
        """The last known values of a panel by series; empty: there are none, or no such panel."""
        figures: dict[str, float | None] = {}
        for series in self.panel(title):
            figures |= series
        return figures

    def usual(self, title: str) -> dict[str, float]:
        """The medians of a panel's values while there was something to measure, by series."""
        values: dict[str, list[float]] = {}
        for series in self.panel(title):
            for name, value in series.items():
                if value:
                    values.setdefault(name, []).append(value)
        return {name: statistics.median(each) for name, each in values.items()}

    def newest(self, title: str) -> dict[str, float | None]:
        """The values of a panel in the last frame."""
        return (self.panel(title) or [{}])[-1]

    def panel(self, title: str) -> list[dict[str, float | None]]:
        """The answers to a panel's question in each frame."""
        for n, one in enumerate(self.heading["panels"]):
            if one["title"] == title:
                return [frame["panels"][n] for frame in self.frames]
        return []


class JobHistory:
    """Writes the history of one job. Any thread may call.

    A disk that is full ends the history, not the job.

    Args:
        fields: Fields of the first line, see `heading`.
        epoch: Seconds from 1970 to the beginning of the monotonic clock; by default of this process's.
        host: Returns the machine of a process that has been started.
    """

    def __init__(
        self,
        folder: Path,
        fields: Mapping[str, Any],
        epoch: float | None = None,
        host: Callable[[Member], str] = lambda member: "",
    ) -> None:
        self._path = folder / HISTORY
        self._lock = threading.Lock()
        self._frames = self._events = self._bytes = self._dropped = 0
        self._epoch = time.time() - time.monotonic() if epoch is None else epoch
        self._heading = dict(fields)
        self._host = host
        self._recent: deque[JobEvent] = deque(maxlen=_MOST_EVENTS)
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._replace([_line(_FORMAT.document(**fields))])

    def take(self, item: Event | Shown | Action, now: float) -> None:
        """Something has happened or is done, at this time of the monotonic clock."""
        for event in self._events_of(item, self._epoch + now):
            with self._lock:
                self._recent.append(event)
            self._append("event", event.document())

    def add_frame(self, frame: Mapping[str, Any]) -> None:
        """Keep the answers to all panels' questions, as the recorder has them."""
        self._append("frame", {"at": frame["at"], "panels": list(map(_short, frame["panels"]))})

    def so_far(self, frames: Sequence[dict[str, Any]]) -> PastJob:
        """The job until now, with these frames, whatever the disk has of it."""
        with self._lock:
            events = list(self._recent)
        return PastJob(self._heading, events, list(frames))

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._end()

    def _events_of(self, item: Event | Shown | Action, at: float) -> Iterable[JobEvent]:
        match item:
            case StartProcesses(members):
                for member in members:
                    yield JobEvent(at, "started", str(member), text=self._host(member))
            case ServerReady(member, endpoint):
                yield JobEvent(at, "ready", str(member), text=endpoint)
            case ProcessExited(member, code):
                yield JobEvent(at, "ended", str(member), code, item.cause)
            case ReportHung(member, seconds) | KillHung(member, seconds):
                ending = " and is killed" if isinstance(item, KillHung) else ""
                yield JobEvent(at, "hung", str(member), text=f"silent for {seconds:g} s{ending}")
            case PromoteStandby(member, before):
                yield JobEvent(at, "takeover", str(member), text=str(before))
            case ServersMoved(servers):
                noun = "server" if servers == 1 else "servers"
                yield JobEvent(at, "moved", text=f"{servers} {noun} from now on")
            case StopRequested(number):
                yield JobEvent(at, "stop", text=f"signal {number}")
            case Said(member, text):
                yield JobEvent(at, "said", str(member or ""), text=text)
            case FinishJob(code):
                yield JobEvent(at, "finished", code=code)

    def _append(self, kind: str, content: Mapping[str, Any]) -> None:
        line = _line({kind: content})
        with self._lock:
            if self._file is None:
                return
            try:
                if os.write(self._file, line) < len(line):
                    self._end()  # nothing may follow half a line
                    return
                self._bytes += len(line)
                self._frames += kind == "frame"
                self._events += kind == "event"
                self._bound()
            except OSError:
                self._end()

    def _end(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _bound(self) -> None:
        """Make the file smaller if it is large."""
        if (
            self._frames <= _MOST_FRAMES
            and self._events <= _MOST_EVENTS
            and self._bytes <= _MOST_BYTES
        ):
            return
        first, *lines = self._path.read_bytes().splitlines(keepends=True)
        documents = [json.loads(line) for line in lines]
        frames = [n for n, one in enumerate(documents) if "frame" in one]
        events = [n for n, one in enumerate(documents) if "event" in one]
        most = min(len(frames), _MOST_FRAMES) // 2
        times = [documents[n]["frame"]["at"] for n in frames]
        lasting = {frames[n] for n in thinned(times, most, min(_NEWEST, most // 2))}
        lasting.update(events[-_MOST_EVENTS // 2 :])
        self._dropped += max(len(events) - _MOST_EVENTS // 2, 0)
        tally = [_line({"dropped": {"events": self._dropped}})] if self._dropped else []
        self._replace([first, *tally, *(line for n, line in enumerate(lines) if n in lasting)])
        self._frames, self._events = most, min(len(events), _MOST_EVENTS // 2)

    def _replace(self, lines: Sequence[bytes]) -> None:
        """Let a file of these lines take the place of the present one."""
        let_appear(self._path, lambda draft: draft.write_bytes(b"".join(lines)))
        if self._file is not None:
            os.close(self._file)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._bytes = sum(map(len, lines))


def _short(series: Mapping[str, float | None]) -> dict[str, float | None]:
    """Nine digits are enough for a curve."""
    return {
        name: None if value is None else float(f"{value:.9g}") for name, value in series.items()
    }


def _line(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def read_history(folder: Path) -> PastJob:
    """The history of the job with these logs.

    Raises:
        FileNotFoundError: It has none.
        FrameError: It is damaged or of another version.
    """
    with reading(folder / HISTORY, FrameError):
        content = read_small(folder / HISTORY, _READABLE)
        # The launcher may be writing the last line, or was killed while it did.
        first, *lines = content[: content.rfind(b"\n") + 1].splitlines() or [b""]
        values = exact(_FORMAT.parse(first), "heading", **_HEADING)
        job = PastJob(dict(zip(_HEADING, values, strict=True)))
        for line in lines:
            _add(job, json.loads(line))
    return job


def _add(job: PastJob, document: Any) -> None:
    kind, content = (
        next(iter(document.items())) if isinstance(document, dict) and document else ("", None)
    )
    if kind == "event":
        job.events.append(JobEvent(*exact(content, kind, **_EVENT)))
    elif kind == "frame":
        at, panels = exact(content, kind, **_FRAME)
        if len(panels) != len(job.heading["panels"]):
            raise Misfit(f"has a frame of {len(panels)} panels")
        job.frames.append({"at": at, "panels": panels})
    elif kind == "dropped":
        [job.dropped] = exact(content, kind, **_DROPPED)
    else:
        raise Misfit(f"has the line {document!r:.60}, which is none of its kinds")


def state(job: PastJob, is_running: bool) -> str:
    """Return in a sentence whether the job is over, how, and when it ran."""
    seconds, began = lasted(job), job.heading["began"]
    span, (day, since), (last_day, until) = (
        number_text(seconds, "s"),
        moment(began).split(" ", 1),
        moment(began + seconds).split(" ", 1),
    )
    if is_running and job.code is None:
        return f"Running for {span} (since {since if day == last_day else f'{day} {since}'})"
    until = until if day == last_day else f"{last_day} {until}"
    when = f"{day}, {since.rpartition(' ')[0]} to {until}"
    if job.code is None:
        return f"No end is recorded: its launcher was killed after {span} ({when})"
    return f"Ended with exit code {job.code} after {span} ({when})"


def lasted(job: PastJob) -> float:
    """Seconds from its begin until the last that is known of it."""
    began = job.heading["began"]
    times = [*(one.at for one in job.events), *(one["at"] for one in job.frames[-1:])]
    return float(max([began, *times]) - began)


def incidents(job: PastJob) -> Iterator[tuple[JobEvent, str]]:
    """Deaths, silences, takeovers, restarts and the first NaN, in order, each with a description."""
    ends: dict[str, float] = {}
    heirs: dict[str, tuple[str, float]] = {}  # by standby whose place it takes, and since when
    for one in job.events:
        match one.kind:
            case "ended":
                ends[one.member] = one.at
                if one.code:
                    yield one, f"ended with {exit_words(one.code, one.text)}"
            case "hung":
                yield one, one.text
            case "takeover":
                heirs[one.member] = one.text, ends.get(one.text, one.at)
                yield one, f"takes over from {one.text}"
            case "ready" if one.member in heirs:
                before, since = heirs.pop(one.member)
                yield (
                    one,
                    f"has the place of {before} {number_text(one.at - since, 's')} after its end",
                )
            case "started" if one.member in ends:
                yield one, "is started again"
            case "said" if one.text.startswith(FIRST_NONFINITE):
                who, _, what = one.text.removeprefix(FIRST_NONFINITE).partition(", ")
                yield replace(one, member=who), f"{FIRST_NONFINITE}{what}"
            case "stop":
                yield one, f"the job is asked to end by {one.text}"


def exit_words(code: int, cause: str = "") -> str:
    """`signal 9` or `exit code 1`, with the cause if it is known."""
    words = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"{words}: {cause}" if cause else words


def moment(at: float) -> str:
    """Date and time of day, here, and the name of the time zone."""
    return datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def zone(at: float) -> tuple[float, str]:
    """Seconds by which the clock here is ahead of UTC, and the name of the time zone."""
    here = datetime.fromtimestamp(at).astimezone()
    return (here.utcoffset() or timedelta()).total_seconds(), here.strftime("%Z")


def clock(at: float) -> str:
    """The time of day, here."""
    return datetime.fromtimestamp(at).strftime("%H:%M:%S.%f")[:-5]


def marks(job: PastJob) -> list[tuple[float, str, str]]:
    """Time, kind and text of each line in the charts: deaths, restarts, takeovers, moves and snapshots."""
    found = [
        (one.at, _MARKS[one.kind], f"{one.member or 'job'}: {text}") for one, text in incidents(job)
    ]
    found += [(one.at, "move", one.text) for one in job.events if one.kind == "moved"]
    last = -1.0
    for frame, series in zip(job.frames, job.panel("Age of the last snapshot"), strict=False):
        age = series.get("")
        if age is not None and (at := frame["at"] - age) > last + 0.01:  # a clock is no exact one
            last = at
            found.append((round(at, 3), "snapshot", "snapshot"))
    return sorted(found)[-_MOST_MARKS:]
