"""The one place that reads the environment: which role this process has in which fleet.

Names of the reference framework are accepted as synonyms; where both are set, PSFLEET_* wins.

| variable | synonym | meaning |
|---|---|---|
| PSFLEET_ROLE | TRAINING_ROLE (PSERVER, TRAINER) | server or worker |
| PSFLEET_RANK | PADDLE_TRAINER_ID, PADDLE_PSERVER_ID | index within the role, from 0 |
| PSFLEET_SERVERS | PADDLE_PSERVERS_IP_PORT_LIST | endpoints, comma-separated, in order of index |
| PSFLEET_WORKERS | PADDLE_TRAINERS_NUM | number of workers |
| PSFLEET_WORKER_ENDPOINTS | PADDLE_TRAINER_ENDPOINTS | their addresses, for information |
| PSFLEET_STRATEGY | | JSON that overrides the script's DistributedStrategy |
| PSFLEET_LANE | | auto: share memory with servers on this host; inline: tensors in messages only |
| PSFLEET_STAGES | | stage processes of each worker; 1: the workers are not cut into stages |
| PSFLEET_STAGE | | which of them this is, from 0 |
| PSFLEET_STAGE_COPIES | | how many copies each stage has, comma-separated; empty: one each |
| PSFLEET_COPY | | which copy of its stage this is, from 0 |
| PSFLEET_STAGE_ENDPOINTS | | where these processes meet: ipc:///path or tcp://host:port, stage by stage |
| PSFLEET_DURABILITY | | none, snapshot, log or log+fsync: what survives servers, see docs/recovery.md |
| PSFLEET_LOG_FOLDER | | where servers keep their logs |
| PSFLEET_SNAPSHOTS | | where server 0 keeps the job's snapshots; empty: `snapshots` beside the logs |
| PSFLEET_SNAPSHOT_EVERY | | how often one is taken: 60s, 5min or 1000 rounds; empty: when asked for |
| PSFLEET_RESUME | | the snapshot from which the fleet starts |
| PSFLEET_REPLICAS | | 1: every server has a standby, which follows it and can take its place |
| PSFLEET_STANDBY | | of a standby: the how-manieth of its server it is, from 1 |
| PSFLEET_PULSE | | file descriptor on which a server says a few times per second that it runs |
| PSFLEET_JOB | | the job's name: a log of another job is refused |
| PSFLEET_DEAD_AFTER | | seconds of silence after which the fleet goes on without a worker; 0: it waits |
| PSFLEET_RESTARTS | | how often a worker that dies is started again; 0: never, as far as is known |
| PSFLEET_MEMORY | | what a server may take at most, as in 8G or 512M; empty: what there is |
| PSFLEET_READY_FILE | | a server writes its endpoint and pid here when it is ready |
| PSFLEET_JOINED_FILE | | a worker makes this file when it has joined the fleet |
| PSFLEET_LEFT_FILE | | a worker makes this file when it has left the fleet |
| PSFLEET_TLS | | the folder of this process's credentials; TCP is encrypted and both ends prove themselves |
| PSFLEET_INSECURE | | 1: TCP without credentials, where every host on the network is trusted |
| PSFLEET_LIMITS | | what a server takes at most, such as tables=20000,message=67108864 (settings/limits.py) |
| PSFLEET_ON_NAN | | a loss or gradient that is no finite number: say (once), stop or ignore |
| PSFLEET_PLAN | | the first training step writes here what the strategy means for it, and ends the script |

A launched job gets all of these from the launcher. It passes on only PSFLEET_STRATEGY, PSFLEET_LANE,
PSFLEET_LIMITS and PSFLEET_PLAN from its own environment.

An endpoint is `unix:/absolute/path` or `host:port`; port 0 lets a server choose a free one.
"""

import dataclasses
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from psfleet.errors import ConfigError
from psfleet.settings.limits import Limits

__all__ = [
    "Environment",
    "check_alone",
    "check_endpoint",
    "memory_of",
    "on_nan",
    "plan_file",
    "read_environment",
    "threads",
]

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_ROLES = {"server": "server", "worker": "worker", "pserver": "server", "trainer": "worker"}


