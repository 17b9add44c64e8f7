"""A batch job of Slurm: submitted, and followed to its end."""

import contextlib
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from psfleet.errors import ConfigError
from psfleet_launch.job.job_folder import is_claimed
from psfleet_launch.job.job_request import Launch
from psfleet_launch.job.resources import Resources

__all__ = ["SlurmJob", "ask_slurm", "fields_of", "follow", "script", "submit"]

_LOOK = 0.2  # seconds between looks at the output
_FIRST, _LAST = 0.5, 10.0  # seconds between questions to the controller: first few, then many
_PATIENCE = 60.0  # seconds without an answer of the controller
_OVER = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
)


@dataclass(frozen=True)
class SlurmJob:
    """A job that was submitted.

    Attributes:
        id: Slurm's number.
        folder: Holds what it writes.
    """

    id: str
    folder: Path

    @property
    def output(self) -> tuple[Path, Path]:
        """The files of its standard output and standard error."""
        return self.folder / "slurm.out", self.folder / "slurm.err"


def ask_slurm(*command: str) -> str:
    """What a command of Slurm answers.

    Raises:
        ConfigError: It fails; the text is its own.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(
            f"--engine slurm needs {command[0]}, which is not on the path; run this on a machine of the "
            "cluster"
        ) from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it has ended with {done.returncode}"]
        raise ConfigError(f"{command[0]}: {said[-1].removeprefix(f'{command[0]}: ')}")
    return done.stdout


def fields_of(line: str) -> Mapping[str, str]:
    """The fields of a line of `scontrol --oneliner`."""
    return dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", line))


def script(name: str, launch: Launch, words: Sequence[str], needs: Resources) -> str:
    """The batch script: it becomes the launcher, which starts on the job's first node.

    Args:
        words: The arguments of psfleet-launch.
        needs: What each node must have; nothing of what Slurm is to decide.
    """
    job = SlurmJob("", (launch.log_dir / name).absolute())
    out, err = job.output
    options = [
        f"--job-name={name}",
        f"--nodes={launch.nodes}",
        "--ntasks-per-node=1",
        f"--output={out}",
        f"--error={err}",
        "--open-mode=append",  # a requeued job writes on
        "--requeue",
        "--no-kill",  # the launcher decides what the loss of a node means
        f"--signal=B:USR1@{launch.stop_before:.0f}",
        *_resources(needs),
        *launch.sbatch_options,
    ]
    command = [sys.executable, "-m", "psfleet_launch", "--job", name, *words]
    lines = [f"#SBATCH {shlex.quote(option)}" for option in options]
    return "\n".join(["#!/bin/sh", *lines, f"exec {shlex.join(command)}", ""])


def _resources(needs: Resources) -> Iterator[str]:
    """The options that ask for them on each node."""
    if needs.cores:
        yield f"--cpus-per-task={needs.cores}"
    if needs.memory:
        yield f"--mem={-(-needs.confined.memory >> 20)}M"


def submit(name: str, launch: Launch, words: Sequence[str], needs: Resources) -> SlurmJob:
    """Hand the job to Slurm.

    Raises:
        ConfigError: Slurm refuses it, or a job of this name runs.
    """
    folder = (launch.log_dir / name).absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if is_claimed(folder):
        raise ConfigError(f"job {name!r} is running; choose another --job, or wait for its end")
    path = folder / "job.sbatch"
    path.write_text(script(name, launch, words, needs))
    for old in SlurmJob("", folder).output:
        old.unlink(missing_ok=True)
    number = ask_slurm("sbatch", "--parsable", str(path)).strip().partition(";")[0]
    print(f"Slurm job {number}, from {path}", file=sys.stderr, flush=True)
    return SlurmJob(number, folder)


def follow(job: SlurmJob) -> int:
    """Show what a job writes until it is over; its exit code. Ctrl-C and SIGTERM are passed on to it."""
    streams = (sys.stdout.buffer, sys.stderr.buffer)
    shown = [0, 0]
    with _passed_on(job.id):
        for state in _states(job.id):  # noqa: B007  # the last one counts
            for number, (path, stream) in enumerate(zip(job.output, streams, strict=True)):
                shown[number] += _show(path, shown[number], stream)
    code = _exit_code(state)
    if state["JobState"] not in ("COMPLETED", "FAILED"):
        print(f"Slurm job {job.id} has ended: {state['JobState']}", file=sys.stderr)
    return code


def _states(job: str) -> Iterator[Mapping[str, str]]:
    """The job's state: what is known of it, again and again; the last one is its end."""
    state: Mapping[str, str] = {"JobState": "PENDING"}
    pause, asked = _FIRST, time.monotonic()
    answered = asked
    while state["JobState"] not in _OVER:
        yield state
        time.sleep(_LOOK)
        if time.monotonic() - asked < pause:
            continue
        pause, asked = min(pause * 1.2, _LAST), time.monotonic()
        try:
            state = fields_of(ask_slurm("scontrol", "show", "job", job, "--oneliner"))
            answered = time.monotonic()
        except ConfigError as error:
            if time.monotonic() - answered > _PATIENCE:
                raise ConfigError(f"Slurm job {job} can be followed no more: {error}") from None
    yield state


def _show(path: Path, start: int, stream: BinaryIO) -> int:
    """Write on what a file has from some byte on; how many bytes these were."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read()
    except FileNotFoundError:
        return 0
    stream.write(data)
    stream.flush()
    return len(data)


def _exit_code(state: Mapping[str, str]) -> int:
    code, _, number = state.get("ExitCode", "1:0").partition(":")
    if int(number):
        return 128 + int(number)
    return int(code) or int(state["JobState"] != "COMPLETED")


@contextlib.contextmanager
def _passed_on(job: str) -> Iterator[None]:
    """Within, SIGINT and SIGTERM end the job: the first in order, the next at once."""
    asked: list[int] = []

    def end(number: int, frame: object) -> None:
        asked.append(number)
        if len(asked) == 1:  # a job that waits takes no signal
            in_order = ("--batch", f"--signal={signal.Signals(number).name[3:]}")
            _run("scancel", "--state=RUNNING", *in_order, job)
            _run("scancel", "--state=PENDING", job)
        else:
            _run("scancel", job)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(*command: str) -> None:
    subprocess.run(command, stderr=subprocess.DEVNULL, check=False)
