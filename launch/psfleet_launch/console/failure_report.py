"""Reports why a job has failed, and shortens workers' tracebacks on the screen to one line each.

The report names the process that failed first, the exception that ended this process, the line of the
script, and the log file. It reads the ends of log files. If a log is missing, the report says so and does
not fail.
"""

import json
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from psfleet_launch.job.job_plan import Job, Member, listed
from psfleet_launch.supervision.job_events import Failure
from psfleet_launch.supervision.supervisor import Supervisor

_TAIL_BYTES = 1 << 16
_SHOWN_LINES = 15
HEADER = b"Traceback (most recent call last):"
CHAINS = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)
"""Lines that Python prints between the tracebacks of chained exceptions."""
_FRAME = re.compile(r'\s+File "(?P<file>.+)", line (?P<line>\d+)(?:, in (?P<function>.+))?')
_INNER = " \t\r\n^~"
"""Characters with which the lines of a traceback before the exception begin.

A line of carets is not indented if the source file was changed after the start.
"""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class FailureCause:
    """Cause of a process's end, as its log shows it.

    Attributes:
        headline: Line with the exception, or the last line of the log.
        place: Line of the script, such as `train.py:31 in <module>`, or "" if it is not known.
    """

    headline: str
    place: str = ""


def tail(path: Path) -> list[str]:
    """Return the last lines of a log without colours, or [] if there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = _COLOUR.sub("", text).splitlines()
    return [plain for line in lines for plain in _plain(line)]


def _plain(line: str) -> list[str]:
    """Return the message and traceback in a line of JSON (PSFLEET_LOG_FORMAT), or any other line
    unchanged."""
    if not line.startswith('{"time": '):
        return [line]
    try:
        record = json.loads(line)
        return [str(record["text"]), *str(record.get("traceback", "")).splitlines()]
    except (ValueError, KeyError, RecursionError):  # cut off, or a line of the script
        return [line]


def find_cause(lines: list[str], script: str) -> FailureCause:
    """Return the exception that ended the process, and the last line of `script` in its traceback."""
    starts = [
        number
        for number, line in enumerate(lines)
        if line == HEADER.decode() and not _is_aside(lines[number - 1] if number else "")
    ]
    block = lines[starts[-1] + 1 :] if starts else lines
    headline = next((line for line in block if line[:1].strip(_INNER)), "") if starts else ""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")
    end = block.index(headline) if headline else len(block)
    return FailureCause(headline or last, _place(block[:end], script))


def _is_aside(line: str) -> bool:
    """Return whether Python prints this line before tracebacks of errors that do not end a process."""
    return line.startswith(("Exception ignored ", "Exception in thread "))


def _place(block: list[str], script: str) -> str:
    frames = [match.groupdict() for line in block if (match := _FRAME.fullmatch(line))]
    script_frames = [frame for frame in frames if Path(frame["file"]).name == Path(script).name]
    if not frames:
        return ""
    frame = (script_frames or frames)[-1]
    function = f" in {frame['function']}" if frame["function"] else ""
    return f"{Path(frame['file']).name}:{frame['line']}{function}"


def report(
    job: Job, state: Supervisor, ended_at: dict[Member, datetime], host: Callable[[Member], str]
) -> str:
    """Return the report that is shown at the end of a job that has failed or was stopped.

    Args:
        host: Function that returns the machine of a process.
    """
    if state.failure is None:
        name = signal.Signals(state.asked or 0).name
        return f"stopped by {name}: {_stopped(state)}. Job exit code {128 + (state.asked or 0)}."
    failure = state.failure
    lines = tail(job.log(failure.member))
    cause = find_cause(lines, job.request.script)
    seat = [f"host {host(failure.member)} · rank {failure.member.rank}", _end(failure)]
    end = ended_at.get(failure.member)
    if end:
        seat.append(f"{end:%H:%M:%S}.{end.microsecond // 1000:03d}")
    seat.append(failure.usage)
    log = job.log(failure.member)
    details = [f"  whole traceback: {log}"]
    if failure.code is None or failure.code < 0 or HEADER.decode() not in lines:
        details = [
            f"  last lines of {log}:",
            *(f"    {line}" for line in lines[-_SHOWN_LINES:] or ["(it is empty)"]),
        ]
    then = f"then stopped: {_stopped(state)}. " if state.stopped else ""
    return "\n".join(
        [
            f"{failure.member} failed first: {_headline(failure, cause)}",
            f"  {cause.place:<34} {' · '.join(filter(None, seat))}",
            *details,
            f"{then}Job exit code {failure.exit_code}.",
        ]
    )


def _headline(failure: Failure, cause: FailureCause) -> str:
    if failure.code is None:
        return failure.cause or failure.why
    if failure.cause or failure.code < 0:
        event = failure.cause or f"killed by {_signal_name(-failure.code)}"
        if event == "killed by SIGKILL":
            event += ", from outside or by the kernel because memory ran out"
        return f"{event}; {failure.why}" if failure.why else event
    return f"{failure.why}: {cause.headline}" if failure.why else cause.headline


def _end(failure: Failure) -> str:
    if failure.code is None:
        return ""
    return f"exit {failure.code}" if failure.code >= 0 else _signal_name(-failure.code)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _stopped(state: Supervisor) -> str:
    how = "asked to stop, clean"
    if state.killed:
        how = f"asked to stop; {listed(sorted(state.killed))} had to be killed"
    return f"{listed(state.stopped)} ({how})"


class Tracebacks:
    """Filter for the standard error of a script: replaces each traceback by one line, for the screen.

    The line is shown only when other output follows. A traceback at the end of the output is not shown,
    because it has ended the process and is in the report of the job.
    """

    def __init__(self, script: str) -> None:
        self._script = script
        self._partial = b""
        self._shown = False  # True if the beginning of the line was shown already
        self._block: list[bytes] = []
        self._told = False  # True if the block includes the line of the exception

    def feed(self, data: bytes) -> bytes:
        """Add output of the script, and return the output to show now."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        out = b"".join(self._take(line + b"\n") for line in lines)
        if self._partial and (self._shown or not self._may_belong(self._partial)):
            out += self.rest() + self._partial
            self._partial, self._shown = b"", True
        return out

    def rest(self) -> bytes:
        """Return the line for a traceback that was not shown yet, or b""."""
        block, self._block, self._told = self._block, [], False
        if not block:
            return b""
        lines = b"".join(block).decode(errors="replace").splitlines()
        cause = find_cause(lines, self._script)
        return f"{cause.headline} ({cause.place or 'its traceback is in the log'})\n".encode()

    def _take(self, line: bytes) -> bytes:
        if self._shown:
            self._shown = False
            return line
        if line.rstrip(b"\r\n") == HEADER:
            text = self.rest() if self._told and not _is_chain(self._block) else b""
            self._block.append(line)
            self._told = False
            return text
        if not self._block:
            return line
        if self._told and not (line.strip() == b"" or _is_chain([line])):
            return self.rest() + line
        self._told = self._told or line[:1].strip(_INNER.encode()) != b""
        self._block.append(line)
        return b""

    def _may_belong(self, partial: bytes) -> bool:
        return HEADER.startswith(partial) or bool(self._block)


def _is_chain(block: list[bytes]) -> bool:
    """Return whether the last line with text announces the traceback of a chained exception."""
    texts = [line.strip() for line in block if line.strip()]
    return bool(texts) and texts[-1] in CHAINS