@dataclass(frozen=True)
class Environment:
    """What the environment says. `role` None: no fleet, train embedded."""

    role: Literal["server", "worker"] | None = None
    rank: int = 0
    servers: tuple[str, ...] = ()
    workers: int = 1
    worker_endpoints: tuple[str, ...] = ()
    strategy: str = ""
    ready_file: str = ""
    joined_file: str = ""
    left_file: str = ""
    lane: str = "auto"
    stage: int = 0
    stages: int = 1
    copy: int = 0
    stage_copies: tuple[int, ...] = ()
    stage_endpoints: tuple[str, ...] = ()
    durability: str = "none"
    log_folder: str = ""
    job: str = ""
    snapshots: str = ""
    snapshot_every: str = ""
    resume: str = ""
    dead_after: float = 0.0
    restarts: int = 0
    replicas: int = 0
    standby: int = 0
    pulse: int = 0
    tls: str = ""
    insecure: bool = False
    memory: int = 0
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.role is None:
            return
        if self.tls and self.insecure:
            raise ConfigError(
                f"PSFLEET_TLS is {self.tls!r} and PSFLEET_INSECURE is 1; unset one of them"
            )
        if not self.servers:
            raise ConfigError(
                f"PSFLEET_ROLE is {self.role!r} but PSFLEET_SERVERS is empty; "
                "list the servers' endpoints, separated by commas"
            )
        if self.workers < 1:
            raise ConfigError(f"PSFLEET_WORKERS is {self.workers}, a fleet needs at least 1 worker")
        if self.lane not in ("auto", "inline"):
            raise ConfigError(f"PSFLEET_LANE is {self.lane!r}; it must be auto or inline")
        self._check_durability()
        if not 0 <= self.dead_after < float("inf"):
            raise ConfigError(
                f"PSFLEET_DEAD_AFTER is {self.dead_after}; it must be seconds, or 0 to wait for ever"
            )
        if self.replicas not in (0, 1):
            raise ConfigError(f"PSFLEET_REPLICAS is {self.replicas}; it must be 0 or 1")
        if self.role == "worker":
            self._check_stages()
        seats = len(self.servers) if self.role == "server" else self.workers
        if not 0 <= self.rank < seats:
            raise ConfigError(
                f"PSFLEET_RANK is {self.rank}, but the fleet has {self.role}s 0 to {seats - 1}"
            )

    def _check_durability(self) -> None:
        if self.durability not in ("none", "snapshot", "log", "log+fsync"):
            raise ConfigError(
                f"PSFLEET_DURABILITY is {self.durability!r}; it must be none, snapshot, log or "
                "log+fsync"
            )
        if self.role == "server" and self.keeps_log and not self.log_folder:
            raise ConfigError(
                f"PSFLEET_DURABILITY is {self.durability!r} but PSFLEET_LOG_FOLDER is "
                "empty; name the folder for the servers' logs"
            )

    @property
    def keeps_log(self) -> bool:
        """Whether servers can be started again, each by itself."""
        return self.durability in ("log", "log+fsync")

    @property
    def snapshot_folder(self) -> str:
        """Where server 0 keeps the job's snapshots; empty: nowhere."""
        beside = os.path.join(self.log_folder, "snapshots") if self.log_folder else ""
        return self.snapshots or beside

    def _check_stages(self) -> None:
        if not 0 <= self.stage < self.stages:
            raise ConfigError(
                f"PSFLEET_STAGE is {self.stage}, but the worker has stages 0 to {self.stages - 1}"
            )
        copies = self.stage_copies or (1,) * self.stages
        if len(copies) != self.stages or min(copies) < 1:
            raise ConfigError(
                f"PSFLEET_STAGE_COPIES is {copies}; it must name at least 1 for each of "
                f"{self.stages} stages"
            )
        if not 0 <= self.copy < copies[self.stage]:
            raise ConfigError(
                f"PSFLEET_COPY is {self.copy}, but stage {self.stage} has "
                f"{copies[self.stage]} copies"
            )
        if sum(copies) > 1 and len(self.stage_endpoints) != sum(copies):
            raise ConfigError(
                f"PSFLEET_STAGE_ENDPOINTS names {len(self.stage_endpoints)} endpoints "
                f"for {sum(copies)} processes; name one for each"
            )

    @property
    def beat(self) -> float:
        """Seconds between two signs of life of a process."""
        return min(1.0, self.dead_after / 5) if self.dead_after else 1.0

    @property
    def seat(self) -> "Environment":
        """This process as the servers see it: each process of each worker has a seat of its own."""
        copies = self.stage_copies or (1,) * self.stages
        own = sum(copies[: self.stage]) + self.copy
        return dataclasses.replace(
            self,
            rank=self.rank * sum(copies) + own,
            stage=0,
            copy=0,
            stages=1,
            workers=self.workers * sum(copies),
            stage_copies=(),
            stage_endpoints=(),
        )


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """The role and the fleet that `variables` describe.

    Raises:
        ConfigError: A value is missing, not a number or out of range.
    """
    spoken = variables.get("PSFLEET_ROLE") or variables.get("TRAINING_ROLE") or ""
    if not spoken:
        _check_no_servers(variables)
        return Environment(strategy=variables.get("PSFLEET_STRATEGY", ""))
    role = _ROLES.get(spoken.lower())
    if role is None:
        raise ConfigError(f"PSFLEET_ROLE is {spoken!r}; it must be server or worker")
    rank_synonym = "PADDLE_TRAINER_ID" if role == "worker" else "PADDLE_PSERVER_ID"
    servers = _list(variables, "PSFLEET_SERVERS", "PADDLE_PSERVERS_IP_PORT_LIST")
    for endpoint in servers:
        check_endpoint(endpoint)
    return Environment(
        role="server" if role == "server" else "worker",
        rank=_number(variables, "PSFLEET_RANK", rank_synonym, _own_rank(variables, role, servers)),
        servers=servers,
        workers=_number(variables, "PSFLEET_WORKERS", "PADDLE_TRAINERS_NUM", 1),
        worker_endpoints=_list(variables, "PSFLEET_WORKER_ENDPOINTS", "PADDLE_TRAINER_ENDPOINTS"),
        strategy=variables.get("PSFLEET_STRATEGY", ""),
        ready_file=variables.get("PSFLEET_READY_FILE", ""),
        joined_file=variables.get("PSFLEET_JOINED_FILE", ""),
        left_file=variables.get("PSFLEET_LEFT_FILE", ""),
        lane=variables.get("PSFLEET_LANE") or "auto",
        stage=_number(variables, "PSFLEET_STAGE", "", 0),
        stages=_number(variables, "PSFLEET_STAGES", "", 1),
        copy=_number(variables, "PSFLEET_COPY", "", 0),
        stage_copies=_counts(variables, "PSFLEET_STAGE_COPIES"),
        stage_endpoints=_list(variables, "PSFLEET_STAGE_ENDPOINTS"),
        durability=variables.get("PSFLEET_DURABILITY") or "none",
        log_folder=variables.get("PSFLEET_LOG_FOLDER", ""),
        job=variables.get("PSFLEET_JOB", ""),
        snapshots=variables.get("PSFLEET_SNAPSHOTS", ""),
        snapshot_every=variables.get("PSFLEET_SNAPSHOT_EVERY", ""),
        resume=variables.get("PSFLEET_RESUME", ""),
        memory=memory_of(variables.get("PSFLEET_MEMORY", "")),
        dead_after=_seconds(variables, "PSFLEET_DEAD_AFTER"),
        restarts=_number(variables, "PSFLEET_RESTARTS", "", 0),
        replicas=_number(variables, "PSFLEET_REPLICAS", "", 0),
        standby=_number(variables, "PSFLEET_STANDBY", "", 0),
        pulse=_number(variables, "PSFLEET_PULSE", "", 0),
        tls=variables.get("PSFLEET_TLS", ""),
        insecure=_switch(variables, "PSFLEET_INSECURE"),
        limits=Limits.read(variables.get("PSFLEET_LIMITS", "")),
    )


