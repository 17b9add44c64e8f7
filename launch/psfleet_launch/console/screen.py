"""Progress of the fleet: each server's Status, added up, and the rates between two looks.

The script's output goes to standard output, as if it ran by itself; all else to standard error.
"""

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import IO, TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from psfleet.core.base.observability.exposition import quantile
from psfleet.core.base.observability.panels import number_text, rate_text
from psfleet_launch.console.failure_report import Tracebacks
from psfleet_launch.job import job_folder
from psfleet_launch.job.job_plan import Job
from psfleet_launch.job.job_request import JobRequest
from psfleet_launch.job.status_poller import StatusPoller
from psfleet_launch.supervision.standbys import Standbys

if TYPE_CHECKING:
    from psfleet.core.net.v1.shard_pb2 import StatusReply


_PLAIN_EVERY = 5.0
_WINDOW = 5
"""Rates are those of the last 5 looks."""


@dataclass(frozen=True)
class FleetProgress:
    """Totals of the whole fleet at one moment.

    Attributes:
        at: Seconds of the poller's clock.
        steps: Closed rounds in sync mode, else the pushes of the fastest worker, as everywhere.
        loss: Mean of the workers' last losses; None: no worker has reported one.
        bytes: Bytes of data calls, both ways.
        staleness: Staleness that 99 % of all pushes did not exceed; None: in sync mode, or no push yet.
        torn: Steps that some servers have and others have not, because a worker died between them.
        left: Number of samples of the fleet's datasets that no worker has had yet; 0: unknown.
    """

    at: float
    steps: int = 0
    samples: int = 0
    loss: float | None = None
    rows: int = 0
    bytes: int = 0
    staleness: int | None = None
    torn: int = 0
    left: int = 0


def add_up(replies: "Sequence[StatusReply]", at: float) -> FleetProgress:
    """One picture from the servers' own.

    Steps are those of the server that is furthest; samples and losses travel with a step and count once per
    worker.
    """
    samples: dict[int, int] = {}
    losses: dict[int, float] = {}
    for reply in replies:
        for worker, count in reply.samples.items():
            if count >= samples.get(worker, 0):
                samples[worker] = count
                losses.update({worker: reply.losses[worker]} if worker in reply.losses else {})
    from psfleet.core.engine.schema.table import (
        OWN,  # loads NumPy, which a job's start does without
    )

    return FleetProgress(
        at=at,
        steps=max((reply.progress for reply in replies), default=0),
        samples=sum(samples.values()),
        loss=sum(losses.values()) / len(losses) if losses else None,
        rows=sum(
            table.count
            for reply in replies
            for table in reply.tables
            if table.kind == "sparse" and not table.name.startswith(OWN)
        ),
        bytes=sum(reply.bytes_in + reply.bytes_out for reply in replies),
        staleness=quantile((reply.staleness for reply in replies), 0.99),
        torn=sum(len(reply.torn) for reply in replies),
        left=max((reply.samples_left for reply in replies), default=0),
    )


def line(
    now: FleetProgress, before: FleetProgress | None = None, snapshot: float | None = None
) -> str:
    """`1,204 steps · 151 steps/s · 77.4 k samples/s · loss 0.4713 · 41,207 rows · 312 MiB`.

    Args:
        before: An earlier moment; rates are those since then.
        snapshot: Seconds since the last complete snapshot; None: there is none.
    """
    parts = [f"{now.steps:,} steps"]
    if before is not None and now.at > before.at:
        span = now.at - before.at
        parts.append(rate_text((now.steps - before.steps) / span, "steps"))
        if now.samples:  # a script may not report them
            rate = (now.samples - before.samples) / span
            parts.append(rate_text(rate, "samples"))
            if now.left and rate:
                parts.append(f"{timedelta(seconds=round(now.left / rate))} left")
    if now.loss is not None:
        parts.append(f"loss {number_text(now.loss, 'none')}")
    if now.staleness is not None:
        parts.append(f"staleness p99 {now.staleness}")
    if now.torn:
        parts.append(f"{now.torn} torn step{'s' if now.torn > 1 else ''}")
    parts += [f"{now.rows:,} rows", number_text(now.bytes, "bytes")]
    if snapshot is not None:
        parts.append(f"snapshot {snapshot:,.0f} s ago")
    return " · ".join(parts)


class StandbyNotice:
    """Reports that every server has a ready standby, at first and again after one was lost, or that a server
    has to wait for its next one."""

    def __init__(self) -> None:
        self._since: float | None = None  # a server has none
        self._again = ""
        self._delayed: dict[int, float] = {}

    def look(self, standbys: Standbys, at: float) -> str:
        """The line to be shown at time `at`; empty: there is nothing to say."""
        delayed = standbys.delayed.items() - self._delayed.items()
        self._delayed = {**standbys.delayed}
        if reasons := standbys.unprotected():
            self._since = at if self._since is None else self._since
            return "; ".join(
                f"{reasons[rank].replace(' had ', ' has ')}; the next one starts in {due - at:.0f} s"
                for rank, due in sorted(delayed)
            )
        if self._since is None:
            return ""
        seconds, again = at - self._since, self._again
        self._since, self._again = None, " again"
        return f"standbys  ready{again} in {seconds:.1f} s"


