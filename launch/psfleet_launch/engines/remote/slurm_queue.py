"""Slurm as a batch queue."""

import re
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from typing_extensions import override

from psfleet.errors import ConfigError
from psfleet_launch.engines.remote.batch_job import (
    BatchQueue,
    BatchSettings,
    BatchState,
    launcher_command,
)
from psfleet_launch.job.job_request import Resources

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
_ITS_OWN_END = ("COMPLETED", "FAILED")


class SlurmQueue(BatchQueue):
    """The batch queue of Slurm."""

    label = "Slurm job"
    prefix = "slurm"
    suffix = "sbatch"

    def __init__(self, options: Sequence[str] = ()) -> None:
        self._options = options

    def script(
        self,
        name: str,
        settings: BatchSettings,
        words: Sequence[str],
        needs: Resources,
        output: tuple[Path, Path],
    ) -> str:
        """Return the batch script. Options of the user come last, so they win."""
        out, err = output
        options = [
            f"--job-name={name}",
            f"--nodes={settings.nodes}",
            "--ntasks-per-node=1",
            f"--output={out}",
            f"--error={err}",
            "--open-mode=append",  # a requeued job writes on
            "--requeue",
            "--no-kill",  # the launcher decides what the loss of a node means
            f"--signal=B:USR1@{settings.stop_before:.0f}",
            *_resources(needs),
            *self._options,
        ]
        lines = [f"#SBATCH {shlex.quote(option)}" for option in options]
        return "\n".join(
            ["#!/bin/sh", *lines, f"exec {shlex.join(launcher_command(name, words))}", ""]
        )

    @override
    def submit(self, script: Path) -> str:
        return ask_slurm("sbatch", "--parsable", str(script)).strip().partition(";")[0]

    @override
    def state(self, job: str) -> BatchState:
        return _state(fields_of(ask_slurm("scontrol", "show", "job", job, "--oneliner")))

    @override
    def cancel(self, job: str, by: signal.Signals | None) -> None:
        if by is None:
            _run("scancel", job)
            return
        # A job that waits takes no signal.
        _run("scancel", "--state=RUNNING", "--batch", f"--signal={by.name[3:]}", job)
        _run("scancel", "--state=PENDING", job)


def ask_slurm(*command: str) -> str:
    """Run a command of Slurm and return its output.

    Raises:
        ConfigError: It fails; the text is its own.
    """
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(
            f"--engine slurm needs {command[0]}, which is not on the path; run this on a machine of the "
            "cluster"
        ) from None
    if process.returncode:
        lines = process.stderr.strip().splitlines() or [f"it has ended with {process.returncode}"]
        raise ConfigError(f"{command[0]}: {lines[-1].removeprefix(f'{command[0]}: ')}")
    return process.stdout


def fields_of(line: str) -> Mapping[str, str]:
    """The fields of a line of `scontrol --oneliner`."""
    return dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", line))


def _resources(needs: Resources) -> Iterator[str]:
    """The options that ask for them on each node."""
    if needs.cores:
        yield f"--cpus-per-task={needs.cores}"
    if needs.memory:
        yield f"--mem={-(-needs.confined.memory >> 20)}M"


def _state(fields: Mapping[str, str]) -> BatchState:
    state = fields["JobState"]
    if state not in _OVER:
        return BatchState()
    code, _, number = fields.get("ExitCode", "1:0").partition(":")
    exit_code = 128 + int(number) if int(number) else int(code) or int(state != "COMPLETED")
    return BatchState(exit_code, "" if state in _ITS_OWN_END else state)


def _run(*command: str) -> None:
    subprocess.run(command, stderr=subprocess.DEVNULL, check=False)
