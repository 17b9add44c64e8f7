"""Settings of a job and of its launch, which users set with flags of `psfleet-launch` or in job files.

Each setting is declared once; its flag and its key in job files are made from the declaration
(psfleet.core.base.settings.declaration). JobRequest describes the job and is sent to agents. Launch
describes where the job runs and what the user sees; only the launcher uses it. JobRequest checks its values
when it is created, so that wrong combinations are reported in one line before a process is started.
"""

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.settings.declaration import check, setting
from psfleet.core.base.settings.declared_settings import JobSettings, LogSettings, NumberSettings
from psfleet.core.base.settings.kinds import (
    BYTES,
    MOST_SERVERS,
    MOST_WORKERS,
    SECONDS,
    SERVERS,
    ServerCount,
)
from psfleet.core.base.settings.server_endpoints import TENSOR_OFFSET, has_ports
from psfleet_launch.job.resources import Resources
from psfleet_launch.job.start_checks import check_source

T = TypeVar("T")
_ALONE = (
    f"at least 1; to train without a cluster run the script by itself; the most are {MOST_WORKERS}"
)
_HUNG_AT_LAST = 30
"""Maximum of --hung-after in seconds. After 30 s gRPC closes the connection to a silent server, and workers
then wait another 30 s for a new server."""


@dataclass(frozen=True)
class RoleSettings:
    """Resources and restarts of each role."""

    server_cores: int = setting(
        0,
        "Cores reserved for each server, which also limit its threads. 0 reserves none",
        names="--server-cores servers.cores",
        least=0,
    )
    worker_cores: int = setting(
        0,
        "Cores reserved for each worker, which also limit its threads. With 0 the workers of a machine share "
        "its cores",
        names="--worker-cores workers.cores",
        least=0,
    )
    worker_memory: int = setting(
        0,
        "Memory reserved for each worker, such as 8G, which is also a container's limit. 0 reserves none",
        BYTES,
        names="--worker-memory workers.memory",
        metavar="SIZE",
        least=0,
    )
    server_restarts: int = setting(
        5,
        "How often to restart each server that dies, from its log. With durability snapshot: how often to go "
        "back to the last snapshot with the whole job",
        names="--restart-servers servers.restarts",
        least=0,
    )


@dataclass(frozen=True)
class _Size:
    """Script of a job and numbers of its servers and workers."""

    script: str = setting(dataclasses.MISSING, "The trainer script", names="job.script")
    arguments: tuple[str, ...] = setting((), "Arguments of the script", names="job.arguments")
    servers: int = setting(
        1,
        "Server processes. With `2..8` the launcher changes their number between 2 and 8 as their memory and "
        "processor time require",
        SERVERS,
        names="--servers servers.count",
        metavar="N[..MOST]",
        least=1,
        most=MOST_SERVERS,
        wanted=SERVERS.wanted,
    )
    workers: int = setting(
        1,
        "Worker processes",
        names="--workers workers.count",
        least=1,
        most=MOST_WORKERS,
        wanted=_ALONE,
    )


