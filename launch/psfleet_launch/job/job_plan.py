"""Parts of a job: its processes, their commands and their environments.

Pure: nothing is started here.
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
"""Groups of settings that a job passes to its members or not at all, whatever the launcher's environment has.

UserSettings are passed on as they are.
"""
_OWN = {one.env for group in _TOLD for one in settings_of(group)}


@dataclass(frozen=True, order=True)
class Member:
    """A seat in the fleet: `worker 1`, or of a pipeline `worker 1 stage 0`.

    Attributes:
        stage: Stage of a worker that is cut into stages; -1: it is not.
        copy: Copy of a stage that has several processes, -1: it has one process. For a standby its ordinal
            among its server's standbys, starting at 1, also after a takeover.
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
    """Start parameters of a member, besides those that follow from the job.

    Attributes:
        resume: The snapshot from which it starts; empty: none.
        follows: It is a standby.
        displaces: Standby that runs as long as it is not decided that this one follows in its place.
        takes_commands: It reads orders on its standard input.
        listen: Endpoint on which it listens; empty: its own one.
    """

    endpoints: Sequence[str]
    resume: str = ""
    follows: bool = False
    takes_commands: bool = False
    listen: str = ""
    displaces: Member | None = None


def listed(members: Sequence[Member]) -> str:
    """`worker 0, server 0`: workers first, by rank."""
    return ", ".join(map(str, sorted(members, key=lambda m: (m.role != "worker", m))))


def needed(request: JobRequest, members: Iterable[Member]) -> Resources:
    """Return the resources promised to these members; the stages of a worker share those promised to it."""
    whole = {one if one.role == "server" else Member(one.role, one.rank) for one in members}
    return sum((request.needs(one.role) for one in whole), Resources())


@dataclass(frozen=True)
class Job:
    """A request that has got a name and a place.

    Attributes:
        name: Names the folder of the logs.
        token: Unique; marks the environment of every process of the job.
        folder: Private (mode 0700): sockets and ready files. Removed at the end.
        credentials: The folder of each role's credentials; empty: none are needed.
        variables: Further environment variables of its processes.
        spool: Folder for the output of its processes, if that is not the folder of the logs.
        relocations: File that lists the servers that have moved; None: they do not move.
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
        """The server seats."""
        return [Member("server", rank) for rank in range(self.request.servers)]

    @property
    def workers(self) -> list[Member]:
        """The worker seats, those of one worker's stages side by side."""
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
        """With what the launcher proves itself to the servers, as a worker does."""
        tls = str(self.credentials.get("worker", ""))
        return Environment(tls=tls, insecure=self.request.insecure)

    def known_at(self, endpoints: Sequence[str], moves: bool) -> Environment:
        """With what other processes of the user read the tables of its servers.

        moves: Servers may go on on another machine.
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
        """File in which the launcher lists the servers that have moved to another machine, for these
        processes.
        """
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
        """Return the folder of a server's log: each standby has one of its own."""
        logs = self.logs.absolute()
        return logs / f"standby.{member.rank}.{member.copy}" if member.copy >= 0 else logs


def _seat(member: Member) -> str:
    """In names of files: 1, 1.stage.0, 1.stage.0.copy.2."""
    stage = f".stage.{member.stage}" if member.stage >= 0 else ""
    copy = f".copy.{member.copy}" if member.copy >= 0 else ""
    return f"{member.rank}{stage}{copy}"