def _check_no_servers(variables: Mapping[str, str]) -> None:
    """Refuse an environment that names servers but no role: it is half of a cluster's."""
    for name in ("PSFLEET_SERVERS", "PADDLE_PSERVERS_IP_PORT_LIST"):
        if variables.get(name):
            raise ConfigError(
                f"{name} is {variables[name]!r} but PSFLEET_ROLE is not set; set it to worker (or "
                f"server), or unset {name} to train in this process alone"
            )


def check_alone(variables: Mapping[str, str] = os.environ) -> None:
    """Refuse to train alone where the environment names a fleet, which `fleet.init()` would join.

    Raises:
        ConfigError: It names one.
    """
    here = read_environment(variables)
    if here.role is not None:
        count = here.workers if here.role == "worker" else len(here.servers)
        raise ConfigError(
            f"PSFLEET_ROLE says that this process is {here.role} {here.rank} of {count}, but the script "
            "has not called fleet.init() and would train alone; call it before anything else of "
            "psfleet, or unset PSFLEET_ROLE"
        )


@functools.cache
def plan_file() -> str:
    """Where this process is to write the plan of its first training step; empty: it trains."""
    return os.environ.get("PSFLEET_PLAN", "")


def on_nan(variables: Mapping[str, str] = os.environ) -> str:
    """What is done about a loss or a gradient that is no finite number: say, stop or ignore.

    Raises:
        ConfigError: PSFLEET_ON_NAN is something else.
    """
    said = variables.get("PSFLEET_ON_NAN") or "say"
    if said not in ("say", "stop", "ignore"):
        raise ConfigError(f"PSFLEET_ON_NAN is {said!r}; it must be say, stop or ignore")
    return said


