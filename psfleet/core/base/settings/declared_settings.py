"""Declares the settings of psfleet, and the limits of a server's load, grouped by who sets them.

- FleetSettings and StageSettings: the role of one process.
- JobSettings: shared by all processes of a job.
- ProcessSettings: chosen by the launcher for one process.
- UserSettings: from the user's environment.
- ServerLimits: limits that keep one caller from using up a server. One variable has all limits,
  as in `PSFLEET_LIMITS=tables=20000,message=67108864`.

To add a setting, add a field to one of these classes. declaration.py explains how flags, variables and
documentation are derived from the fields.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.settings.declaration import check, setting, settings_of
from psfleet.core.base.settings.kinds import (
    BYTES,
    CRASH_POINT,
    DEVICE_PLACES,
    FOLDER,
    FOLDER_OR_URL,
    INTERVAL,
    LOG_LEVELS,
    MOST_WORKERS,
    SECONDS,
    URL,
    CrashPoint,
    SettingKind,
    one_of,
)

_LARGEST_MESSAGE = 2**31 - 1  # gRPC and protobuf count message bytes in an int32

_count: Any = partial(setting, least=1)


_ROLE = SettingKind(
    "server or worker",
    lambda text: {"pserver": "server", "trainer": "worker"}.get(text.lower(), text.lower()),
    lambda value: False,
    choices=("server", "worker"),
)


@dataclass(frozen=True)
class ServerLimits:
    """Limits that keep a caller from using up a server. Requests beyond them are refused or wait."""

    message: int = setting(
        _LARGEST_MESSAGE,
        "Bytes of one request; a longer one is refused before its bytes are taken in",
        least=1,
        most=_LARGEST_MESSAGE,
        wanted=f"at least 1, and gRPC carries up to {_LARGEST_MESSAGE} bytes",
    )
    tables: int = _count(10_000, "Tables that may exist at once")
    lane: int = _count(
        16 << 30,
        "Bytes of shared memory that one worker may offer; beyond it tensors go in messages",
    )
    waiting_calls: int = _count(
        10_000,
        "Calls that may wait at once: pulls of open rounds, barriers and reductions. As many workers may "
        "wait to register",
    )
    connections: int = _count(
        4096, "Open connections of each endpoint; a further one is closed at once"
    )
    handshakes: int = _count(
        128,
        "Connections from one address to the port for tensors that are not authenticated yet. If there are "
        "more, silent ones are closed first, then the oldest",
    )
    streams: int = _count(
        1024, "Calls that are open at once on one connection; further ones wait in the client"
    )
    incoming: int = _count(
        32, "Calls of one connection whose message has arrived in part; a further one is refused"
    )

    def __post_init__(self) -> None:
        check(self, lambda declared: f"limit {declared.name}")

    @classmethod
    def read(cls, text: str) -> "ServerLimits":
        """Parse the text of PSFLEET_LIMITS. Limits that are not in the text keep their defaults.

        Raises:
            ConfigError: A name is unknown, or a value is not allowed.
        """
        settings = {declared.name: declared for declared in settings_of(cls)}
        limits: dict[str, int] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, equals, value = part.partition("=")
            if name not in settings or not equals:
                raise ConfigError(
                    f"PSFLEET_LIMITS says {part!r}; it must be name=number with a name among "
                    f"{', '.join(settings)}"
                )
            limits[name] = settings[name].parse(value, f"limit {name}")
        return cls(**limits)

    @property
    def text(self) -> str:
        """Text for PSFLEET_LIMITS with those limits that differ from their defaults."""
        values = {
            declared.name: (getattr(self, declared.name), declared.default)
            for declared in settings_of(type(self))
        }
        return ",".join(f"{name}={now}" for name, (now, usual) in values.items() if now != usual)


_LIMITS = SettingKind(
    "like tables=20000,message=67108864",
    ServerLimits.read,
    lambda value: False,
    lambda limits: limits.text,
)


@dataclass(frozen=True)
class FleetSettings:
    """Role of this process, and the fleet it belongs to.

    If `role` is None, the process trains alone, without servers.
    """

    role: Literal["server", "worker"] | None = setting(
        None, "Role of this process", _ROLE, names="PSFLEET_ROLE TRAINING_ROLE"
    )
    rank: int = setting(
        0,
        "Index within the role, from 0; required if there are several processes of the role",
        names="PSFLEET_RANK PADDLE_TRAINER_ID PADDLE_PSERVER_ID",
    )
    servers: tuple[str, ...] = setting(
        (),
        "Endpoints of the servers, in order of their index: `unix:/absolute/path` or `host:port/port`, the "
        "first port for control, the second one for tensors (2000 above the first if it is left out); with "
        "`host:0` a server chooses two free ports",
        names="PSFLEET_SERVERS PADDLE_PSERVERS_IP_PORT_LIST",
    )
    workers: int = setting(
        1,
        "Number of workers",
        names="PSFLEET_WORKERS PADDLE_TRAINERS_NUM",
        least=1,
        most=MOST_WORKERS,
    )
    worker_endpoints: tuple[str, ...] = setting(
        (),
        "Addresses of the workers, for information",
        names="PSFLEET_WORKER_ENDPOINTS PADDLE_TRAINER_ENDPOINTS",
    )
    standby: int = setting(
        0,
        "Number of this standby among its server's standbys, from 1, or 0 for a server",
        names="PSFLEET_STANDBY",
        least=0,
    )


@dataclass(frozen=True)
class StageSettings:
    """Pipeline stage that this process runs, if the model of a worker is split into stages."""

    stage: int = setting(0, "Index of this stage of its worker, from 0", names="PSFLEET_STAGE")
    stages: int = setting(
        1,
        "Stage processes of each worker; with 1, a worker is one process",
        names="PSFLEET_STAGES",
        least=1,
        most=MOST_WORKERS,
    )
    copy: int = setting(0, "Index of this copy of its stage, from 0", names="PSFLEET_COPY")
    stage_copies: tuple[int, ...] = setting(
        (),
        "Number of copies of each stage; if empty, each stage has one",
        names="PSFLEET_STAGE_COPIES",
    )
    stage_endpoints: tuple[str, ...] = setting(
        (),
        "Endpoints of these processes, stage by stage: `ipc:///path` or `tcp://host:port`",
        names="PSFLEET_STAGE_ENDPOINTS",
    )


@dataclass(frozen=True)
class JobSettings:
    """Settings of a whole job, from `psfleet-launch` or a job file. Every process of the job gets them."""

    durability: str = setting(
        "none",
        "What survives a crash: with a log, servers restart from it; with snapshots, the job returns to the "
        "last one",
        one_of("none", "snapshot", "log", "log+fsync"),
        names="--durability PSFLEET_DURABILITY job.durability",
    )
    snapshot_every: str = setting(
        "",
        "How often to take a snapshot of the whole job; by default only on request, and every 60s with "
        "durability snapshot",
        INTERVAL,
        names="--snapshot-every PSFLEET_SNAPSHOT_EVERY job.snapshot_every",
        metavar="60s|1000 rounds",
    )
    snapshot_store: str = setting(
        "",
        "Folder or URL in which jobs keep their snapshots, each in a folder of its name; if empty, "
        "`snapshots` in the folder of its logs",
        FOLDER_OR_URL,
        names="--snapshot-store PSFLEET_SNAPSHOT_STORE job.snapshot_store",
        metavar="FOLDER|URL",
    )
    resume: str = setting(
        "",
        "Start from this snapshot; the launcher also takes a job's folder and starts from its last snapshot",
        FOLDER_OR_URL,
        names="--resume PSFLEET_RESUME job.resume",
        metavar="FOLDER",
    )
    worker_restarts: int = setting(
        0,
        "How often to restart a worker that dies; its script runs from the beginning",
        names="--restart-workers PSFLEET_RESTARTS workers.restarts",
        least=0,
        wanted="0 or more",
    )
    dead_after: float = setting(
        0.0,
        "Continue without a worker that has been silent for this long; by default its death ends the job",
        SECONDS,
        names="--dead-after PSFLEET_DEAD_AFTER workers.dead_after",
        metavar="30s",
        least=0,
        most=1e9,
        wanted="seconds, or 0 to wait for ever",
    )
    replicas: int = setting(
        0,
        "Standbys of each server, 0 or 1; a standby takes over at once if its server dies",
        names="--replicas PSFLEET_REPLICAS servers.replicas",
        least=0,
        most=1,
        wanted="0 or 1: a server has one standby at most",
    )
    memory: int = setting(
        0,
        "Memory that each server may use, as in 8G; pushes that would need more are refused. 0 sets no limit",
        BYTES,
        names="--server-memory PSFLEET_MEMORY servers.memory",
        metavar="SIZE",
    )
    disk: str = setting(
        "",
        "Folder on each server's machine for files with the rows of sparse tables. Only rows in use are in "
        "memory, as far as --server-memory allows. Tables with a `device` of their own are not affected",
        FOLDER,
        names="--server-disk PSFLEET_DISK servers.disk",
    )
    device: str = setting(
        "cpu",
        "Where servers hold tables that name no device: "
        f"{', '.join(f'{name} {phrase}' for name, phrase in DEVICE_PLACES.items())}, "
        "auto on the GPU if there is one",
        one_of(*DEVICE_PLACES, "auto"),
        names="--device PSFLEET_DEVICE servers.device",
    )
    device_memory: int = setting(
        0,
        "Memory of its GPU that each server may use for tables, as in 40G; sparse rows beyond it are in host "
        "memory. 0 allows seven eighths of the free memory, which is also the maximum",
        BYTES,
        names="--device-memory PSFLEET_DEVICE_MEMORY servers.device_memory",
        metavar="SIZE",
    )
    tensorboard: str = setting(
        "",
        "Folder for TensorBoard's event files: the values of fleet.log in a subfolder for each worker, and "
        "the figures of the job",
        FOLDER,
        names="--tensorboard PSFLEET_TENSORBOARD job.tensorboard",
        metavar="FOLDER",
    )
    trace: str = setting(
        "",
        "Send a trace of every push to the OpenTelemetry collector at this address, as OTLP over HTTP",
        URL,
        names="--trace PSFLEET_TRACE job.trace",
        metavar="URL",
    )
    rules: tuple[str, ...] = setting(
        (),
        "Modules with update rules, eviction policies or consistency modes of your own, which servers and "
        "workers import; they are on the Python path or beside the script",
        names="--rules PSFLEET_RULES job.rules",
        metavar="MODULE,...",
    )
    insecure: bool = setting(
        False,
        "Use TCP without encryption, certificates and token",
        names="--insecure PSFLEET_INSECURE network.insecure",
    )


@dataclass(frozen=True)
class ProcessSettings:
    """Settings of a single process, chosen by the launcher: its name, paths and file descriptors."""

    job: str = setting("", "Name of the job; a log of another job is refused", names="PSFLEET_JOB")
    log_folder: str = setting("", "Folder of the servers' logs", FOLDER, names="PSFLEET_LOG_FOLDER")
    snapshots: str = setting(
        "",
        "Folder where server 0 keeps the job's snapshots; if empty, `snapshots` beside the logs",
        FOLDER,
        names="PSFLEET_SNAPSHOTS",
    )
    ready_file: str = setting(
        "", "A server writes its endpoint and pid here when it is ready", names="PSFLEET_READY_FILE"
    )
    joined_file: str = setting(
        "", "A worker makes this file when it has joined the fleet", names="PSFLEET_JOINED_FILE"
    )
    left_file: str = setting(
        "", "A worker makes this file when it has left the fleet", names="PSFLEET_LEFT_FILE"
    )
    tls: str = setting(
        "",
        "Folder of this process's credentials. TCP is then encrypted, and both ends show certificates",
        names="PSFLEET_TLS",
    )
    rules_folder: str = setting(
        "",
        "Folder where a server looks for modules with rules after the Python path",
        names="PSFLEET_RULES_FOLDER",
    )
    listen: str = setting(
        "",
        "Where a server listens if that is not its endpoint in PSFLEET_SERVERS, as a standby on another "
        "machine does",
        names="PSFLEET_LISTEN",
    )
    relocations: str = setting(
        "",
        "File with the new endpoints of servers that have moved to another machine",
        names="PSFLEET_RELOCATIONS",
    )
    liveness: int = setting(
        0,
        "File descriptor on which a server writes a few times per second, to show that it does not hang",
        names="PSFLEET_PULSE",
    )


@dataclass(frozen=True)
class NumberSettings:
    """Settings for NaN and infinity in losses and gradients."""

    on_nan: Literal["say", "stop", "skip", "ignore"] | None = setting(
        None,
        "What to do about a loss or gradient that is NaN or infinite: say so once (the default), stop, skip "
        "the gradients of such steps, or ignore it",
        names="--on-nan PSFLEET_ON_NAN job.on_nan",
    )


@dataclass(frozen=True)
class LogSettings:
    """Settings for the log lines of a job's processes."""

    log_levels: str = setting(
        "",
        "What is logged, as in `warning,psfleet.server=debug`: debug, info (the default), warning, error or "
        "off, for all or a part of psfleet",
        LOG_LEVELS,
        names="--log-level PSFLEET_LOG job.log_level",
        metavar="LEVEL,NAME=LEVEL,...",
    )


