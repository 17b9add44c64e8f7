"""What a person reads when a job fails: the first cause, its log, and what was stopped."""

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from psfleet_launch.job.job_plan import Job, Member, listed
from psfleet_launch.supervision.job_phases import Failure
from psfleet_launch.supervision.supervisor import Supervisor

__all__ = ["CHAINS", "HEADER", "FailureCause", "find_cause", "report", "tail"]

_TAIL_BYTES = 1 << 16
_SHOWN_LINES = 15
HEADER = b"Traceback (most recent call last):"
CHAINS = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)
"""What stands between the tracebacks of exceptions that follow from each other."""
_FRAME = re.compile(r'\s+File "(?P<file>.+)", line (?P<line>\d+)(?:, in (?P<function>.+))?')
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class FailureCause:
    """What a log says about the end of its process.

    Attributes:
        headline: The exception's line, or the last line.
        place: `train.py:31 in <module>`, or empty.
    """

    headline: str
    place: str = ""


def tail(path: Path) -> list[str]:
    """The last lines of a log, without colours; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return _COLOUR.sub("", text).splitlines()


def find_cause(lines: list[str], script: str) -> FailureCause:
    """The exception that ended the process, and the line of `script` from which it came."""
    starts = [
        number
        for number, line in enumerate(lines)
        if line == HEADER.decode() and not _is_aside(lines[number - 1] if number else "")
    ]
    block = lines[starts[-1] + 1 :] if starts else lines
    headline = next((line for line in block if line[:1].strip()), "") if starts else ""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")
    end = block.index(headline) if headline else len(block)
    return FailureCause(headline or last, _place(block[:end], script))


def _is_aside(line: str) -> bool:
    """Whether a traceback after this line is one that does not end a process."""
    return line.startswith(("Exception ignored ", "Exception in thread "))


def _place(block: list[str], script: str) -> str:
    frames = [found.groupdict() for line in block if (found := _FRAME.fullmatch(line))]
    own = [frame for frame in frames if Path(frame["file"]).name == Path(script).name]
    if not frames:
        return ""
    frame = (own or frames)[-1]
    function = f" in {frame['function']}" if frame["function"] else ""
    return f"{Path(frame['file']).name}:{frame['line']}{function}"


def report(
    job: Job, state: Supervisor, ended_at: dict[Member, datetime], host: Callable[[Member], str]
) -> str:
    """The last thing on the screen after a job that was not a success; `host`: of a member."""
    if state.failure is None:
        name = signal.Signals(state.asked or 0).name
        return f"stopped by {name}: {_stopped(state)}. Job exit code {128 + (state.asked or 0)}."
    failure = state.failure
    lines = tail(job.log(failure.member))
    cause = find_cause(lines, job.request.script)
    seat = [f"host {host(failure.member)} · rank {failure.member.rank}", _end(failure)]
    when = ended_at.get(failure.member)
    if when:
        seat.append(f"{when:%H:%M:%S}.{when.microsecond // 1000:03d}")
    seat.append(failure.usage)
    log = job.log(failure.member)
    told = [f"  whole traceback: {log}"]
    if failure.code is None or failure.code < 0 or HEADER.decode() not in lines:
        told = [
            f"  last lines of {log}:",
            *(f"    {line}" for line in lines[-_SHOWN_LINES:] or ["(it is empty)"]),
        ]
    then = f"then stopped: {_stopped(state)}. " if state.stopped else ""
    return "\n".join(
        [
            f"{failure.member} failed first: {_headline(failure, cause)}",
            f"  {cause.place:<34} {' · '.join(filter(None, seat))}",
            *told,
            f"{then}Job exit code {failure.exit_code}.",
        ]
    )


def _headline(failure: Failure, cause: FailureCause) -> str:
    if failure.cause:
        return failure.cause
    if failure.code is None:
        return failure.why
    if failure.code < 0:
        return f"killed by {_signal_name(-failure.code)}"
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
