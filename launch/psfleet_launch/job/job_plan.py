"""Plan of a job: its members, and the command line and environment of each member's process.

Open this file to see which environment variable a server or a worker gets, and from where. Pure: it starts no
process and writes no file.
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
"""Groups of settings whose variables the job alone decides: members never inherit them from the launcher's
environment.

Variables of UserSettings are inherited.
"""
_OWN = {setting.env for group in _TOLD for setting in settings_of(group)}


@dataclass(frozen=True, order=True)
class Member:
    """Name of one process of the fleet: `server 0`, `worker 1`, or in a pipeline `worker 1 stage 0`.

    A process that is started again is the same member.

    Attributes:
        role: "server", also for a standby, or "worker".
        rank: Number of the server or worker, from 0. A standby has its server's.
        stage: Stage of a worker that is cut into stages, or -1 for a whole worker.
        copy: Copy of a stage that has several processes, or -1 if it has one. For a standby its number among
            its server's standbys, from 1, which it keeps after a takeover.
    """

    role: Role
    rank: int
    stage: int = -1
    copy: int = -1

    @property
    def seat(self) -> "Member":
        """Seat of the member: for a server or its standby the server's, for a worker its own."""
        return Member("server", self.rank) if self.role == "server" else self

    def __str__(self) -> str:
        stage = f" stage {self.stage}" if self.stage >= 0 else ""
        return f"{self.role} {self.rank}{stage}" + (f" copy {self.copy}" if self.copy >= 0 else "")


@dataclass(frozen=True)
class Told:
    """Start parameters of a member's process, besides those that follow from the job.

    Attributes:
        endpoints: Endpoints of all servers, in order of rank.
        resume: Snapshot from which the process starts, or "".
        follows: True for a standby.
        takes_commands: True if the process reads commands on its standard input.
        listen: Endpoint on which the process listens, or "" for its entry in `endpoints`.
        displaces: Standby that this standby replaces if a change of the number of servers is decided. Both
            run until then, so the engine may place them on the same machine.
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
    """Return the resources promised to these members; the stages of a worker share those promised to it."""
    whole = {
        member if member.role == "server" else Member(member.role, member.rank)
        for member in members
    }
    return sum((request.needs(member.role) for member in whole), Resources())


@dataclass(frozen=True)
class Job:
    """A job to run: the user's request with a name, folders and credentials.

    Attributes:
        request: Settings of the job.
        name: Name of the job and of the folder of its logs.
        token: Unique text in the environment of every process of the job. The guard finds processes by it.
        folder: Private folder (mode 0700) for sockets and ready files, removed at the end.
        logs: Folder of the job's logs.
        credentials: Folder of each role's credentials. Empty if the job needs none.
        variables: Further environment variables of the job's processes.
        spool: Folder for the output of processes, or None for the folder of the logs.
        relocations: File that lists the servers that have moved, or None if servers cannot move.
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
        """Seats of the servers, without standbys."""
        return [Member("server", rank) for rank in range(self.request.servers)]

    @property
    def workers(self) -> list[Member]:
        """Seats of the workers; the stages of a worker stand side by side."""
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
        """Folder or URL in which server 0 keeps its snapshots."""
        return job_folder.place_of(self.request.snapshot_store, self.name, self.logs)

    @property
    def shown(self) -> Member:
        """Member whose output is shown: worker 0, or its first stage."""
        return self.workers[0]

    @property
    def reader(self) -> Environment:
        """Environment with the launcher's credentials for calls to servers, which are those of a worker."""
        tls = str(self.credentials.get("worker", ""))
        return Environment(tls=tls, insecure=self.request.insecure)

    def known_at(self, endpoints: Sequence[str], moves: bool) -> Environment:
        """Return the environment with which other processes of the user read the tables of the job's servers.

        Args:
            endpoints: Endpoints of the servers, in order of rank.
            moves: True if a server may go on on another machine.
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
        """File in which the launcher lists, for readers, the servers that have moved to another machine."""
        return self.logs.absolute() / MOVED

    def log(self, member: Member) -> Path:
        """Return the file of the member's output: serverlog.0, workerlog.1, workerlog.1.stage.0, ..."""
        return (self.spool or self.logs) / f"{member.role}log.{_seat(member)}"

    def ready_file(self, member: Member) -> Path:
        """Return the file in which a server reports that it is ready, and its endpoint."""
        copy = f".{member.copy}" if member.copy >= 0 else ""
        return self.folder / f"ready.{member.rank}{copy}"

    def joined_file(self, member: Member) -> Path:
        """Return the file that a worker makes when it has joined the fleet."""
        return self.folder / f"joined.{_seat(member)}"

    def left_file(self, member: Member) -> Path:
        """Return the file that a worker makes when it has left the fleet."""
        return self.folder / f"left.{_seat(member)}"

    def log_folder(self, member: Member) -> Path:
        """Return the folder of a server's log of records. Each standby has its own folder."""
        logs = self.logs.absolute()
        return logs / f"standby.{member.rank}.{member.copy}" if member.copy >= 0 else logs


