"""Plan of a job: its members (servers, standbys, workers), and each member's command line and environment.

Read this file to find out which environment variables a server or a worker gets, and where they come from.
The functions start no process and write no file.
"""

import json
import os
import re
import secrets
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from psfleet.core.base.job_files import MOVED
from psfleet.core.base.settings.declaration import settings_of, to_variables
from psfleet.core.base.settings.declared_settings import (
    FleetSettings,
    JobSettings,
    LogSettings,
    NumberSettings,
    ProcessSettings,
    StageSettings,
)
from psfleet.core.base.settings.environment import Environment
from psfleet_launch.job import job_folder
from psfleet_launch.job.guard import MARKER
from psfleet_launch.job.job_request import JobRequest
from psfleet_launch.job.resources import Resources

Role = Literal["server", "worker"]

_TOLD = (FleetSettings, StageSettings, JobSettings, ProcessSettings)
"""Groups of settings whose environment variables the job sets. Members do not inherit them from the launcher.

Members do inherit the variables of UserSettings.
"""
_OWN = {setting.env for group in _TOLD for setting in settings_of(group)}


@dataclass(frozen=True, order=True)
class Member:
    """Identity of a process of the fleet: `server 0`, `worker 1`, or in a pipeline `worker 1 stage 0`.

    A restarted process is the same member.

    Attributes:
        role: "server" for a server or standby, or "worker".
        rank: Number of the server or worker, from 0. A standby has the rank of its server.
        stage: Number of the pipeline stage, or -1 for a worker without stages.
        copy: Number among several processes: among those of a stage from 0, among the standbys of a server
            from 1. A standby keeps its number when it takes over. -1 for any other process.
    """

    role: Role
    rank: int
    stage: int = -1
    copy: int = -1

    @property
    def seat(self) -> "Member":
        """The server or worker that this member is a process of. For a standby, its server."""
        return Member("server", self.rank) if self.role == "server" else self

    def __str__(self) -> str:
        stage = f" stage {self.stage}" if self.stage >= 0 else ""
        return f"{self.role} {self.rank}{stage}" + (f" copy {self.copy}" if self.copy >= 0 else "")


@dataclass(frozen=True)
class Told:
    """Start parameters of a member's process that the job's settings do not determine.

    Attributes:
        endpoints: Endpoints of all servers, in order of rank.
        resume: Snapshot that the process starts from, or "".
        follows: True for a standby.
        takes_commands: True if the process reads commands from its standard input.
        listen: Endpoint to listen on, or "" for the process's entry in `endpoints`.
        displaces: Present standby that this new standby replaces when a change of the number of servers is
            complete. Both run until then. The engine may place them on the same machine.
    """

    endpoints: Sequence[str]
    resume: str = ""
    follows: bool = False
    takes_commands: bool = False
    listen: str = ""
    displaces: Member | None = None


def listed(members: Sequence[Member]) -> str:
    """Return the members as "worker 0, server 0": workers first, by rank."""
    return ", ".join(map(str, sorted(members, key=lambda m: (m.role != "worker", m))))


def needed(request: JobRequest, members: Iterable[Member]) -> Resources:
    """Return the sum of the resources promised to these members. The stages of a worker share its
    resources."""
    whole = {
        member if member.role == "server" else Member(member.role, member.rank)
        for member in members
    }
    return sum((request.needs(member.role) for member in whole), Resources())


