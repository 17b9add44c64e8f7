"""What a job is made of: its processes, their commands and their environments.

Pure: nothing is started here.
"""

import json
import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from psfleet.errors import ConfigError
from psfleet.settings.durations import Interval
from psfleet.settings.environment import memory_of
from psfleet_launch.job.guard import MARKER

__all__ = [
    "Job",
    "Member",
    "Request",
    "child_environment",
    "command",
    "job_name",
    "listed",
    "marker",
    "requested_endpoints",
]

Role = Literal["server", "worker"]

_OWN = (
    "PSFLEET_ROLE",
    "PSFLEET_RANK",
    "PSFLEET_SERVERS",
    "PSFLEET_WORKERS",
    "PSFLEET_WORKER_ENDPOINTS",
    "PSFLEET_STAGE",
    "PSFLEET_STAGES",
    "PSFLEET_COPY",
    "PSFLEET_STAGE_COPIES",
    "PSFLEET_STAGE_ENDPOINTS",
    "PSFLEET_DURABILITY",
    "PSFLEET_LOG_FOLDER",
    "PSFLEET_SNAPSHOTS",
    "PSFLEET_SNAPSHOT_EVERY",
    "PSFLEET_RESUME",
    "PSFLEET_REPLICAS",
    "PSFLEET_STANDBY",
    "PSFLEET_PULSE",
    "PSFLEET_JOB",
    "PSFLEET_DEAD_AFTER",
    "PSFLEET_MEMORY",
    "PSFLEET_READY_FILE",
    "PSFLEET_JOINED_FILE",
    "PSFLEET_LEFT_FILE",
    "PSFLEET_TLS",
    "PSFLEET_INSECURE",
    "PSFLEET_RESTARTS",
)
"""Variables that a job sets for its members or not at all, whatever the launcher's environment says.

The others of psfleet/settings/environment.py are for users: PSFLEET_STRATEGY, PSFLEET_LANE, PSFLEET_LIMITS,
PSFLEET_ON_NAN and PSFLEET_PLAN.
"""

_HUNG_AT_LAST = 30
"""Seconds. After as many, gRPC takes a silent server for gone, and workers wait 30 more for another one."""


@dataclass(frozen=True, order=True)
class Member:
    """A seat in the fleet: `worker 1`, or of a pipeline `worker 1 stage 0`.

    Attributes:
        stage: Of a worker that is cut into stages; -1: it is not.
        copy: Of a stage that has several processes, -1: it has one; of a server's standby: the
            how-manieth of its server it is, from 1, also when it has taken over.
    """

    role: Role
    rank: int
    stage: int = -1
    copy: int = -1

    def __str__(self) -> str:
        stage = f" stage {self.stage}" if self.stage >= 0 else ""
        return f"{self.role} {self.rank}{stage}" + (f" copy {self.copy}" if self.copy >= 0 else "")


def listed(members: Sequence[Member]) -> str:
    """`worker 0, server 0`: workers first, by rank."""
    return ", ".join(map(str, sorted(members, key=lambda m: (m.role != "worker", m))))


