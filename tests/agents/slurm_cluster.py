"""A cluster of Slurm for tests: a controller and two nodes, each in a network namespace of its own."""

import contextlib
import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from psfleet_launch.job import guard
from psfleet_launch.job.spawn import dismiss_guard, start_guard
from tests.agents.machines import NAMES, NETWORK, Lab, has, laboratory
from tests.programs import ended
from tests.waiting import until

_PROGRAMS = ("sbatch", "srun", "scancel", "scontrol", "squeue", "slurmctld", "slurmd")

_CONFIGURATION = """\
ClusterName=psfleet
SlurmctldHost=localhost({network}.1)
AuthType=auth/none
CredType=cred/none
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_min_interval=1,sched_interval=1
MpiDefault=none
KillWait=5
AuthInfo=cred_expire=5
ReturnToService=2
SlurmdTimeout=300
SlurmctldTimeout=300
MessageTimeout=100
BatchStartTimeout=300
"""


def slurm_variables(lab: Lab) -> dict[str, str]:
    """What programs of Slurm must be told to find the cluster."""
    return {"SLURM_CONF": str(lab.folder / "slurm.conf")}


@contextlib.contextmanager
def slurm_cluster(folder: Path) -> Iterator[Lab]:
    """Start the cluster; skip by name where that cannot be done. All its processes end with this one."""
    has("slurm", _PROGRAMS, "iproute2, slurm-wlm")
    with laboratory(folder) as lab:
        _configure(lab)
        token = uuid.uuid4().hex
        journal = start_guard(token, folder / "state")
        daemons = []
        try:
            daemons.append(_start(lab, token, 0, "slurmctld", "-D", "-i"))
            for number, name in enumerate(NAMES, 1):
                daemons.append(_start(lab, token, number, "slurmd", "-D", "-N", name))
            try:
                until(lambda: ask(lab, "sinfo", "-h", "-t", "idle", "-o", "%D") == "2", _logs(lab))
            except AssertionError as error:
                pytest.skip(f"engine slurm: its daemons do not begin to work here: {error}")
            yield lab
        finally:
            guard.sweep(token)
            for daemon in daemons:
                daemon.wait()
            dismiss_guard(journal)


def cancel_all(lab: Lab) -> None:
    """End every job of the cluster, and see that it has ended."""
    for number in ask(lab, "squeue", "-h", "-o", "%A").split():
        ask(lab, "scancel", number)
    until(lambda: not ask(lab, "squeue", "-h", "-o", "%A"), _logs(lab))


def _configure(lab: Lab) -> None:
    lines = [_CONFIGURATION.format(network=NETWORK, folder=lab.folder)]
    for number, name in enumerate(NAMES, 2):
        (lab.folder / name).mkdir()
        lines.append(
            f"NodeName={name} NodeHostname={name} NodeAddr={NETWORK}.{number} CPUs=2 RealMemory=2048\n"
        )
    lines.append(f"PartitionName=all Nodes={','.join(NAMES)} Default=YES State=UP\n")
    (lab.folder / "state").mkdir()
    (lab.folder / "slurm.conf").write_text("".join(lines))


def _start(
    lab: Lab, token: str, number: int, program: str, *words: str
) -> "subprocess.Popen[bytes]":
    """Start a daemon of the cluster; it carries the token, as does what it starts by itself."""
    variables = {guard.MARKER: token, "PATH": f"{os.environ['PATH']}:/usr/sbin"}
    with (lab.folder / f"{program}.{number}").open("wb") as log:
        return subprocess.Popen(
            [*lab.within(number), program, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | slurm_variables(lab) | variables,
            start_new_session=True,
        )


def ask(lab: Lab, *command: str) -> str:
    """What a program of Slurm answers; nothing if it fails."""
    process = ended([*lab.inside, *command], env=os.environ | slurm_variables(lab))
    return process.stdout.strip()


def _logs(lab: Lab) -> Callable[[], str]:
    """What the daemons have written, when it is asked for."""

    def read() -> str:
        logs = sorted(lab.folder.glob("slurm*.[012]"))
        return "\n".join(f"{one.name}: {one.read_text(errors='replace')[-2000:]}" for one in logs)

    return read