def _seat(member: Member) -> str:
    """Return the member's number for names of files: "1", "1.stage.0" or "1.stage.0.copy.2"."""
    stage = f".stage.{member.stage}" if member.stage >= 0 else ""
    copy = f".copy.{member.copy}" if member.copy >= 0 else ""
    return f"{member.rank}{stage}{copy}"


def job_name(request: JobRequest) -> str:
    """Return a name for a job without one: the script's name and four random hexadecimal digits."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(request.script).stem)
    return f"{stem}-{secrets.token_hex(2)}"


def command(job: Job, member: Member) -> list[str]:
    """Return the command line of a member."""
    if member.role == "server" and not job.request.server_script:
        # -P keeps the working folder off sys.path, since the user's folder may hold a file like numpy.py.
        return [sys.executable, "-P", "-m", "psfleet_server"]
    return [sys.executable, job.request.script, *job.request.arguments]


def unread_variables(request: JobRequest, variables: Mapping[str, str] = os.environ) -> list[str]:
    """Return a warning for each variable of the user that the launcher ignores because it has a flag for
    it."""
    # The script of a job may start another job: the variables are then the first job's, not the user's.
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
    """Return the whole environment of a member: the user's variables, and the settings of the job.

    The settings are declared in psfleet/core/base/settings/environment.py. If a variable is given more than
    once, the order of precedence is: threads that follow from --server-cores and --worker-cores, settings of
    the job, variables of the job, the user's variables, default sizes of thread pools.

    Args:
        job: Job of the member.
        member: Member whose process is to be started.
        told: Start parameters of the process.
        base: Environment of the launcher.
        cores: Number of cores that the job may use, or None for those of the launcher's affinity.
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
    """Return the environment that a member reads."""
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
        # Servers count seats: each stage of a worker has one.
        workers=len(job.workers) if is_server else request.workers,
        # Workers do not listen yet; what scripts use is the number of them.
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
    """Return the sizes of thread pools for a role whose number of cores the user has set; else no
    variables."""
    cores = request.needs(role).cores
    if not cores:
        return {}
    share = str(max(1, cores // sum(request.copies)) if role == "worker" else cores)
    return {"OMP_NUM_THREADS": share, "NUMBA_NUM_THREADS": share}


def _threads(job: Job, member: Member, cores: int | None) -> dict[str, str]:
    """Return default sizes for the thread pools of BLAS and torch, each of which uses every core unless
    limited.

    Workers share the cores, and a server gets one thread since it does no matrix work. OMP_NUM_THREADS is the
    one variable that OpenBLAS, MKL and torch all follow. A more specific variable of the user, such as
    MKL_NUM_THREADS, takes precedence over it.

    OPENBLAS_CORETYPE is not set on purpose. OpenBLAS 0.3.31 chooses the AVX-512 kernels by itself
    (measured: 140 GFLOP/s, against 68 if the variable says Haswell), and with other kernels a job would not
    give the same bits as the script alone.
    """
    available = cores if cores is not None else len(os.sched_getaffinity(0))
    share = max(1, available // len(job.workers)) if member.role == "worker" else 1
    return {"OMP_NUM_THREADS": str(share)}
