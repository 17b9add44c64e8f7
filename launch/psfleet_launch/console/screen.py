"""Shows a running job in the launcher's terminal: output of worker 0, the launcher's messages, a progress
line.

The output of worker 0 goes to standard output and standard error, as if the script ran alone. Everything
else goes to standard error. `observability/job_view.py` makes the text of the progress line.
"""

import contextlib
import os
import sys
import time
from typing import IO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from psfleet.core.base.panels.panel import counted
from psfleet_launch.console.failure_report import Tracebacks
from psfleet_launch.job.job_plan import Job
from psfleet_launch.job.job_request import JobRequest
from psfleet_launch.supervision.standbys import Standbys

_PLAIN_EVERY = 5.0  # seconds between two lines of progress without a terminal


class StandbyNotice:
    """Makes the messages about standbys: all servers have a ready standby (again), or one is delayed until
    a time."""

    def __init__(self) -> None:
        self._since: float | None = None  # time since which a server has no standby
        self._again = ""
        self._delayed: dict[int, float] = {}

    def look(self, standbys: Standbys, at: float) -> str:
        """Return the message to show at time `at`, or "" for none."""
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
    """Display of one job in the launcher's terminal.

    Args:
        progress: True to show a progress line.
        console: Console to write to, or None for standard error.
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
        """Show the heading: name, engine, numbers of servers and workers, strategy and network of the job."""
        self._job = job
        self._tracebacks = Tracebacks(job.request.script)
        request = job.request
        parts = [
            engine,
            counted(request.servers, "server"),
            counted(request.workers, "worker"),
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
        """Print a message of the launcher."""
        self._show(self._tracebacks.rest(), is_error=True)
        with _as_long_as_somebody_looks():
            self._console.print(Text(text))

    def servers_ready(self) -> None:
        """Show progress from now on. Called when the workers have been started."""
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
        """Set the text of the progress line, which `refresh` shows. Any thread may call it."""
        self._line = line

    def refresh(self) -> None:
        """Show the new progress line: on a terminal at once, otherwise a new line every few seconds."""
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
        """Show output of worker 0. Tracebacks are shortened to one line."""
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
        """Write complete lines only, because the progress line is drawn again below each write."""
        *whole, self._unfinished[is_error] = (self._unfinished[is_error] + data).split(b"\n")
        for text in whole:
            visible = text.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
            with _as_long_as_somebody_looks():
                self._console.print(Text.from_ansi(visible))

    def end(self, code: int) -> None:
        """Remove the progress line. After a success, show the duration of the job.

        After a failure the report follows. It shows the last traceback, so that is not shown here.
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
    """Return a context that ignores errors of a closed pipe (`| head`) or terminal, so that training
    continues."""
    return contextlib.suppress(OSError)


def _part(name: str, request: JobRequest) -> str:
    """Return a part of the strategy in words: `recompute`, or `pipeline of 2 stages`."""
    return f"pipeline of {counted(len(request.copies), 'stage')}" if name == "pipeline" else name


def _write(stream: IO[str], data: bytes) -> None:
    with _as_long_as_somebody_looks():
        while data:
            data = data[os.write(stream.fileno(), data) :]