@dataclass(frozen=True)
class Job:
    """A job to run: the user's request, with a name, folders and credentials.

    Attributes:
        name: Name of the job and of the folder of its logs.
        token: Unique text in the environment of every process of the job, so that the guard can find all
            processes.
        folder: Private folder (mode 0700) for sockets and ready files, removed at the end.
        credentials: Folder with each role's credentials. Empty if the job needs no credentials.
        variables: Further environment variables of the job's processes.
        spool: Folder for the output of processes, or None for the folder of the logs.
        relocations: File with the new endpoints of servers that have moved to another machine, or None if
            servers cannot move.
    """

    request: JobRequest
    name: str
    token: str
    folder: Path
    logs: Path
    credentials: Mapping[str, Path] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    spool: Path | None = None
    relocations: Path | None = None

    @property
    def servers(self) -> list[Member]:
        """The servers of the job, without standbys."""
        return [Member("server", rank) for rank in range(self.request.servers)]

    @property
    def workers(self) -> list[Member]:
        """The workers of the job. In a pipeline, all stages of worker 0, then of worker 1, and so on."""
        copies = self.request.copies
        seats = (
            [
                (stage, copy if count > 1 else -1)
                for stage, count in enumerate(copies)
                for copy in range(count)
            ]
            if sum(copies) > 1
            else [(-1, -1)]
        )
        return [
            Member("worker", rank, *seat) for rank in range(self.request.workers) for seat in seats
        ]

    @property
    def snapshots(self) -> str:
        """Folder or URL of the job's snapshots."""
        return job_folder.place_of(self.request.snapshot_store, self.name, self.logs)

    @property
    def shown(self) -> Member:
        """Member whose output the launcher shows: worker 0, or the first stage of worker 0."""
        return self.workers[0]

    @property
    def reader(self) -> Environment:
        """Environment for the launcher's own calls to servers. It has the credentials of a
        worker."""
        tls = str(self.credentials.get("worker", ""))
        return Environment(tls=tls, insecure=self.request.insecure)

    def known_at(self, endpoints: Sequence[str], moves: bool) -> Environment:
        """Return the environment for other processes of the user that read the job's tables, such as
        followers.

        Args:
            endpoints: Endpoints of the servers, in order of rank.
            moves: True if a server may move to another machine.
        """
        request = self.request
        return replace(
            self.reader,
            servers=tuple(endpoints),
            durability=request.durability,
            replicas=request.replicas,
            rules=request.rules,
            rules_folder=str(request.script_folder),
            relocations=str(self.moved_file) if moves else "",
        )

    @property
    def moved_file(self) -> Path:
        """File in which the launcher writes, for readers, the new endpoints of servers that have moved."""
        return self.logs.absolute() / MOVED

    def log(self, member: Member) -> Path:
        """Return the file of the member's output: serverlog.0, workerlog.1, workerlog.1.stage.0, ..."""
        return (self.spool or self.logs) / f"{member.role}log.{_seat(member)}"

    def ready_file(self, member: Member) -> Path:
        """Return the file that a server writes when it is ready. It contains the server's endpoint."""
        copy = f".{member.copy}" if member.copy >= 0 else ""
        return self.folder / f"ready.{member.rank}{copy}"

    def joined_file(self, member: Member) -> Path:
        """Return the file that a worker creates when it has joined the fleet."""
        return self.folder / f"joined.{_seat(member)}"

    def left_file(self, member: Member) -> Path:
        """Return the file that a worker creates when it has left the fleet."""
        return self.folder / f"left.{_seat(member)}"

    def log_folder(self, member: Member) -> Path:
        """Return the folder of a server's log of records. Each standby has its own folder."""
        logs = self.logs.absolute()
        return logs / f"standby.{member.rank}.{member.copy}" if member.copy >= 0 else logs


def _seat(member: Member) -> str:
    """Return the member's number for file names: "1", "1.stage.0" or "1.stage.0.copy.2"."""
    stage = f".stage.{member.stage}" if member.stage >= 0 else ""
    copy = f".copy.{member.copy}" if member.copy >= 0 else ""
    return f"{member.rank}{stage}{copy}"


