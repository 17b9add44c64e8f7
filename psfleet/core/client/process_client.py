"""`psfleet.connect()`: opens a client on a cluster, embedded, on a checkpoint, or beside a running job.

The arguments, and the environment variables that the launcher sets (PSFLEET_ROLE and others), decide which of
these. Without arguments and launcher, the tables are in this process.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.job_files import environment_of
from psfleet.core.base.logs import set_up_logs
from psfleet.core.base.settings.environment import Environment, read_environment
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.base.validation.annotations import checked
from psfleet.core.client.client import Client
from psfleet.core.engine.runtime_interface import load_runtime
from psfleet.core.graph.execution.model_files import folder_of
from psfleet.core.runtime.modes.switch import check_mode, check_wire
from psfleet.core.runtime.modes.switch import connect as connect_cluster
from psfleet.core.runtime.process_runtime import Parts, current
from psfleet.core.runtime.script_runtime import ScriptRuntime
from psfleet.core.runtime.strategy import WireSettings, resolve


@checked
def connect(
    environment: Environment | None = None,
    mode: Mode | str | None = None,
    tls: str | None = None,
    insecure: bool | None = None,
    wire: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    job: str | os.PathLike[str] | Sequence[str] | None = None,
    follow: str | os.PathLike[str] | Sequence[str] | None = None,
    snapshot: str | os.PathLike[str] | None = None,
) -> Client:
    """Connect to the cluster that the environment names, or to an embedded fleet if it names none.

        psfleet.connect()                                # a worker of the cluster, or embedded
        psfleet.connect(checkpoint="snapshots/best")     # tables of a snapshot, to read
        psfleet.connect(job="psfleet-logs/taste")        # tables of a running job, to read
        psfleet.connect(follow="psfleet-logs/taste")     # a copy of its weights, kept up to date

    A process is one worker of its fleet. After `fleet.init()`, or while another client is open, a new client
    shares that connection and its tables.

    Args:
        environment: Environment to use instead of the process's own. The client is then a separate worker.
        mode: Consistency mode, unless the launcher sets it (docs/strategies.md). In sync mode each push of
            every worker makes a round, so push all tables of a step together. None means the mode of
            `fleet.init()`, or async without it.
        tls: Folder of this process's credentials, for servers on TCP (docs/security.md).
        insecure: True to use TCP without encryption and credentials.
        wire: Number format of values during transfer, "fp32", "bf16" or "int8", unless the launcher sets it
            (docs/wire.md).
        checkpoint: Folder of a snapshot. Its tables are read in this process, without servers, and cannot be
            changed. Excludes all other arguments.
        job: Running job whose tables are read while it trains: its log folder ("psfleet-logs/NAME"), or the
            endpoints of all its servers in the order of servers, as a list or separated by commas. The client
            is no worker of the job and cannot change tables. Allows only `tls`, `insecure` and `wire` as
            further arguments (docs/prediction.md).
        follow: Running job, given like `job`, whose weights are copied to this process and kept up to date.
            Allows only `tls`, `insecure` and `snapshot` as further arguments (docs/serving.md).
        snapshot: With `follow`, first snapshot to copy: its folder or URL, or a folder of
            snapshots. None means the newest snapshot in the job's folder, if there is one.

    Raises:
        CheckpointError: The checkpoint is missing or damaged.
        ServerUnavailable: A server of the job does not answer.
        ConfigError: The process is a server, a value is unknown, or the shared connection is in another mode.
    """
    access = {"tls": tls, "insecure": insecure}
    if follow is not None:
        return _of_follower(follow, access, snapshot, environment, mode, wire, checkpoint, job)
    if snapshot is not None:
        raise ConfigError(
            f"connect() got snapshot={snapshot!r} without follow; name the job that is followed, or read the "
            "snapshot with checkpoint"
        )
    if job is not None:
        return _of_job(job, access, wire, environment, mode, checkpoint)
    if checkpoint is not None:
        return _of_checkpoint(checkpoint, environment, mode, tls, insecure, wire)
    here = environment or read_environment()
    overrides: dict[str, Any] = {name: value for name, value in access.items() if value is not None}
    here = dataclasses.replace(here, **overrides)
    if here.role == "server":
        raise ConfigError("this process is a server (PSFLEET_ROLE); connect() is for workers")
    parts: dict[str, dict[str, Any]] = {}
    if mode is not None:
        parts["consistency"] = {"mode": mode}
    if wire is not None:
        parts["wire"] = {"push": wire, "pull": wire}
    settings = resolve({"consistency": {"mode": "async"}, **parts}, here.strategy)
    if environment is None:
        set_up_logs(here.role, here.rank)

    def make(_: Parts) -> ScriptRuntime:
        if here.role is None:
            embedded: ScriptRuntime = load_runtime("embedded", wire=settings.wire)
            return embedded
        return connect_cluster(here.seat, settings.consistency, settings.wire)

    if environment is not None:
        return Client(make(parts))
    client = Client(current().hold(make, parts), current().let_go)
    try:
        if mode is not None:
            check_mode(client.runtime, settings.consistency.mode, "psfleet.connect")
        if wire is not None:
            check_wire(client.runtime, settings.wire or WireSettings(), "psfleet.connect")
    except ConfigError:
        client.close()
        raise
    return client


def _of_job(
    job: Any, access: Mapping[str, Any], wire: str | None, *conflicting_arguments: object
) -> Client:
    if any(argument is not None for argument in conflicting_arguments):
        raise ConfigError(
            f"connect() got job={job!r} and an environment, a mode or a checkpoint; the tables of a running "
            "job are read as they are, so leave the others out"
        )
    here = environment_of(job, **access)
    parts = {} if wire is None else {"wire": {"pull": wire}}
    form = resolve(parts, "").wire
    return Client(load_runtime("reader", here, wire=form))


def _of_follower(
    job: Any, access: Mapping[str, Any], snapshot: Any, *conflicting_arguments: object
) -> Client:
    if any(argument is not None for argument in conflicting_arguments):
        raise ConfigError(
            f"connect() got follow={job!r} and other settings than tls, insecure and snapshot; the weights "
            "are read as they are, so leave the others out"
        )
    from psfleet.serving.follower import Follower, FollowerRuntime  # loads the code for predictions

    return Client(FollowerRuntime(Follower(job, snapshot=os.fspath(snapshot or ""), **access)))


def _of_checkpoint(folder: Any, *conflicting_arguments: object) -> Client:
    if any(argument is not None for argument in conflicting_arguments):
        raise ConfigError(
            f"connect() got checkpoint={folder!r} and settings of a fleet; a checkpoint is read in this "
            "process, so leave the others out"
        )
    from psfleet.core.runtime.embedded_runtime import FrozenRuntime  # loads the embedded runtime

    return Client(FrozenRuntime(folder_of(folder, "connect")))
