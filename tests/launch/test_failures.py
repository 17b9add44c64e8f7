"""What is found in a log, and how it is told."""

import json
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from psfleet_launch.console.failure_report import FailureCause, Tracebacks, find_cause, report, tail
from psfleet_launch.job.job_plan import Job, Member
from psfleet_launch.job.job_request import JobRequest
from psfleet_launch.observability.job_history import read_history
from psfleet_launch.supervision.job_events import ProcessExited, ServerReady, StopRequested
from psfleet_launch.supervision.standbys import Standbys
from psfleet_launch.supervision.supervisor import Supervisor
from tests.control_group import memory_limit
from tests.launch.conftest import _environment

SIMPLE = """\
epoch 1
Traceback (most recent call last):
  File "/home/me/train.py", line 31, in <module>
    exe.run(feed=batch)
  File "/lib/psfleet/core/graph/program/executor.py", line 80, in run
    raise ShapeError(text)
psfleet.ShapeError: feed 'ids' has shape (512, 9)
"""
CHAINED = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 5, in load
    open(name)
FileNotFoundError: no file

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/home/me/train.py", line 9, in <module>
    load()
RuntimeError: cannot load
second line of the message
"""
ASIDE = f"""{SIMPLE}\
Exception ignored in: <function Pool.__del__ at 0x7f>
Traceback (most recent call last):
  File "/lib/pool.py", line 4, in __del__
    self.close()
OSError: too late
"""
# The file has changed since the script began.
CHANGED = SIMPLE.replace("\npsfleet.", "\n^^^^^^^^\npsfleet.")
SYNTAX = """\
  File "/home/me/train.py", line 3
    for x in
            ^
SyntaxError: invalid syntax
"""
CANNOT_LOAD = "RuntimeError: cannot load"
SIMPLE_LINE = "psfleet.ShapeError: feed 'ids' has shape (512, 9) (train.py:31 in <module>)\n"


SHAPE = FailureCause("psfleet.ShapeError: feed 'ids' has shape (512, 9)", "train.py:31 in <module>")


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (SIMPLE, SHAPE),
        (CHANGED, SHAPE),
        (CHAINED, FailureCause(CANNOT_LOAD, "train.py:9 in <module>")),
        (ASIDE, SHAPE),
        (SYNTAX, FailureCause("SyntaxError: invalid syntax", "train.py:3")),
        ("usage: train.py\ntrain.py: error: no data\n\n", FailureCause("train.py: error: no data")),
        ("", FailureCause("it wrote nothing")),
    ],
    ids=["simple", "changed", "chained", "aside", "syntax", "message", "empty"],
)
def test_the_cause_is_found(log: str, cause: FailureCause) -> None:
    """The exception that ended the process, and the script's own line rather than the library's."""
    assert find_cause(log.splitlines(), "train.py") == cause


def test_a_log_may_be_missing_or_binary(tmp_path: Path) -> None:
    """A log that is missing is empty; bytes that are no text and colours do no harm."""
    assert tail(tmp_path / "none") == []
    (tmp_path / "log").write_bytes(b"\x1b[31mred\x1b[0m\n\xff\n")
    assert tail(tmp_path / "log") == ["red", "�"]


def a_job(tmp_path: Path) -> tuple[Job, Supervisor]:
    """One server, two workers, training."""
    script = tmp_path / "train.py"
    script.touch()
    job = Job(JobRequest(str(script), workers=2), "j", "token", tmp_path, tmp_path)
    state = Supervisor(tuple(job.servers), tuple(job.workers))
    state.begin(0)
    state.handle(ServerReady(Member("server", 0)), 0)
    return job, state


def host(member: Member) -> str:
    """As an engine of several machines would say it."""
    return f"node-{member.rank + 6}"


def test_the_report(tmp_path: Path) -> None:
    """Who, what, where, when, the log's end, who was stopped, exit code."""
    job, state = a_job(tmp_path)
    failed = Member("worker", 1)
    job.log(failed).write_text(SIMPLE)
    for member, code in ((failed, 1), (Member("worker", 0), -15), (job.servers[0], 0)):
        state.handle(ProcessExited(member, code), 1)
    text = report(job, state, {failed: datetime(2024, 5, 1, 14, 2, 11, 381000)}, host)
    lines = text.splitlines()
    assert lines[0] == f"worker 1 failed first: {SHAPE.headline}"
    assert lines[1].split("  ", 2)[1] == "train.py:31 in <module>"
    assert lines[1].endswith("host node-7 · rank 1 · exit 1 · 14:02:11.381")
    assert lines[2] == f"  whole traceback: {tmp_path}/workerlog.1"
    assert len(lines) == 4
    assert lines[-1] == "then stopped: worker 0, server 0 (asked to stop, clean). Job exit code 1."


def test_memory_that_runs_out(tmp_path: Path) -> None:
    """A process that the kernel kills for memory is no riddle: the report and the history name the cause, and
    how much it had."""
    with memory_limit(512 << 20) as words:
        script = tmp_path / "train.py"
        script.write_text("kept = [b'x' * (1 << 20) for _ in range(1 << 10)]\n")
        said = "-m psfleet_launch --no-progress --job j"
        launch = (sys.executable, *said.split(), str(script))
        done = subprocess.run(
            [*words, *launch], cwd=tmp_path, env=_environment(), capture_output=True, text=True
        )
    cause = "killed by SIGKILL, because memory ran out (the kernel's out-of-memory killer)"
    assert done.returncode == 137, done.stderr
    assert f"worker 0 failed first: {cause}" in done.stderr
    assert re.search(r"s of CPU, \d+ MiB at most", done.stderr), done.stderr
    [fault, *_] = read_history(tmp_path / "psfleet-logs" / "j").timeline.faults
    assert fault.text == f"ended with signal 9: {cause}"


