"""Reads the environment variables of psfleet: the role of this process, its fleet and its settings.

Only this module reads them. They are declared in declared_settings.py and listed in docs/settings.md.
Variables of the reference framework (PADDLE_*) are accepted as synonyms, and PSFLEET_* takes precedence. The
launcher sets the variables of a job's processes, and passes on only the UserSettings of its own environment.
"""

import dataclasses
import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.settings.declaration import check, from_variable, from_variables, settings_of
from psfleet.core.base.settings.declared_settings import (
    FaultSettings,
    FleetSettings,
    JobSettings,
    ProcessSettings,
    StageSettings,
    UserSettings,
)
from psfleet.core.base.settings.kinds import MOST_SERVERS
from psfleet.core.base.settings.server_endpoints import check_endpoint

_SIZES = (
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "PADDLE_TRAINERS_NUM",
    "PSFLEET_WORKERS",
)
"""Variables in which other launchers (torchrun, mpirun, paddle) give the number of processes they started."""
# PSFLEET_* variables that are not settings. The first line: variables of tests, benchmarks,
# docker-compose.yml, and the launcher's mark on its processes. The second line: variables that Kubernetes
# creates for a service whose name begins with psfleet.
_OTHERS = re.compile(
    r"PSFLEET_((TEST|TORTURE|CALL_PATH|IMAGE|SCRIPT|JOB_ID|(SERVER|WORKER)_(CORES|MEMORY))(_.*)?"
    r"|(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_.*)?))"
)