@dataclass(frozen=True)
class Request:
    """What the user asks for.

    Attributes:
        script: The trainer script.
        arguments: Its arguments.
        servers: Number of server processes.
        workers: Number of worker processes.
        strategy: What the job says over the script's own strategy, as a strategy file does.
        port: None: unix sockets. 0: any free TCP ports. n: TCP ports n, n+1, ... on 127.0.0.1.
        server_script: Servers run the script too, and it branches on `fleet.is_server()`.
        durability: What servers keep: none, snapshot, log or log+fsync; with a log they are started
            again, with snapshots the whole job goes back to the last one.
        insecure: TCP is plain, without certificates and token.
        server_memory: What each server may take, as PSFLEET_MEMORY says it; empty: what there is.
        snapshot_every: How often a snapshot is taken: 60s, 1000 rounds; empty: when asked for.
        resume: The snapshot from which the job starts; empty: from nothing.
        worker_restarts: How often a worker that dies is started again.
        replicas: 1: every server has a standby.
        hung_after: Seconds of silence after which a server or a standby counts as hung; 0: never.
        restart_hung: A server that hangs is killed and started again from its log.
        dead_after: Seconds of silence after which the job goes on without a worker; 0: it fails.
    """

    script: str
    arguments: tuple[str, ...] = ()
    servers: int = 1
    workers: int = 1
    strategy: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    port: int | None = None
    server_script: bool = False
    durability: str = "none"
    insecure: bool = False
    server_memory: str = ""
    snapshot_every: str = ""
    resume: str = ""
    worker_restarts: int = 0
    dead_after: float = 0.0
    replicas: int = 0
    hung_after: float = 5.0
    restart_hung: bool = False

    @property
    def watches(self) -> bool:
        """Whether who hangs is given up: where somebody else can go on with all that it told."""
        return bool((self.replicas or self.restart_hung) and self.hung_after)

    @property
    def copies(self) -> tuple[int, ...]:
        """Processes of each stage of a worker."""
        said = self.strategy.get("pipeline", {})
        return tuple(said.get("copies") or [1] * int(said.get("stages", 1)))

    def __post_init__(self) -> None:
        if self.insecure and self.port is None:
            raise ConfigError(
                "--insecure is for TCP (--tcp or --port); unix sockets are in a private folder"
            )
        memory_of(self.server_memory)
        if self.snapshot_every:
            Interval.parse(self.snapshot_every, "--snapshot-every")
        self._check_deaths()
        if self.replicas not in (0, 1):
            raise ConfigError(f"--replicas is {self.replicas}; a server has 1 standby, or 0")
        if self.replicas and self.server_script:
            raise ConfigError("--replicas does not go with --server-script; leave one of them out")
        _at_least_one("--servers", self.servers)
        _at_least_one("--workers", self.workers)
        if not Path(self.script).is_file():
            what = "is a folder" if Path(self.script).is_dir() else "does not exist"
            raise ConfigError(f"script {self.script!r} {what}; name a Python file")
        if self.port is not None and self.port + self.servers > 65536:
            raise ConfigError(
                f"--port is {self.port}, but {self.servers} servers from there on "
                "end above 65535; choose a lower one"
            )

    def _check_deaths(self) -> None:
        if self.worker_restarts < 0:
            raise ConfigError(f"--restart-workers is {self.worker_restarts}; it must be 0 or more")
        if not 0 <= self.dead_after < float("inf"):
            raise ConfigError(f"--dead-after is {self.dead_after} s; name seconds, as in 30s")
        if self.hung_after and not 1 <= self.hung_after <= _HUNG_AT_LAST:
            raise ConfigError(
                f"--hung-after is {self.hung_after:g} s; name 1s to {_HUNG_AT_LAST}s, or 0 to wait"
            )
        if self.restart_hung and (self.replicas or self.durability not in ("log", "log+fsync")):
            raise ConfigError(
                "--restart-hung goes with --durability log or log+fsync and without --replicas: a server "
                "is killed only where its log or its standby has all that it told"
            )
        if sum(self.copies) > 1 and (self.worker_restarts or self.dead_after):
            raise ConfigError(
                "--restart-workers and --dead-after do not go with --stages: the stages of a worker "
                "depend on each other; leave them out"
            )


def _at_least_one(option: str, number: int) -> None:
    if number < 1:
        raise ConfigError(
            f"{option} is {number}, a job needs at least 1; to train without a "
            "cluster run the script by itself"
        )


@dataclass(frozen=True)
class Job:
    """A request that has got a name and a place.

    Attributes:
        request: What was asked for.
        name: Names the folder of the logs.
        token: Unique; marks the environment of every process of the job.
        folder: Private (mode 0700): sockets and ready files. Removed at the end.
        logs: The folder of the logs.
        credentials: The folder of each role's credentials; empty: none are needed.
        variables: What its processes are told beside.
    """

    request: Request
    name: str
    token: str
    folder: Path
    logs: Path
    credentials: Mapping[str, Path] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

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
    def shown(self) -> Member:
        """Whose output is shown: worker 0's, or its first stage's."""
        return self.workers[0]

    def log(self, member: Member) -> Path:
        """Where the member's output goes: serverlog.0, workerlog.1, workerlog.1.stage.0, ..."""
        return self.logs / f"{member.role}log.{_seat(member)}"

    def ready_file(self, member: Member) -> Path:
        """Where a server says that it is ready, and at which endpoint."""
        copy = f".{member.copy}" if member.copy >= 0 else ""
        return self.folder / f"ready.{member.rank}{copy}"

    def joined_file(self, member: Member) -> Path:
        """What a worker makes when it has joined the fleet."""
        return self.folder / f"joined.{_seat(member)}"

    def left_file(self, member: Member) -> Path:
        """What a worker makes when it has left the fleet."""
        return self.folder / f"left.{_seat(member)}"

    def log_folder(self, member: Member) -> Path:
        """Where a server keeps its log: each standby in a folder of its own."""
        logs = self.logs.absolute()
        return logs / f"standby.{member.rank}.{member.copy}" if member.copy >= 0 else logs


def _seat(member: Member) -> str:
    """In names of files: 1, 1.stage.0, 1.stage.0.copy.2."""
    stage = f".stage.{member.stage}" if member.stage >= 0 else ""
    copy = f".copy.{member.copy}" if member.copy >= 0 else ""
    return f"{member.rank}{stage}{copy}"


def job_name(request: Request) -> str:
    """A name for a job that was given none: the script's and four random digits."""
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(request.script).stem)
    return f"{stem}-{secrets.token_hex(2)}"


def requested_endpoints(job: Job) -> list[str]:
    """What the servers are asked to listen on, in order of rank."""
    port = job.request.port
    if port is None:
        return [f"unix:{job.folder}/server.{member.rank}" for member in job.servers]
    return [f"127.0.0.1:{port + rank if port else 0}" for rank in range(job.request.servers)]