@dataclass(frozen=True)
class JobRequest(LogSettings, NumberSettings, JobSettings, RoleSettings, _Size):
    """Settings of a job.

    Attributes:
        strategy: Strategy of the job by part, as in {"pipeline": {"stages": 2}}. It overrides the script's
            strategy, as a strategy file does.

    Raises:
        ConfigError: A setting is wrong, or two settings contradict each other.
    """

    strategy: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    port: int | None = setting(
        None,
        "First TCP port of the servers; without it they use unix sockets. Tensors use ports 2000 higher. "
        "0 takes any free ports, like `--tcp`",
        names="--port network.port",
        least=0,
        most=65535,
    )
    server_script: bool = setting(
        False,
        "Run the script on servers too; it branches on fleet.is_server()",
        names="--server-script servers.run_script",
    )
    hung_after: float = setting(
        5.0,
        "Time without a sign of life after which a server or standby counts as hung: 1s to 30s, or 0 to "
        "switch the check off. A hung process is replaced with --replicas or --restart-hung, otherwise only "
        "reported on the console",
        SECONDS,
        names="--hung-after servers.hung_after",
        metavar="5s",
    )
    restart_hung: bool = setting(
        False,
        "Kill a server that has hung and restart it from its log",
        names="--restart-hung servers.restart_hung",
    )

    @property
    def script_folder(self) -> Path:
        """Folder of the script. Servers look there for the modules of --rules."""
        return Path(self.script).absolute().parent

    def needs(self, role: str) -> Resources:
        """Return the resources that the user has promised to each server or worker. 0 if not set."""
        if role == "worker":
            return Resources(self.worker_cores, self.worker_memory)
        return Resources(self.server_cores, self.memory)

    @property
    def keeps_log(self) -> bool:
        """True if servers keep a log, so that a server can be restarted while other servers run."""
        return self.durability in ("log", "log+fsync")

    @property
    def keeps_snapshots(self) -> bool:
        """True if snapshots are taken regularly."""
        return bool(self.snapshot_every or self.durability == "snapshot")

    @property
    def watches(self) -> bool:
        """True if the launcher kills hung servers. This needs standbys or logs, which can replace them."""
        return bool((self.replicas or self.restart_hung) and self.hung_after)

    @property
    def copies(self) -> tuple[int, ...]:
        """Number of processes of each stage of a worker, or (1,) for workers without stages."""
        pipeline = self.strategy.get("pipeline", {})
        return tuple(pipeline.get("copies") or [1] * int(pipeline.get("stages", 1)))

    @property
    def server_count(self) -> ServerCount:
        """Number of servers at the start, and the maximum that scaling may reach."""
        return self.servers if isinstance(self.servers, ServerCount) else ServerCount(self.servers)

    def __post_init__(self) -> None:
        check(self, attrgetter("flag"))
        if self.insecure and self.port is None:
            raise ConfigError(
                "--insecure is for TCP (--tcp or --port); unix sockets are in a private folder"
            )
        self._check_deaths()
        if self.replicas and self.server_script:
            raise ConfigError("--replicas does not go with --server-script; leave one of them out")
        if not Path(self.script).is_file():
            problem = "is a folder" if Path(self.script).is_dir() else "does not exist"
            raise ConfigError(f"script {self.script!r} {problem}; name a Python file")
        check_source(Path(self.script), f"script {self.script!r}")
        self._check_rules()
        if self.port and not has_ports(self.port, self.servers):
            raise ConfigError(
                f"--port is {self.port}, but {self.servers} servers from there on, and as many ports "
                f"for tensors {TENSOR_OFFSET} above, end above 65535; choose a lower one"
            )

    def _check_rules(self) -> None:
        for module in self.rules:
            if not all(part.isidentifier() for part in module.split(".")):
                raise ConfigError(f"--rules is {module!r}; name a module, as in my_rules")
            search_path = [str(self.script_folder), *sys.path]
            spec = PathFinder.find_spec(module.partition(".")[0], search_path)
            if spec is None:
                raise ConfigError(
                    f"--rules is {module!r}, a module that is neither beside the script (in "
                    f"{str(self.script_folder)!r}) nor on the Python path; put it there"
                )
            if spec.origin is not None and spec.origin.endswith(".py"):
                check_source(Path(spec.origin), f"--rules is {module!r}, and {spec.origin!r}")

    def _check_deaths(self) -> None:
        if self.hung_after and not 1 <= self.hung_after <= _HUNG_AT_LAST:
            raise ConfigError(
                f"--hung-after is {self.hung_after:g} s; name 1s to {_HUNG_AT_LAST}s, or 0 to wait"
            )
        if self.restart_hung and (self.replicas or not self.keeps_log):
            raise ConfigError(
                "--restart-hung goes with --durability log or log+fsync and without --replicas: a server "
                "is killed only where its log or its standby has all that it told"
            )
        if sum(self.copies) > 1 and (self.worker_restarts or self.dead_after):
            raise ConfigError(
                "--restart-workers and --dead-after do not go with --stages: the stages of a worker "
                "depend on each other; leave them out"
            )


@dataclass(frozen=True)
class Launch:
    """Settings of a launch: the machines of the job, its name, and its console output.

    Attributes:
        of_engine: Settings of the engine, an object of its class `settings`, or None for the defaults.
    """

    engine: str = setting(
        "local",
        "Where the processes run: join, local, ray, slurm or ssh; kubernetes only with `--render`",
        names="--engine job.engine",
    )
    log_dir: Path = setting(
        Path("psfleet-logs"),
        "Parent of the job's folder of logs",
        names="--log-dir job.log_dir",
        metavar="PATH",
    )
    name: str = setting(
        "", "Name of the job; by default the script's name and four digits", names="--job job.name"
    )
    start_timeout: float = setting(
        120.0,
        "Time within which all servers must be ready",
        SECONDS,
        names="--start-timeout job.start_timeout",
        metavar="120s",
        least=1e-3,
        wanted="above 0; servers need time to start",
    )
    progress: bool = setting(
        True,
        "`--no-progress` hides the line of steps, loss, rows and bytes; without `--watch` it also leaves "
        "`psfleet top` without figures",
        names="--no-progress job.progress",
    )
    watch: str = setting(
        "",
        "Serve a dashboard and metrics for Prometheus at this port, on this machine only. 0 takes any free "
        "port. With `HOST:PORT` other machines reach it too, with a token and over TLS",
        names="--watch job.watch",
        metavar="[HOST:]PORT",
    )
    chaos: int | None = setting(
        None,
        "Kill, pause and disturb processes as this seed determines, then report which promises were kept",
        names="--chaos chaos.seed",
        metavar="SEED",
    )
    chaos_pace: float = setting(
        4.0,
        "Mean seconds between two faults of `--chaos`",
        names="--chaos-pace chaos.pace",
        least=0.5,
    )
    chaos_followers: int = setting(
        1,
        "Followers of a job under `--chaos`; each copy of the weights that they take is checked",
        names="--chaos-followers chaos.followers",
        least=0,
    )
    dry_run: bool = setting(
        False, "Print what would run on which machine, and start nothing", names="--dry-run"
    )
    listen: str = setting(
        "",
        "Address, or address:port, where the launcher waits for agents; machines must reach it. By default "
        "the address of this machine's name",
        names="--listen network.listen",
        metavar="ADDRESS",
    )
    addresses: tuple[str, ...] = setting(
        (),
        "Where servers on each machine listen, for machines in several networks; by default the address from "
        "which a machine reaches the launcher",
        names="--addresses network.addresses",
        metavar="HOST=ADDRESS,...",
    )
    of_engine: object = None

    def of(self, settings: type[T]) -> T:
        """Return the engine's settings if they are of this class, else the defaults of the class."""
        return self.of_engine if isinstance(self.of_engine, settings) else settings()
