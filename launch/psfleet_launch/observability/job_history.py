"""History of a job: its events, and its figures over time, in the file `history.jsonl` beside the logs.

The launcher appends a line for each event and for each frame (the figures of all panels at one time). So
the history exists even if the launcher is killed. The file stays small: when there are many frames, those
older than 5 minutes are thinned out evenly, and the oldest events are dropped. docs/formats.md describes
the lines, and `job_timeline.py` interprets the events.
"""

import contextlib
import json
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from psfleet.core.base.errors import FrameError
from psfleet.core.base.files import let_appear, read_small
from psfleet.core.base.json_documents import Format, Misfit, exact, reading
from psfleet.core.base.panels.panel import counted
from psfleet_launch.job.job_folder import HISTORY
from psfleet_launch.job.job_plan import Job, Member
from psfleet_launch.observability.fleet_reader import panel_texts
from psfleet_launch.observability.job_timeline import JobEvent, Timeline
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

_EVERY = 2.0  # seconds without a frame after which a stream asks again
_MOST_FRAMES = 600
_NEWEST = 150  # frames that are never thinned out: 5 minutes
_MOST_EVENTS = 4000
_MOST_BYTES = 16 << 20
_READABLE = 2 * _MOST_BYTES

Figures = Mapping[str, float | None]
"""Values of a panel by series. None is NaN or infinity."""


def heading(job: Job, engine: str, version: str, machines: Mapping[str, Sequence[Member]]) -> Any:
    """Return the content of the first line: the job, its settings, machines and panels."""
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
    """History of a job so far, in memory. `add` adds an event.

    Attributes:
        events: Events, oldest first.
        timeline: State of the job after these events.
        frames: Frames, oldest first: a time, and for each panel a value by series.
        dropped: Number of old events that were dropped to keep the history small.
    """

    heading: dict[str, Any]
    events: deque[JobEvent] = field(default_factory=deque)
    timeline: Timeline = field(default_factory=Timeline)
    frames: list[dict[str, Any]] = field(default_factory=list)
    dropped: int = 0

    def add(self, event: JobEvent) -> None:
        """Add the next event."""
        self.events.append(event)
        self.timeline.add(event)

    @property
    def code(self) -> int | None:
        """Exit code of the job, or None if no end is recorded."""
        return self.timeline.code

    @property
    def servers(self) -> int:
        """Present number of servers, without servers that are being added."""
        return self.timeline.servers or int(self.heading["settings"]["servers"])

    def last(self, title: str) -> Figures:
        """Return the last known value of each series of a panel, or {} if there are no values."""
        figures: dict[str, float | None] = {}
        for series in self.panel(title):
            figures |= series
        return figures

    def usual(self, title: str) -> Figures:
        """Return the median of each series of a panel over all frames. Values of 0 are left out."""
        values: dict[str, list[float]] = {}
        for series in self.panel(title):
            for name, value in series.items():
                if value:
                    values.setdefault(name, []).append(value)
        return {name: statistics.median(known) for name, known in values.items()}

    def newest(self, title: str) -> Figures:
        """Return the values of a panel in the last frame."""
        return (self.panel(title) or [{}])[-1]

    def panel(self, title: str) -> list[dict[str, float | None]]:
        """Return the values of a panel in each frame."""
        for n, panel in enumerate(self.heading["panels"]):
            if panel["title"] == title:
                return [frame["panels"][n] for frame in self.frames]
        return []