def command(job: Job, member: Member) -> list[str]:
    """The command line of a member."""
    if member.role == "server" and not job.request.server_script:
        # -P: the user's folder may hold a numpy.py of its own.
        return [sys.executable, "-P", "-m", "psfleet_server"]
    return [sys.executable, job.request.script, *job.request.arguments]


def marker(job: Job) -> dict[str, str]:
    """The variable by which every process of the job is recognised, grandchildren too."""
    return {MARKER: job.token}


def child_environment(
    job: Job,
    member: Member,
    endpoints: Sequence[str],
    base: Mapping[str, str] = os.environ,
    cores: int | None = None,
    resume: str = "",
    follows: bool = False,
) -> dict[str, str]:
    """The whole environment of a member: the user's, and the contract of psfleet/settings/environment.py.

    Args:
        endpoints: Of all servers, in order of rank.
        base: The launcher's own environment.
        cores: Cores that the job may use; None: as the launcher's affinity allows.
        resume: The snapshot from which the member starts.
        follows: It is a standby.
    """
    settled = {
        **marker(job),
        **job.variables,
        "PSFLEET_ROLE": member.role,
        "PSFLEET_RANK": str(member.rank),
        "PSFLEET_SERVERS": ",".join(endpoints),
        # Servers count seats: each stage of a worker has one.
        "PSFLEET_WORKERS": str(
            job.request.workers if member.role == "worker" else len(job.workers)
        ),
        # Workers do not listen yet; what scripts use is the number of them.
        "PSFLEET_WORKER_ENDPOINTS": ",".join(["127.0.0.1:0"] * job.request.workers),
        "PYTHONUNBUFFERED": "1",
    }
    if job.request.strategy:
        settled["PSFLEET_STRATEGY"] = json.dumps(job.request.strategy)
    if member.role in job.credentials:
        settled["PSFLEET_TLS"] = str(job.credentials[member.role])
    if job.request.insecure:
        settled["PSFLEET_INSECURE"] = "1"
    if member.stage >= 0:
        settled |= _of_stage(job, member)
    settled |= {
        "PSFLEET_DURABILITY": job.request.durability,
        "PSFLEET_JOB": job.name,
        "PSFLEET_LOG_FOLDER": str(job.logs.absolute()),
        "PSFLEET_REPLICAS": str(job.request.replicas),
    }
    if job.request.dead_after:
        settled["PSFLEET_DEAD_AFTER"] = str(job.request.dead_after)
    if job.request.worker_restarts and member.role == "worker":
        settled["PSFLEET_RESTARTS"] = str(job.request.worker_restarts)
    if job.request.snapshot_every:
        settled["PSFLEET_SNAPSHOT_EVERY"] = job.request.snapshot_every
    if resume:
        settled["PSFLEET_RESUME"] = resume
    if member.role == "worker":
        settled["PSFLEET_JOINED_FILE"] = str(job.joined_file(member))
        settled["PSFLEET_LEFT_FILE"] = str(job.left_file(member))
    if member.role == "server":
        settled["PSFLEET_READY_FILE"] = str(job.ready_file(member))
        if member.copy >= 0:
            settled["PSFLEET_LOG_FOLDER"] = str(job.log_folder(member))
            settled["PSFLEET_SNAPSHOTS"] = str(job.logs.absolute() / "snapshots")
        if follows:
            settled["PSFLEET_STANDBY"] = str(member.copy)
        if job.request.server_memory:
            settled["PSFLEET_MEMORY"] = job.request.server_memory
    inherited = {name: value for name, value in base.items() if name not in _OWN}
    return {**_threads(job, member, cores), **inherited, **settled}


def _of_stage(job: Job, member: Member) -> dict[str, str]:
    """Which stage a process is, and where the stages of its worker meet."""
    copies = job.request.copies
    meet = [f"ipc://{job.folder}/{member.rank}.{process}" for process in range(sum(copies))]
    return {
        "PSFLEET_STAGE": str(member.stage),
        "PSFLEET_STAGES": str(len(copies)),
        "PSFLEET_COPY": str(max(member.copy, 0)),
        "PSFLEET_STAGE_COPIES": ",".join(map(str, copies)),
        "PSFLEET_STAGE_ENDPOINTS": ",".join(meet),
    }


def _threads(job: Job, member: Member, cores: int | None) -> dict[str, str]:
    """Defaults for the thread pools of BLAS and torch, which take every core each unless told.

    Workers share the cores; servers do no matrix work. OMP_NUM_THREADS is the one variable that
    OpenBLAS, MKL and torch all heed; the more special ones that a user may set go before it.

    OPENBLAS_CORETYPE is left alone on purpose. OpenBLAS 0.3.31 takes the AVX-512 kernels by itself
    (measured: 140 GFLOP/s; 68 where the environment says Haswell), and a job with other kernels
    than the plain script's would no longer give the same bits.
    """
    available = cores if cores is not None else len(os.sched_getaffinity(0))
    share = max(1, available // len(job.workers)) if member.role == "worker" else 1
    return {"OMP_NUM_THREADS": str(share)}