class Screen:
    """The display of one job.

    Args:
        progress: Ask the servers how far they are, and show it.
    """

    def __init__(self, progress: bool = True, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._progress = progress
        self._poller: StatusPoller[FleetProgress] | None = None
        self._live: Live | None = None
        self._began = time.monotonic()
        self._shown = self._began
        self._pictures = 0
        self._noted = ""
        self._unfinished = {False: b"", True: b""}
        self._tracebacks = Tracebacks("")

    def begin(self, job: Job, engine: str, version: str) -> None:
        """The heading."""
        self._job = job
        self._tracebacks = Tracebacks(job.request.script)
        request = job.request
        parts = [
            engine,
            _count(request.servers, "server"),
            _count(request.workers, "worker"),
            request.strategy.get("consistency", {}).get("mode"),
            *(_part(part, request) for part in request.strategy if part != "consistency"),
            None
            if request.port is None
            else "tcp, insecure"
            if request.insecure
            else "tcp with TLS",
        ]
        self.say(f"psfleet {version}  job {job.name}  {' · '.join(filter(None, parts))}")

    def say(self, text: str) -> None:
        """Print a text of the launcher's own."""
        self._show(self._tracebacks.rest(), is_error=True)
        with _as_long_as_somebody_looks():
            self._console.print(Text(text))

    def servers_ready(self, endpoints: Sequence[str]) -> None:
        """The workers have been started too: show progress from now on."""
        if self._poller is not None:
            self._poller.stop()
        if self._live is not None:
            self._live.stop()
        seconds = time.monotonic() - self._began
        self.say(f"servers   ready in {seconds:.1f} s   (logs: {self._job.logs}/)")
        if not self._progress:
            return
        self.follow(endpoints)
        if self._console.is_terminal:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()

    def follow(self, endpoints: Sequence[str]) -> None:
        """Show the progress of these servers, if progress is shown."""
        if not self._progress:
            return
        if self._poller is not None:
            self._poller.stop()
        self._poller = StatusPoller(endpoints, add_up, environment=self._job.reader)
        self._pictures = 0
        self._poller.start()

    def refresh(self) -> None:
        """Show the newest picture: at once on a terminal, else a line every few seconds."""
        history = self._poller.history if self._poller else []
        if len(history) == self._pictures or not history[-1].steps:
            return
        self._pictures = len(history)
        snapshot = job_folder.age(self._job.snapshots)
        text = "  " + line(history[-1], history[-1 - _WINDOW :][0], snapshot)
        text += f" · {self._noted}" if self._noted else ""
        if self._live:
            with _as_long_as_somebody_looks():
                self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif time.monotonic() - self._shown >= _PLAIN_EVERY:
            self._shown = time.monotonic()
            self.say(text)

    def note(self, text: str) -> None:
        """Set the text behind the progress from now on. Any thread may call."""
        self._noted = text

    def output(self, data: bytes, is_error: bool) -> None:
        """Pass on what worker 0 has written; of a traceback one line."""
        self._show(self._tracebacks.feed(data) if is_error else data, is_error)

    def _show(self, data: bytes, is_error: bool) -> None:
        if not data:
            return
        stream = sys.stderr if is_error else sys.stdout
        if self._live and stream.isatty():
            self._above_the_progress(data, is_error)
        else:
            _write(stream, data)

    def _above_the_progress(self, data: bytes, is_error: bool) -> None:
        """Write whole lines only: the progress line below is drawn again after each."""
        *whole, self._unfinished[is_error] = (self._unfinished[is_error] + data).split(b"\n")
        for text in whole:
            visible = text.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
            with _as_long_as_somebody_looks():
                self._console.print(Text.from_ansi(visible))

    def end(self, code: int) -> None:
        """Take the progress away; after a success say how long it took.

        After a failure the report shows the last traceback.
        """
        rest = self._tracebacks.rest()
        if code == 0:
            self._show(rest, is_error=True)
        if self._live:
            with _as_long_as_somebody_looks():
                self._live.stop()
        for is_error, rest in self._unfinished.items():
            _write(sys.stderr if is_error else sys.stdout, rest)
        if self._poller:
            self._poller.stop()
        if code == 0:
            self.say(f"finished  in {time.monotonic() - self._began:.1f} s")


def _as_long_as_somebody_looks() -> contextlib.suppress:
    """A reader that has gone (`| head`) or a closed terminal ends the display, not the training."""
    return contextlib.suppress(OSError)


def _part(name: str, request: JobRequest) -> str:
    """`recompute`; of a pipeline its stages too."""
    return f"pipeline of {_count(len(request.copies), 'stage')}" if name == "pipeline" else name


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if str(number) == "1" else f"{number} {noun}s"  # 1..4 servers


def _write(stream: IO[str], data: bytes) -> None:
    """Bytes as they are."""
    with _as_long_as_somebody_looks():
        while data:
            data = data[os.write(stream.fileno(), data) :]
