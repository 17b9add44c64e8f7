"""What the user sees: a heading, worker 0's output, the progress and the last word.

The script's output goes to standard output, as if it ran by itself; all else to standard error.
"""

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from typing import IO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from psfleet_launch.console.progress_line import ProgressPoller, line
from psfleet_launch.console.tracebacks import Tracebacks
from psfleet_launch.job import job_snapshots
from psfleet_launch.job.job_plan import Job
from psfleet_launch.job.job_request import JobRequest

__all__ = ["Screen"]

_PLAIN_EVERY = 5.0
_WINDOW = 5
"""Rates are those of the last 5 looks."""


class Screen:
    """The display of one job.

    Args:
        progress: Ask the servers how far they are, and show it.
    """

    def __init__(self, progress: bool = True, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._progress = progress
        self._poller: ProgressPoller | None = None
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
        asked = job.request
        parts = [
            engine,
            _count(asked.servers, "server"),
            _count(asked.workers, "worker"),
            asked.strategy.get("consistency", {}).get("mode"),
            *(_part(part, asked) for part in asked.strategy if part != "consistency"),
            None if asked.port is None else "tcp, insecure" if asked.insecure else "tcp with TLS",
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
        taken = time.monotonic() - self._began
        self.say(f"servers   ready in {taken:.1f} s   (logs: {self._job.logs}/)")
        if not self._progress:
            return
        copies = sum(self._job.request.copies)
        self._poller = ProgressPoller(endpoints, copies, environment=self._job.reader)
        self._poller.start()
        if self._console.is_terminal:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()

    def refresh(self) -> None:
        """Show the newest picture: at once on a terminal, else a line every few seconds."""
        history = self._poller.history if self._poller else []
        if len(history) == self._pictures or not history[-1].steps:
            return
        self._pictures = len(history)
        snapshot = job_snapshots.age(self._job.logs)
        text = "  " + line(history[-1], history[-1 - _WINDOW :][0], snapshot)
        text += f" · {self._noted}" if self._noted else ""
        if self._live:
            with _as_long_as_somebody_looks():
                self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif time.monotonic() - self._shown >= _PLAIN_EVERY:
            self._shown = time.monotonic()
            self.say(text)

    def note(self, text: str) -> None:
        """What stands behind the progress from now on. Any thread may call."""
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
        """Whole lines only: the progress line below is drawn anew after each."""
        *whole, self._unfinished[is_error] = (self._unfinished[is_error] + data).split(b"\n")
        for text in whole:
            shown = text.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
            with _as_long_as_somebody_looks():
                self._console.print(Text.from_ansi(shown))

    def end(self, code: int) -> None:
        """Take the progress away; after a success say how long it took.

        After a failure the report says what the last traceback was about.
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


def _part(name: str, asked: JobRequest) -> str:
    """`recompute`; of a pipeline its stages too."""
    return f"pipeline of {_count(len(asked.copies), 'stage')}" if name == "pipeline" else name


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _write(stream: IO[str], data: bytes) -> None:
    """Bytes as they are."""
    with _as_long_as_somebody_looks():
        while data:
            data = data[os.write(stream.fileno(), data) :]