class JobHistory:
    """Records the history of a running job in memory and in its file. Any thread may call the methods.

    Memory and file have the same content. When the history is shortened, the file is written again from
    memory. If the disk is full, nothing more is written to the file, and the job continues.

    Args:
        fields: Content of the first line, from `heading`.
        epoch: Time of the monotonic clock's zero, in seconds since 1970, or None for this process's clock.
        host: Function that returns the machine of a process that has been started.
    """

    def __init__(
        self,
        folder: Path,
        fields: Mapping[str, Any],
        epoch: float | None = None,
        host: Callable[[Member], str] = lambda member: "",
    ) -> None:
        self._path = folder / HISTORY
        self._changed = threading.Condition()
        self._epoch = time.time() - time.monotonic() if epoch is None else epoch
        self._host = host
        self._job = PastJob(dict(fields))
        self._frames = 0  # number of frames added so far
        self._is_over = False
        self._bytes = 0
        self._file: int | None = None
        with contextlib.suppress(OSError):
            self._rewrite()

    def take(self, item: Event | Shown | Action, now: float) -> None:
        """Record an event or an action of the job.

        Args:
            now: Its time on the monotonic clock.
        """
        for event in self._events_of(item, self._epoch + now):
            with self._changed:
                self._job.add(event)
                self._write({"event": event.document()})

    def add_frame(self, frame: Mapping[str, Any]) -> None:
        """Record a frame: a time, and for each panel a value by series."""
        with self._changed:
            self._job.frames.append(dict(frame))
            self._frames += 1
            self._write({"frame": _rounded(frame)})
            self._changed.notify_all()

    def timeline(self) -> Timeline:
        """Return a copy of the present state of the job, which later events do not change."""
        with self._changed:
            return copy(self._job.timeline)

    def so_far(self) -> PastJob:
        """Return a copy of the history so far, from memory."""
        with self._changed:
            job = self._job
            return replace(
                job, events=copy(job.events), timeline=copy(job.timeline), frames=copy(job.frames)
            )

    def follow(self) -> Iterator[list[dict[str, Any]]]:
        """Yield lists of frames: first all recorded frames, then new ones about every 2 s, until
        `end_streams`."""
        with self._changed:
            frames, count = copy(self._job.frames), self._frames
        yield frames
        is_over = False
        while not is_over:
            with self._changed:
                if self._frames == count and not self._is_over:
                    self._changed.wait(_EVERY)
                frames = self._job.frames[-new:] if (new := self._frames - count) else []
                count, is_over = self._frames, self._is_over
            yield frames

    def end_streams(self) -> None:
        """End all iterators of `follow`, after the frames recorded so far."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def close(self) -> None:
        """Close the file."""
        with self._changed:
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
                yield JobEvent(at, "moved", text=f"{counted(servers, 'server')} from now on")
            case StopRequested(number):
                yield JobEvent(at, "stop", text=f"signal {number}")
            case Said(member, text):
                yield JobEvent(at, "said", str(member or ""), text=text)
            case FinishJob(code):
                yield JobEvent(at, "finished", code=code)

    def _write(self, content: Mapping[str, Any]) -> None:
        """Append a line to the file, or write the whole file again if the history was shortened."""
        line = _line(content)
        self._bytes += len(line)
        is_shortened = self._shorten()
        if self._file is None:
            return
        try:
            if is_shortened:
                self._rewrite()
            elif os.write(self._file, line) < len(line):
                self._end()  # nothing may follow an incomplete line
        except OSError:
            self._end()

    def _end(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _shorten(self) -> bool:
        """Drop half of the frames, and the oldest events, if the history is long. Return whether this was
        done."""
        job = self._job
        is_short = len(job.frames) <= _MOST_FRAMES and len(job.events) <= _MOST_EVENTS
        if is_short and self._bytes <= _MOST_BYTES:
            return False
        frames_to_keep = min(len(job.frames), _MOST_FRAMES) // 2
        times = [frame["at"] for frame in job.frames]
        job.frames[:] = [
            job.frames[n] for n in thinned(times, frames_to_keep, min(_NEWEST, frames_to_keep // 2))
        ]
        while len(job.events) > _MOST_EVENTS // 2:
            job.events.popleft()
            job.dropped += 1
        self._bytes = 0
        return True

    def _rewrite(self) -> None:
        job = self._job
        lines = [_FORMAT.document(**job.heading)]
        if job.dropped:
            lines.append({"dropped": {"events": job.dropped}})
        lines += [{"event": event.document()} for event in job.events]
        lines += [{"frame": _rounded(frame)} for frame in job.frames]
        content = b"".join(map(_line, lines))
        # The new file replaces the old one when it is complete, so that a reader never sees part of it. The
        # descriptor refers to the old file, so it must be opened again.
        let_appear(self._path, lambda draft: draft.write_bytes(content))
        self._end()
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._bytes = len(content)


def thinned(times: Sequence[float], most: int, newest: int) -> list[int]:
    """Return the positions of the times to keep: the last `newest` ones, and older ones evenly over time.

    Args:
        times: Times in ascending order.
        newest: Number of last times that are all kept.
    """
    old, newest_moments = (
        range(max(len(times) - newest, 0)),
        range(max(len(times) - newest, 0), len(times)),
    )
    bins = most - len(newest_moments)
    if len(old) <= bins:
        return [*old, *newest_moments]
    # Divide the time of the old frames into bins of equal length, and keep the last frame of each bin.
    span = times[old[-1]] - times[0] or 1.0
    last = {int((times[n] - times[0]) / span * (bins - 1)): n for n in old}
    return [*sorted(last.values()), *newest_moments]


def _rounded(frame: Mapping[str, Any]) -> dict[str, Any]:
    """Return a frame with values rounded to nine digits, which is enough for a curve."""
    panels = [
        {name: None if value is None else float(f"{value:.9g}") for name, value in series.items()}
        for series in frame["panels"]
    ]
    return {"at": frame["at"], "panels": panels}


def _line(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


def read_history(folder: Path) -> PastJob:
    """Read the history of a job from the folder of its logs.

    Raises:
        FileNotFoundError: The job has no history.
        FrameError: The file is damaged or of another version.
    """
    with reading(folder / HISTORY, FrameError):
        content = read_small(folder / HISTORY, _READABLE)
        # Ignore an incomplete last line: the launcher may be writing it, or was killed while writing.
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
        job.add(JobEvent(*exact(content, kind, **_EVENT)))
    elif kind == "frame":
        at, panels = exact(content, kind, **_FRAME)
        if len(panels) != len(job.heading["panels"]):
            raise Misfit(f"has a frame of {len(panels)} panels")
        job.frames.append({"at": at, "panels": panels})
    elif kind == "dropped":
        [job.dropped] = exact(content, kind, **_DROPPED)
    else:
        raise Misfit(f"has the line {document!r:.60}, which is none of its kinds")