@dataclass(frozen=True)
class Environment(ProcessSettings, UserSettings, JobSettings, StageSettings, FleetSettings):
    """Settings of this process, read from environment variables. `role` is None outside of a fleet."""

    def __post_init__(self) -> None:
        if self.role is None:
            return
        check(self, attrgetter("env"))
        if self.tls and self.insecure:
            raise ConfigError(
                f"PSFLEET_TLS is {self.tls!r} and PSFLEET_INSECURE is 1; unset one of them"
            )
        if not self.servers:
            raise ConfigError(
                f"PSFLEET_ROLE is {self.role!r} but PSFLEET_SERVERS is empty; "
                "list the servers' endpoints, separated by commas"
            )
        if len(self.servers) > MOST_SERVERS:
            raise ConfigError(
                f"PSFLEET_SERVERS lists {len(self.servers):,} endpoints; a fleet has at most {MOST_SERVERS:,}"
            )
        if self.role == "server" and self.keeps_log and not self.log_folder:
            raise ConfigError(
                f"PSFLEET_DURABILITY is {self.durability!r} but PSFLEET_LOG_FOLDER is "
                "empty; name the folder for the servers' logs"
            )
        if self.role == "worker":
            self._check_stages()
        seats = len(self.servers) if self.role == "server" else self.workers
        if not 0 <= self.rank < seats:
            raise ConfigError(
                f"PSFLEET_RANK is {self.rank}, but the fleet has {self.role}s 0 to {seats - 1}"
            )

    @property
    def keeps_log(self) -> bool:
        """True if servers write logs, so that a single server can be restarted."""
        return self.durability in ("log", "log+fsync")

    @property
    def snapshot_folder(self) -> str:
        """Local folder where server 0 keeps the job's snapshots, or empty if there is none."""
        beside = os.path.join(self.log_folder, "snapshots") if self.log_folder else ""
        return self.snapshots or beside

    @property
    def snapshot_place(self) -> str:
        """Folder or URL where the job keeps its snapshots, or empty if there is none."""
        return self.snapshot_store or self.snapshot_folder

    @property
    def event_folder(self) -> str:
        """Folder for this process's TensorBoard event files, or empty if it writes none."""
        if not self.tensorboard:
            return ""
        name = f"{self.role or 'worker'}.{self.seat.rank}"
        return os.path.join(self.tensorboard, self.job, name)

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
    def heartbeat_seconds(self) -> float:
        """Seconds between two heartbeats of a process."""
        return min(1.0, self.dead_after / 5) if self.dead_after else 1.0

    @property
    def seat(self) -> "Environment":
        """These settings as servers see the process: each pipeline stage of a worker is a worker.

        For example, a fleet of 2 workers with 3 stage processes each has 6 workers for the servers, with
        ranks (*seats*) 0 to 5.
        """
        copies = self.stage_copies or (1,) * self.stages
        own_index = sum(copies[: self.stage]) + self.copy
        return dataclasses.replace(
            self,
            rank=self.rank * sum(copies) + own_index,
            stage=0,
            copy=0,
            stages=1,
            workers=self.workers * sum(copies),
            stage_copies=(),
            stage_endpoints=(),
        )


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Return the settings of this process according to environment variables.

    Raises:
        ConfigError: A value is missing, of the wrong kind or out of range.
    """
    from_variables(FaultSettings, variables)  # report a mistake now, not at the first crash point
    role = from_variable(FleetSettings, "role", variables)
    if role is None:
        _check_no_fleet(variables)
        return Environment(
            strategy=from_variable(UserSettings, "strategy", variables),
            rules=from_variable(JobSettings, "rules", variables),
            tensorboard=from_variable(JobSettings, "tensorboard", variables),
        )
    other_rank_variable = "PADDLE_PSERVER_ID" if role == "worker" else "PADDLE_TRAINER_ID"
    # The reference has a variable of the rank for each role. Ignore the variable of the other role.
    values = from_variables(Environment, {**variables, other_rank_variable: ""})
    for endpoint in values.get("servers", ()):
        check_endpoint(endpoint)
    if values.get("servers"):
        _check_workers(variables, values)
        if "rank" not in values:
            values["rank"] = _own_rank(variables, role, values)
    return Environment(**values)


def reader_environment(servers: Sequence[str]) -> Environment:
    """Return the settings of a process that connects to a fleet without a role in it.

    Raises:
        ConfigError: A value is not allowed.
    """
    groups = (UserSettings, JobSettings, ProcessSettings)
    values = {name: value for g in groups for name, value in from_variables(g, os.environ).items()}
    return Environment(**values, servers=tuple(servers))


def _check_no_fleet(variables: Mapping[str, str]) -> None:
    """Raise an error if there is no role, but the variables name servers or several processes were started.

    Without this check, each process would silently train its own copy of the model.
    """
    for name in ("PSFLEET_SERVERS", "PADDLE_PSERVERS_IP_PORT_LIST"):
        if variables.get(name):
            raise ConfigError(
                f"{name} is {variables[name]!r} but PSFLEET_ROLE is not set; set it to worker (or "
                f"server), or unset {name} to train in this process alone"
            )
    for name in _SIZES:
        size = variables.get(name, "")
        if size.isdecimal() and int(size) > 1:
            raise ConfigError(
                f"{name} is {size!r}, so {size} processes were started, and no fleet connects them: each "
                f"would train a copy of its own; start the script with psfleet-launch --workers {size}, or "
                f"unset {name} to train in this process alone"
            )


def unknown_variables(variables: Mapping[str, str] = os.environ) -> list[str]:
    """Return a sentence for each variable that begins with PSFLEET_ and that psfleet does not know."""
    groups = (Environment, FaultSettings)
    known = [
        declared.env.removeprefix("PSFLEET_") for group in groups for declared in settings_of(group)
    ]
    sentences = []
    for name in variables:
        suffix = name.removeprefix("PSFLEET_")
        if suffix == name or suffix in known or _OTHERS.fullmatch(name):
            continue
        near = difflib.get_close_matches(suffix, known, 1)
        hint = f"is PSFLEET_{near[0]} meant?" if near else "docs/settings.md lists all variables"
        sentences.append(f"{name} is set, and psfleet has no such variable; {hint}")
    return sentences


def check_alone(variables: Mapping[str, str] = os.environ) -> None:
    """Check that this process is to train alone. Called when a script has not called `fleet.init()`.

    Raises:
        ConfigError: The environment describes a fleet.
    """
    here = read_environment(variables)
    if here.role is not None:
        count = here.workers if here.role == "worker" else len(here.servers)
        raise ConfigError(
            f"PSFLEET_ROLE says that this process is {here.role} {here.rank} of {count}, but the script "
            "has not called fleet.init() and would train alone; call it before anything else of "
            "psfleet, or unset PSFLEET_ROLE"
        )


def on_nan() -> str:
    """Return the policy for a loss or gradient that is NaN or infinite: say, stop, skip or ignore.

    Raises:
        ConfigError: PSFLEET_ON_NAN has another value.
    """
    return str(from_variable(UserSettings, "on_nan", os.environ) or "say")


def threads() -> int:
    """Return the number of BLAS threads in OMP_NUM_THREADS, which the launcher sets. 1 if it is not set."""
    text = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return max(int(text), 1) if text.isdecimal() else 1


def _check_workers(variables: Mapping[str, str], values: Mapping[str, Any]) -> None:
    """Check that PADDLE_* variables that give a role also give the number of workers."""
    if "workers" not in values and not variables.get("PSFLEET_ROLE"):
        raise ConfigError(
            f"TRAINING_ROLE is {variables.get('TRAINING_ROLE')!r} and PADDLE_TRAINERS_NUM is not set; set it "
            "to the number of workers"
        )


def _own_rank(variables: Mapping[str, str], role: str, values: Mapping[str, Any]) -> int:
    """Return the rank of a process that has no rank variable, from its address or the number of processes.

    Raises:
        ConfigError: The rank does not follow from them. It is not guessed, because two processes would then
            both take rank 0.
    """
    servers = values["servers"]
    own_address = f"{variables.get('POD_IP', '')}:{variables.get('PADDLE_PORT', '')}"
    if (
        role == "server" and own_address in servers
    ):  # the reference tells a server its address, not its index
        return int(servers.index(own_address))
    count = len(servers) if role == "server" else values.get("workers", 1)
    if not variables.get("PSFLEET_ROLE"):
        by_address = (
            f"POD_IP:PADDLE_PORT (now {own_address!r}) to one of PADDLE_PSERVERS_IP_PORT_LIST"
        )
        missing = by_address if role == "server" else "PADDLE_TRAINER_ID"
    elif count > 1:
        missing = f"PSFLEET_RANK, from 0 to {count - 1}"
    else:
        return 0
    raise ConfigError(
        f"this process is one of {count} {role}(s) and nothing says which; set {missing}"
    )