def job_name(request: JobRequest) -> str:
    """Return a name for a job that the user has not named: the script's name and 4 random hexadecimal
    digits."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(request.script).stem)
    return f"{stem}-{secrets.token_hex(2)}"


def command(job: Job, member: Member) -> list[str]:
    """Return the command line of a member."""
    if member.role == "server" and not job.request.server_script:
        # -P keeps the working folder off sys.path: the user's folder may contain a file like numpy.py.
        return [sys.executable, "-P", "-m", "psfleet_server"]
    return [sys.executable, job.request.script, *job.request.arguments]


def unread_variables(request: JobRequest, variables: Mapping[str, str] = os.environ) -> list[str]:
    """Return a warning for each variable of the user that is ignored, because the launcher has a flag for
    it."""
    # If the script of a job starts another job, the variables come from the first job and not from the user.
    if MARKER in variables:
        return []
    return [
        f"{option.env} is {variables[option.env]!r}, which psfleet-launch does not pass on; use {option.flag}"
        for option in settings_of(JobSettings)
        if option.flag
        and variables.get(option.env)
        and getattr(request, option.name) == option.default
    ]


def child_environment(
    job: Job,
    member: Member,
    told: Told,
    base: Mapping[str, str] = os.environ,
    cores: int | None = None,
) -> dict[str, str]:
    """Return the environment variables of a member's process: the user's variables and the settings of the
    job.

    The settings are declared in psfleet/core/base/settings/environment.py. If a variable has several
    sources, the first of these wins:

    1. numbers of threads from --server-cores and --worker-cores,
    2. settings of the job,
    3. variables of the job (`Job.variables`),
    4. the user's variables,
    5. default sizes of thread pools.

    Args:
        cores: Number of cores that the job may use, or None for the cores that the launcher may use.
    """
    variables = to_variables(_environment(job, member, told), *_TOLD)
    variables |= to_variables(job.request, LogSettings, NumberSettings)
    if job.request.strategy:
        variables["PSFLEET_STRATEGY"] = json.dumps(job.request.strategy)
    users_own = {name: value for name, value in base.items() if name not in _OWN}
    job_variables = {MARKER: job.token, **job.variables, "PYTHONUNBUFFERED": "1"}
    threads = _own_threads(job.request, member.role)
    return {**_threads(job, member, cores), **users_own, **job_variables, **variables, **threads}


def _environment(job: Job, member: Member, start: Told) -> Environment:
    """Return the settings that a member's process reads from its environment variables."""
    request, is_server = job.request, member.role == "server"
    copies = request.copies
    shared = {setting.name: getattr(request, setting.name) for setting in settings_of(JobSettings)}
    store = job.snapshots if request.snapshot_store else ""
    settings = shared | {"resume": start.resume, "snapshot_store": store}
    if not is_server:
        settings |= {"memory": 0, "disk": ""}
    if member.stage >= 0:
        settings |= {
            "stage": member.stage,
            "stages": len(copies),
            "copy": max(member.copy, 0),
            "stage_copies": copies,
            "stage_endpoints": tuple(
                f"ipc://{job.folder}/{member.rank}.{process}" for process in range(sum(copies))
            ),
        }
    logs = job.logs.absolute()
    return Environment(
        role=member.role,
        rank=member.rank,
        servers=tuple(start.endpoints),
        # For servers each stage of a worker is a separate client.
        workers=len(job.workers) if is_server else request.workers,
        # Workers do not listen. Scripts use only the number of these endpoints.
        worker_endpoints=("127.0.0.1:0",) * request.workers,
        standby=member.copy if start.follows else 0,
        job=job.name,
        log_folder=str(job.log_folder(member) if is_server else logs),
        snapshots=str(logs / "snapshots") if is_server and member.copy >= 0 else "",
        ready_file=str(job.ready_file(member)) if is_server else "",
        joined_file="" if is_server else str(job.joined_file(member)),
        left_file="" if is_server else str(job.left_file(member)),
        rules_folder=str(request.script_folder) if is_server else "",
        tls=str(job.credentials.get(member.role, "")),
        listen=start.listen,
        relocations=str(job.relocations or ""),
        **settings,
    )


def _own_threads(request: JobRequest, role: Role) -> dict[str, str]:
    """Return variables with the sizes of thread pools, if the user has set the number of cores of the
    role."""
    cores = request.needs(role).cores
    if not cores:
        return {}
    share = str(max(1, cores // sum(request.copies)) if role == "worker" else cores)
    return {"OMP_NUM_THREADS": share, "NUMBA_NUM_THREADS": share}


def _threads(job: Job, member: Member, cores: int | None) -> dict[str, str]:
    """Return default sizes for the thread pools of BLAS and torch. Without a limit each pool uses all cores.

    Workers share the cores. A server gets one thread, because it computes no matrix products.
    OMP_NUM_THREADS is the only variable that OpenBLAS, MKL and torch all read. A more specific variable of
    the user, such as MKL_NUM_THREADS, overrides it.

    OPENBLAS_CORETYPE is intentionally not set. OpenBLAS 0.3.31 chooses the AVX-512 kernels by itself
    (measured: 140 GFLOP/s, against 68 with the value Haswell). With other kernels the results of a job
    would not be bit-identical to those of the script alone.
    """
    available = cores if cores is not None else len(os.sched_getaffinity(0))
    share = max(1, available // len(job.workers)) if member.role == "worker" else 1
    return {"OMP_NUM_THREADS": str(share)}