@dataclass(frozen=True)
class UserSettings(LogSettings, NumberSettings):
    """Settings that users make with environment variables only. The launcher passes its own values on."""

    strategy: str = setting(
        "", "Strategy as JSON; overrides the script's DistributedStrategy", names="PSFLEET_STRATEGY"
    )
    lane: str = setting(
        "auto",
        "With auto, a worker shares memory with servers on its host; with inline, it sends tensors in "
        "messages only",
        one_of("auto", "inline"),
        names="PSFLEET_LANE",
    )
    lane_memory: int = setting(
        256 << 20,
        "Maximum memory that a worker shares with its servers. While it is full, a push waits for earlier "
        "pushes. If one step needs more than a quarter of it, the maximum is four times what the step needs",
        BYTES,
        names="PSFLEET_LANE_MEMORY",
        metavar="SIZE",
    )
    limits: ServerLimits = setting(
        ServerLimits(),
        "Limits of a server (below), such as `tables=20000,message=67108864`",
        _LIMITS,
        names="PSFLEET_LIMITS",
    )
    traceback: bool = setting(
        False,
        "Print the whole traceback of psfleet's errors that end a script; without it, only the sentence",
        names="PSFLEET_TRACEBACK",
    )
    log_format: str = setting(
        "text",
        "Format of the log: with text each line is a sentence, with json an object with fields",
        one_of("text", "json"),
        names="PSFLEET_LOG_FORMAT",
    )
    cache: str = setting(
        "~/.cache/psfleet/kernels", "Folder of compiled kernels", names="PSFLEET_CACHE"
    )


@dataclass(frozen=True)
class FaultSettings:
    """Faults that tests and `psfleet-launch --chaos` make a process simulate."""

    chaos: str = setting("", "Faults for this process to make, as JSON", names="PSFLEET_CHAOS")
    crash: CrashPoint | None = setting(
        None,
        "`POINT:N` kills this process when it reaches a point for the Nth time, `POINT:N:stop` stops it, and "
        "`POINT:N:raise` raises an error",
        CRASH_POINT,
        names="PSFLEET_CRASH",
    )
