"""Engine `slurm`: runs a job as one Slurm batch job, with the launcher on the first node and an agent on
every node.

Outside an allocation, `psfleet-launch --engine slurm` submits itself as a batch job and shows its output
(batch_job.py). Inside an allocation, the nodes are the machines of the job, and one `srun` starts all
agents. This `srun` runs as long as the job: a second one might wait forever if Slurm has lost a node.
"""

import os
import re
import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.settings.declaration import setting
from psfleet_launch.engines.remote.batch_job import (
    BatchJob,
    BatchQueue,
    BatchSettings,
    BatchState,
    launcher_command,
)
from psfleet_launch.engines.remote.job_opening import agent_command
from psfleet_launch.engines.remote.machine import address_towards
from psfleet_launch.engines.remote.machine_placement import MachinePlacement
from psfleet_launch.engines.remote.remote_engine import RemoteEngine
from psfleet_launch.job.job_plan import Job
from psfleet_launch.job.job_request import JobRequest, Launch
from psfleet_launch.job.resources import Resources

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


_SRUN = (
    "srun",
    "--overlap",  # the launcher's own step holds the first node
    "--ntasks-per-node=1",
    "--kill-on-bad-exit=0",  # this and the next two keep the step when an agent or a node is lost
    "--no-kill",
    "--wait=0",
    "--cpu-bind=none",  # an agent's processes share all cores of the job on its node
    "--mpi=none",
    "--label",  # lines begin with the number of their task
)
_NAMED = 'exec "$@" --name "$SLURMD_NODENAME"'
_TASK = re.compile(r"srun: error: \S+: tasks? (\d+).*")
_LAST_WORDS = 2.0  # seconds to wait for a task's output, which may come after the report of its end


class SlurmQueue(BatchQueue):
    """Slurm as a batch queue."""

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
        """Return the batch script. The user's options come last, so that they override psfleet's."""
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
        # Slurm cannot send a signal to a pending job. So send it to the job if it is running, and remove
        # the job from the queue if it is pending.
        _run("scancel", "--state=RUNNING", "--batch", f"--signal={by.name[3:]}", job)
        _run("scancel", "--state=PENDING", job)


def ask_slurm(*command: str) -> str:
    """Run a command of Slurm, and return its output.

    Raises:
        ConfigError: The command fails. The message is its last line on standard error.
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
    """Return the fields in a line "Name=value Name=value" of `scontrol --oneliner`, by name."""
    return dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", line))


def _resources(needs: Resources) -> Iterator[str]:
    """Yield the Slurm options that request these resources on each node."""
    if needs.cores:
        yield f"--cpus-per-task={needs.cores}"
    if needs.memory:
        yield f"--mem={-(-needs.with_headroom.memory >> 20)}M"


def _state(fields: Mapping[str, str]) -> BatchState:
    state = fields["JobState"]
    if state not in _OVER:
        return BatchState()
    code, _, number = fields.get("ExitCode", "1:0").partition(":")
    exit_code = 128 + int(number) if int(number) else int(code) or int(state != "COMPLETED")
    return BatchState(exit_code, "" if state in _ITS_OWN_END else state)


def _run(*command: str) -> None:
    subprocess.run(command, stderr=subprocess.DEVNULL, check=False)


@dataclass(frozen=True)
class SlurmSettings(BatchSettings):
    """Settings of engine slurm."""

    sbatch_options: tuple[str, ...] = setting(
        (),
        "Engine slurm: arguments for `sbatch`, as in --partition=cpu,--time=12:00:00",
        names="--sbatch-options engine.slurm.options",
        metavar="OPTION,...",
    )


class SlurmEngine(RemoteEngine):
    """Engine that submits a batch job or, inside an allocation, starts agents with `srun`."""

    name = "slurm"
    settings = SlurmSettings
    programs = ("sbatch", "srun", "scancel", "scontrol")

    def __init__(
        self, job: Job, selector: selectors.BaseSelector, launch: Launch | None = None
    ) -> None:
        super().__init__(job, selector, launch)
        self._nodes: Sequence[str] = ()
        self._failed_at = float("inf")

    @classmethod
    def hand_over(
        cls, request: JobRequest, name: str, launch: Launch, words: Sequence[str]
    ) -> int | None:
        if _is_allocated() or launch.dry_run:
            return None
        settings = launch.of(SlurmSettings)
        nodes = _asked_for(settings)
        job = Job(request, name, "", Path(), launch.log_dir / name)
        needs = MachinePlacement(job, nodes).largest
        return BatchJob.submit(
            SlurmQueue(settings.sbatch_options), name, launch, words, needs
        ).follow()

    @classmethod
    def is_requeued(cls) -> bool:
        return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"

    def machines(self) -> Sequence[str]:
        if not _is_allocated():
            return _asked_for(self.launch.of(SlurmSettings))
        if not self._nodes:
            nodes = os.environ["SLURM_JOB_NODELIST"]
            self._nodes = ask_slurm("scontrol", "show", "hostnames", nodes).split()
        return self._nodes

    def default_address(self) -> str:
        """Return the local address that this machine, the first node, uses to connect to the last node."""
        last = ask_slurm("scontrol", "show", "node", self.machines()[-1], "--oneliner")
        return address_towards(fields_of(last)["NodeAddr"])

    def start_agents(self, endpoint: str, invitation: bytes) -> None:
        count = len(self.machines())
        command = [*_SRUN, f"--nodes={count}", f"--ntasks={count}"]
        if cores := os.environ.get(
            "SLURM_CPUS_PER_TASK"
        ):  # srun does not inherit it from the batch job
            command.append(f"--cpus-per-task={cores}")
        command += ["sh", "-c", _NAMED, "sh", *agent_command(endpoint)]
        self.start("srun", command, invitation)

    def check_agents(self) -> None:
        step = self.starters["srun"]
        lines = step.lines()
        # srun prints only that a task has failed. The reason is the last line that the task itself has
        # written. It begins with the number of the task, and may come a moment later.
        if failed := _TASK.search("\n".join(lines)):
            self._failed_at = min(self._failed_at, time.monotonic())
            if time.monotonic() < self._failed_at + _LAST_WORDS:
                return
            label = f"{failed[1]}: "
            lines_of_label = [line.removeprefix(label) for line in lines if line.startswith(label)]
            raise ConfigError(
                f"host {self.machines()[int(failed[1])]}: {[failed[0], *lines_of_label][-1]}"
            )
        code = step.exit_code
        if code is not None and len(self.agents) < len(self.machines()):
            raise ConfigError([f"srun has ended with exit code {code}", *lines][-1])


ENGINE = SlurmEngine


def _is_allocated() -> bool:
    return "SLURM_JOB_ID" in os.environ and "SLURM_JOB_NODELIST" in os.environ


def _asked_for(settings: SlurmSettings) -> list[str]:
    """Return placeholder names for the nodes of a job that is not submitted yet."""
    return [f"node {number}" for number in range(1, settings.nodes + 1)]