def job_name(request: JobRequest) -> str:
    """A name for a job that was given none: the script's and four random digits."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(request.script).stem)
    return f"{stem}-{secrets.token_hex(2)}"


def command(job: Job, member: Member) -> list[str]:
    """The command line of a member."""
    if member.role == "server" and not job.request.server_script:
        # -P: the user's folder may hold a numpy.py of its own.
        return [sys.executable, "-P", "-m", "psfleet_server"]
    return [sys.executable, job.request.script, *job.request.arguments]


def unread_variables(request: JobRequest, variables: Mapping[str, str] = os.environ) -> list[str]:
    """Return a sentence for each variable of the user in place of which the launcher has a flag."""
    if (
        MARKER in variables
    ):  # a script of a job starts another one, and the variables are those of the first
        return []
    return [
        f"{one.env} is {variables[one.env]!r}, which psfleet-launch does not pass on; use {one.flag}"
        for one in settings_of(JobSettings)
        if one.flag and variables.get(one.env) and getattr(request, one.name) == one.default
    ]


def child_environment(
    job: Job,
    member: Member,
    told: Told,
    base: Mapping[str, str] = os.environ,
    cores: int | None = None,
) -> dict[str, str]:
    """The whole environment of a member: the user's, and the contract of
    psfleet/core/base/settings/environment.py.

    Args:
        base: The launcher's own environment.
        cores: Cores that the job may use; None: as the launcher's affinity allows.
    """
    variables = to_variables(_environment(job, member, told), *_TOLD)
    variables |= to_variables(job.request, LogSettings, NumberSettings)
    if job.request.strategy:
        variables["PSFLEET_STRATEGY"] = json.dumps(job.request.strategy)
    users_own = {name: value for name, value in base.items() if name not in _OWN}
    own = {MARKER: job.token, **job.variables, "PYTHONUNBUFFERED": "1"}
    threads = _own_threads(job.request, member.role)
    return {**_threads(job, member, cores), **users_own, **own, **variables, **threads}


def _environment(job: Job, member: Member, told: Told) -> Environment:
    """Return the environment that a member reads."""
    request, is_server = job.request, member.role == "server"
    copies = request.copies
    shared = {one.name: getattr(request, one.name) for one in settings_of(JobSettings)}
    store = job.snapshots if request.snapshot_store else ""
    settings = shared | {"resume": told.resume, "snapshot_store": store}
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
        servers=tuple(told.endpoints),
        # Servers count seats: each stage of a worker has one.
        workers=len(job.workers) if is_server else request.workers,
        # Workers do not listen yet; what scripts use is the number of them.
        worker_endpoints=("127.0.0.1:0",) * request.workers,
        standby=member.copy if told.follows else 0,
        job=job.name,
        log_folder=str(job.log_folder(member) if is_server else logs),
        snapshots=str(logs / "snapshots") if is_server and member.copy >= 0 else "",
        ready_file=str(job.ready_file(member)) if is_server else "",
        joined_file="" if is_server else str(job.joined_file(member)),
        left_file="" if is_server else str(job.left_file(member)),
        rules_folder=str(request.script_folder) if is_server else "",
        tls=str(job.credentials.get(member.role, "")),
        listen=told.listen,
        relocations=str(job.relocations or ""),
        **settings,
    )


def _own_threads(request: JobRequest, role: Role) -> dict[str, str]:
    """The sizes of thread pools in a process of a role whose cores the user has named; else nothing."""
    cores = request.needs(role).cores
    if not cores:
        return {}
    share = str(max(1, cores // sum(request.copies)) if role == "worker" else cores)
    return {"OMP_NUM_THREADS": share, "NUMBA_NUM_THREADS": share}


def _threads(job: Job, member: Member, cores: int | None) -> dict[str, str]:
    """Defaults for the thread pools of BLAS and torch, which take every core each unless limited.

    Workers share the cores; servers do no matrix work. OMP_NUM_THREADS is the one variable that
    OpenBLAS, MKL and torch all heed; the more special ones that a user may set go before it.

    OPENBLAS_CORETYPE is left alone on purpose. OpenBLAS 0.3.31 takes the AVX-512 kernels by itself
    (measured: 140 GFLOP/s; 68 where the environment says Haswell), and a job with other kernels
    than the plain script's would no longer give the same bits.
    """
    available = cores if cores is not None else len(os.sched_getaffinity(0))
    share = max(1, available // len(job.workers)) if member.role == "worker" else 1
    return {"OMP_NUM_THREADS": str(share)}