def test_a_kill_says_what_it_may_mean(tmp_path: Path) -> None:
    """Where the kernel does not say why it killed a process, the report names both causes."""
    job, state = a_job(tmp_path)
    killed = Member("worker", 1)
    exits = ((killed, -9), (Member("worker", 0), -15), (job.servers[0], 0))
    for member, code in exits:
        state.handle(ProcessExited(member, code, usage="2.0 s of CPU, 195 MiB at most"), 1)
    first, where, *_ = report(job, state, {}, host).splitlines()
    may = "killed by SIGKILL, from outside or by the kernel because memory ran out"
    assert first == f"worker 1 failed first: {may}"
    assert where.endswith("SIGKILL · 2.0 s of CPU, 195 MiB at most")


def test_the_report_of_an_exit(tmp_path: Path) -> None:
    """Where no traceback tells the cause, the report has the log's last lines."""
    job, state = a_job(tmp_path)
    failed = Member("worker", 1)
    job.log(failed).write_text("epoch 1\nno data\n")
    state.handle(ProcessExited(failed, 1), 1)
    lines = report(job, state, {}, host).splitlines()
    assert lines[0] == "worker 1 failed first: no data"
    assert lines[2:5] == [f"  last lines of {tmp_path}/workerlog.1:", "    epoch 1", "    no data"]


def test_the_report_of_a_log_of_json_lines(tmp_path: Path) -> None:
    """The cause is found in the text and the traceback of such a line."""
    job, state = a_job(tmp_path)
    failed = Member("worker", 1)
    line = json.dumps({"time": "", "text": "it ends", "traceback": SIMPLE})
    job.log(failed).write_text(f'{line}\n{{"time": 3\n')
    state.handle(ProcessExited(failed, 1), 1)
    lines = report(job, state, {}, host).splitlines()
    assert lines[0] == f"worker 1 failed first: {SHAPE.headline}"
    assert lines[1].startswith("  train.py:31 in <module>")


def test_the_report_of_a_server_whose_standby_was_not_ready(tmp_path: Path) -> None:
    """What ended the server comes first, then why nobody has taken over."""
    job, state = a_job(tmp_path)
    state.standbys = Standbys()
    state.standbys.begin(job.servers)
    why = "the agent on host h1 is lost: it has been silent for too long"
    state.handle(ProcessExited(job.servers[0], 137, cause=why), 1)
    first = report(job, state, {}, host).splitlines()[0]
    late = "its standby, server 0 copy 1, was not ready"
    assert first == f"server 0 failed first: {why}; {late}"


@pytest.mark.parametrize("size", [1, 7, 100_000])
@pytest.mark.parametrize(
    ("written", "shown", "held"),
    [
        ("epoch 1\n", "epoch 1\n", ""),
        (SIMPLE, "epoch 1\n", SIMPLE_LINE),
        (CHANGED, "epoch 1\n", SIMPLE_LINE),
        (SIMPLE + "go on\n", f"epoch 1\n{SIMPLE_LINE}go on\n", ""),
        (CHAINED, f"{CANNOT_LOAD} (train.py:9 in <module>)\nsecond line of the message\n", ""),
        (SIMPLE + SIMPLE[8:], f"epoch 1\n{SIMPLE_LINE}", SIMPLE_LINE),
        (SYNTAX, SYNTAX, ""),
        ("Trace of it\r\n\n", "Trace of it\r\n\n", ""),
    ],
    ids=["none", "last", "changed", "followed", "chained", "two", "syntax", "alike"],
)
def test_a_traceback_is_a_line_on_the_screen(
    written: str, shown: str, held: str, size: int
) -> None:
    """However its bytes arrive, the screen gets the exception and the script's line of a traceback,
    when something follows it; all else passes as it is."""
    tracebacks, out = Tracebacks("train.py"), b""
    data = written.encode()
    for start in range(0, len(data), size):
        out += tracebacks.feed(data[start : start + size])
    assert (out.decode(), tracebacks.rest().decode()) == (shown, held)


def test_a_line_without_an_end_is_shown_at_once() -> None:
    """A progress bar that draws its line again is not held."""
    tracebacks = Tracebacks("train.py")
    assert tracebacks.feed(b"50 %") == b"50 %"
    assert tracebacks.feed(b"\r100 %\nT") == b"\r100 %\n"
    assert tracebacks.feed(b"he end") == b"The end"


def test_the_report_of_an_interrupt(tmp_path: Path) -> None:
    """An interrupted job has no failure; its report is one line."""
    job, state = a_job(tmp_path)
    state.handle(StopRequested(2), 1)
    for member in (*job.workers, *job.servers):
        state.handle(ProcessExited(member, 0), 1)
    assert report(job, state, {}, host) == (
        "stopped by SIGINT: worker 0, worker 1, server 0 (asked to stop, clean). Job exit code 130."
    )
