"""Shows a running job in the terminal of the launcher: output of worker 0, its own lines, a line of progress.

The script's output goes to standard output, as if it ran by itself; everything else goes to standard error.
The text of the progress line comes from `observability/job_view.py`.
"""

import contextlib
import os
import sys
import time
from typing import IO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from psfleet_launch.console.failure_report import Tracebacks
from psfleet_launch.job.job_plan import Job
from psfleet_launch.job.job_request import JobRequest
from psfleet_launch.supervision.standbys import Standbys

_PLAIN_EVERY = 5.0  # seconds between two lines of progress without a terminal


class StandbyNotice:
    """Reports when all servers have ready standbys, also after a loss, or when the next standby starts."""

    def __init__(self) -> None:
        self._since: float | None = None  # a server has none
        self._again = ""
        self._delayed: dict[int, float] = {}

    def look(self, standbys: Standbys, at: float) -> str:
        """Return the line to show at time `at`, or ""."""
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
        progress: Show a line of progress.
    """

    def __init__(self, progress: bool = True, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._progress = progress
        self._live: Live | None = None
        self._began = time.monotonic()
        self._shown = self._began
        self._line = self._last_line = ""
        self._unfinished = {False: b"", True: b""}
        self._tracebacks = Tracebacks("")

    def begin(self, job: Job, engine: str, version: str) -> None:
        """Show the heading, with the parts of the job that were asked for."""
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
        """Print a text of the launcher."""
        self._show(self._tracebacks.rest(), is_error=True)
        with _as_long_as_somebody_looks():
            self._console.print(Text(text))

    def servers_ready(self) -> None:
        """Show progress from now on: the workers have been started too."""
        if self._live is not None:
            self._live.stop()
        self._line = self._last_line = ""
        seconds = time.monotonic() - self._began
        self.say(f"servers   ready in {seconds:.1f} s   (logs: {self._job.logs}/)")
        if self._progress and self._console.is_terminal:
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()

    def set_progress(self, line: str) -> None:
        """Set the line that `refresh` shows. Any thread may call."""
        self._line = line

    def refresh(self) -> None:
        """Show a new line of progress: at once on a terminal, otherwise one every few seconds."""
        line = self._line
        if not self._progress or not line or line == self._last_line:
            return
        if self._live:
            with _as_long_as_somebody_looks():
                text = Text(f"  {line}", no_wrap=True, overflow="ellipsis")
                self._live.update(text, refresh=True)
        elif time.monotonic() - self._shown >= _PLAIN_EVERY:
            self._shown = time.monotonic()
            self.say(f"  {line}")
        else:
            return
        self._last_line = line

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
        """Remove the line of progress. After a success say how long the job took.

        After a failure the report shows the last traceback.
        """
        unshown = self._tracebacks.rest()
        if code == 0:
            self._show(unshown, is_error=True)
        if self._live:
            with _as_long_as_somebody_looks():
                self._live.stop()
        for is_error, unshown in self._unfinished.items():
            _write(sys.stderr if is_error else sys.stdout, unshown)
        if code == 0:
            self.say(f"finished  in {time.monotonic() - self._began:.1f} s")


def _as_long_as_somebody_looks() -> contextlib.suppress:
    """A reader that has gone (`| head`) or a closed terminal ends the display, not the training."""
    return contextlib.suppress(OSError)


def _part(name: str, request: JobRequest) -> str:
    """Return `recompute`, or `pipeline of 2 stages`."""
    return f"pipeline of {_count(len(request.copies), 'stage')}" if name == "pipeline" else name


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if str(number) == "1" else f"{number} {noun}s"  # 1..4 servers


def _write(stream: IO[str], data: bytes) -> None:
    """Bytes as they are."""
    with _as_long_as_somebody_looks():
        while data:
            data = data[os.write(stream.fileno(), data) :]