def threads() -> int:
    """Threads that BLAS was told to use (OMP_NUM_THREADS, which the launcher sets); 1 if nothing."""
    said = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return max(int(said), 1) if said.isdigit() else 1


def check_endpoint(endpoint: str) -> None:
    """Refuse what is neither `unix:/path` nor `host:port`."""
    if endpoint.startswith("unix:/"):
        return
    host, colon, port = endpoint.rpartition(":")
    if not (colon and host and port.isdigit() and int(port) < 65536):
        raise ConfigError(f"endpoint {endpoint!r} is neither unix:/path nor host:port")


def _own_rank(variables: Mapping[str, str], role: str, servers: tuple[str, ...]) -> int:
    """The reference tells a server its own address, not its index."""
    own = f"{variables.get('POD_IP', '')}:{variables.get('PADDLE_PORT', '')}"
    return servers.index(own) if role == "server" and own in servers else 0


def _list(variables: Mapping[str, str], *names: str) -> tuple[str, ...]:
    for name in names:
        if variables.get(name):
            return tuple(part.strip() for part in variables[name].split(",") if part.strip())
    return ()


def _counts(variables: Mapping[str, str], name: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in _list(variables, name))
    except ValueError:
        raise ConfigError(f"{name} is {variables[name]!r}; it must be whole numbers") from None


def _switch(variables: Mapping[str, str], name: str) -> bool:
    said = variables.get(name, "")
    if said not in ("", "0", "1"):
        raise ConfigError(f"{name} is {said!r}; it must be 1 or nothing")
    return said == "1"


def _number(variables: Mapping[str, str], name: str, synonym: str, default: int) -> int:
    for key in (name, synonym):
        text = variables.get(key, "")
        if text:
            try:
                return int(text)
            except ValueError:
                raise ConfigError(f"{key} is {text!r}; it must be a whole number") from None
    return default


def memory_of(text: str) -> int:
    """Bytes that a text like 8G, 512M or 1073741824 means; 0 for an empty one."""
    number, unit = text.strip().upper().removesuffix("IB").removesuffix("B"), ""
    if number and number[-1] in _UNITS:
        number, unit = number[:-1], number[-1]
    try:
        return int(float(number or 0) * _UNITS.get(unit, 1))
    except (ValueError, OverflowError):
        raise ConfigError(
            f"an amount of memory is {text!r}; it must be a number and K, M, G or T, as in 8G"
        ) from None


def _seconds(variables: Mapping[str, str], name: str) -> float:
    try:
        return float(variables.get(name) or 0)
    except ValueError:
        raise ConfigError(
            f"{name} is {variables[name]!r}; it must be a number of seconds"
        ) from None
