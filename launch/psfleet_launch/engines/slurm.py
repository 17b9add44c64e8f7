"""The engine of Slurm: one batch job, whose first node runs the launcher and one `srun` for all agents.

Outside an allocation `psfleet-launch --engine slurm` submits itself as a batch job and follows its output;
see batch_job. Inside, the nodes of the allocation are the machines. There is only one step, and it lives as
long as the job: Slurm may let a later step wait without end after it has lost a node.
"""

import os
import re
import selectors
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from psfleet.errors import ConfigError
from psfleet.settings.declaration import setting
from psfleet_launch.engines.remote.addresses import address_towards
from psfleet_launch.engines.remote.agent_starter import agent_command
from psfleet_launch.engines.remote.batch_job import BatchJob, BatchSettings
from psfleet_launch.engines.remote.machine_placement import MachinePlacement
from psfleet_launch.engines.remote.remote_engine import RemoteEngine
from psfleet_launch.engines.remote.slurm_queue import SlurmQueue, ask_slurm, fields_of
from psfleet_launch.job.job_plan import Job
from psfleet_launch.job.job_request import JobRequest, Launch

_SRUN = (
    "srun",
    "--overlap",  # the launcher's own step holds the first node
    "--ntasks-per-node=1",
    "--kill-on-bad-exit=0",
    "--no-kill",
    "--wait=0",
    "--cpu-bind=none",  # an agent's processes share all cores of the job on its node
    "--mpi=none",
    "--label",  # lines begin with the number of their task
)
_NAMED = 'exec "$@" --name "$SLURMD_NODENAME"'
_TASK = re.compile(r"srun: error: \S+: tasks? (\d+).*")
_LAST_WORDS = 2.0  # seconds; what a task has written may come after the news of its end


@dataclass(frozen=True)
class SlurmSettings(BatchSettings):
    """Settings of the engine."""

    sbatch_options: tuple[str, ...] = setting(
        (),
        "Engine slurm: arguments for `sbatch`, as in --partition=cpu,--time=12:00:00",
        names="--sbatch-options engine.slurm.options",
        metavar="OPTION,...",
    )


class SlurmEngine(RemoteEngine):
    """Holds one step of a Slurm allocation."""

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
        """The address that faces the last node: the first one is where the launcher runs."""
        return address_towards(_node(self.machines()[-1])["NodeAddr"])

    def start_agents(self, endpoint: str, invitation: bytes) -> None:
        count = len(self.machines())
        command = [*_SRUN, f"--nodes={count}", f"--ntasks={count}"]
        if cores := os.environ.get("SLURM_CPUS_PER_TASK"):  # a step does not inherit it
            command.append(f"--cpus-per-task={cores}")
        command += ["sh", "-c", _NAMED, "sh", *agent_command(endpoint)]
        self.start("srun", command, invitation)

    def check_agents(self) -> None:
        step = self.starters["srun"]
        lines = step.lines()
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
    """The nodes of a job that the queue does not have yet."""
    return [f"node {number}" for number in range(1, settings.nodes + 1)]


def _node(name: str) -> Mapping[str, str]:
    """Return the properties of a node that Slurm shows."""
    return fields_of(ask_slurm("scontrol", "show", "node", name, "--oneliner"))
