"""psfleet-launch: the command line."""

import importlib.metadata
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import click

from psfleet.errors import ConfigError
from psfleet.settings.durations import parse_seconds
from psfleet.stages.schedule import Kind
from psfleet_launch.chaos.fault_schedule import Trouble
from psfleet_launch.chaos.report import Left, Run, findings, show
from psfleet_launch.commands import certificates_command
from psfleet_launch.console.failure_report import report
from psfleet_launch.console.screen import Screen
from psfleet_launch.engines.local import LocalEngine, private_folder
from psfleet_launch.job import job_snapshots
from psfleet_launch.job.job_folder import claimed
from psfleet_launch.job.job_plan import Job, Request, job_name, requested_endpoints
from psfleet_launch.supervision.hang_detection import Watch
from psfleet_launch.supervision.standbys import Standbys
from psfleet_launch.supervision.supervisor import Limits, Supervisor

__all__ = ["main", "merged"]

_USAGE_EXIT = 2
_RESTARTS = 5  # of each server in one job
_RESTARTS_IN_CHAOS = 1000
_NEVER_JOINED = (
    "no worker has used the fleet: {script} trained nothing on the servers. Call fleet.init() and train "
    "with fleet.distributed_optimizer or psfleet.torch.convert, or use tables of psfleet.connect(); a "
    "script that needs no servers is run by itself. Job exit code 1."
)


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--servers", type=int, default=1, show_default=True, help="Server processes.")
@click.option("--workers", type=int, default=1, show_default=True, help="Worker processes.")
@click.option(
    "--sync",
    "in_rounds",
    is_flag=True,
    help="Rounds of all workers, whatever the script's strategy says.",
)
@click.option(
    "--async",
    "at_once",
    is_flag=True,
    help="Each push is applied at once, whatever the script's strategy says.",
)
@click.option(
    "--mode",
    type=click.Choice(["sync", "async", "ssp", "geo", "half-async"]),
    help="When pushes take effect, whatever the script's strategy says.",
)
@click.option(
    "--staleness", type=click.IntRange(0), help="ssp: pushes a worker may be ahead of another."
)
@click.option("--k-steps", type=click.IntRange(1), help="geo: steps between two exchanges.")
@click.option(
    "--pipeline",
    "schedule",
    type=click.Choice(get_args(Kind)),
    help="Run the program in pieces on micro-batches, in this order.",
)
@click.option(
    "--stages", type=click.IntRange(1), help="Processes of each worker; each runs its pieces."
)
@click.option("--micro-batches", type=click.IntRange(1), help="Parts that each batch is cut into.")
@click.option(
    "--recompute",
    is_flag=True,
    help="Drop activations and compute them again in the backward pass.",
)
@click.option(
    "--wire",
    type=click.Choice(["fp32", "bf16", "int8"]),
    help="How gradients and weights travel: fewer bytes for less precision.",
)
@click.option(
    "--strategy",
    "strategy_file",
    metavar="FILE",
    help="A TOML file of settings that go before the script's; flags go before it.",
)
@click.option("--tcp", is_flag=True, help="Free TCP ports on 127.0.0.1 instead of unix sockets.")
@click.option("--port", type=click.IntRange(1, 65535), help="TCP ports from this one on.")
@click.option("--insecure", is_flag=True, help="TCP in the clear: without certificates and token.")
@click.option(
    "--log-dir",
    type=click.Path(path_type=Path),
    default=Path("psfleet-logs"),
    show_default=True,
    help="Logs go to a folder in it, named after the job.",
)
@click.option("--job", "name", help="The job's name; by default the script's and four digits.")
@click.option(
    "--start-timeout",
    default=f"{Limits.start:g}s",
    metavar="120s",
    show_default=True,
    help="Until then all servers must be ready.",
)
@click.option("--no-progress", is_flag=True, help="Do not show steps, loss, rows and bytes.")
@click.option(
    "--server-script",
    is_flag=True,
    help="Servers run the script too; it branches on fleet.is_server().",
)
@click.option(
    "--durability",
    type=click.Choice(["none", "snapshot", "log", "log+fsync"]),
    default="none",
    show_default=True,
    help="What survives: with a log servers that die go on from it, with snapshots the job goes back.",
)
@click.option(
    "--snapshot-every",
    default="",
    metavar="60s|1000 rounds",
    help="Take snapshots of the whole job.",
)
@click.option(
    "--resume", default="", metavar="FOLDER", help="Go on from a snapshot, or a job's last one."
)
@click.option(
    "--restart-workers",
    type=int,
    default=0,
    show_default=True,
    help="How often a worker that dies is started again; its script runs from the start.",
)
@click.option(
    "--dead-after",
    default="0",
    metavar="30s",
    help="Go on without a worker that was silent for so long; by default its death ends the job.",
)
@click.option(
    "--replicas",
    type=int,
    default=0,
    show_default=True,
    help="1: every server has a standby, which takes over at once when it dies.",
)
@click.option(
    "--hung-after",
    default="5s",
    metavar="5s",
    show_default=True,
    help="A server or a standby that was silent for so long has hung: with --replicas or --restart-hung "
    "it is given up, else the screen says so; 0: never.",
)
@click.option(
    "--restart-hung",
    is_flag=True,
    help="With a log: kill a server that has hung and start it again from its log.",
)
@click.option(
    "--server-memory",
    default="",
    metavar="SIZE",
    help="What each server may take, as in 8G; pushes that would take more are refused.",
)
@click.option(
    "--chaos",
    type=int,
    metavar="SEED",
    help="Kill, pause and disturb the job as this seed says, then report which promises it kept.",
)
@click.option(
    "--chaos-pace",
    type=click.FloatRange(0.5),
    default=4.0,
    show_default=True,
    help="Seconds between two such faults, on average.",
)
@click.version_option(package_name="psfleet", prog_name="psfleet-launch")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def launch(
    servers: int,
    workers: int,
    in_rounds: bool,
    at_once: bool,
    mode: str | None,
    staleness: int | None,
    k_steps: int | None,
    schedule: str | None,
    stages: int | None,
    micro_batches: int | None,
    recompute: bool,
    wire: str | None,
    strategy_file: str | None,
    tcp: bool,
    port: int | None,
    insecure: bool,
    log_dir: Path,
    name: str | None,
    start_timeout: str,
    no_progress: bool,
    server_script: bool,
    durability: str,
    snapshot_every: str,
    resume: str,
    restart_workers: int,
    dead_after: str,
    replicas: int,
    hung_after: str,
    restart_hung: bool,
    server_memory: str,
    chaos: int | None,
    chaos_pace: float,
    script: str,
    arguments: tuple[str, ...],
) -> int:
    """Train SCRIPT on a cluster of processes on this machine.

    Worker 0's output is shown, all output is in the logs. Nothing is left running afterwards. The
    exit code is that of the process that failed first (128 and its number for a signal), 1 if no worker
    has used the fleet, or 2 for bad usage.
    """
    mode = _one_mode(in_rounds, at_once, mode)
    said = {
        "consistency": {"mode": mode, "staleness": staleness, "k_steps": k_steps},
        "recompute": {} if recompute else None,
        "pipeline": {"schedule": schedule, "stages": stages, "micro_batches": micro_batches},
        "wire": {"push": wire, "pull": wire},
    }
    request = Request(
        script,
        arguments,
        servers,
        workers,
        merged(strategy_file, said),
        port or (0 if tcp else None),
        server_script,
        durability,
        insecure,
        server_memory,
        snapshot_every or ("60s" if durability == "snapshot" else ""),
        job_snapshots.check_snapshot(resume) if resume else "",
        restart_workers,
        parse_seconds(dead_after, "--dead-after"),
        replicas,
        parse_seconds(hung_after, "--hung-after"),
        restart_hung,
    )
    name = name or job_name(request)
    start = parse_seconds(start_timeout, "--start-timeout")
    if not start:
        raise ConfigError(f"--start-timeout is {start_timeout!r}; servers need time to start")
    place = _Place(log_dir, Limits(start=start), not no_progress)
    if chaos is not None:
        return _under_chaos(chaos, chaos_pace, request, name, place)
    return _place(request, name, place).code


@dataclass(frozen=True)
class _Place:
    """Where jobs of this command write, how long they may take, and whether progress is shown."""

    log_dir: Path
    limits: Limits
    progress: bool


def _place(request: Request, name: str, place: _Place, trouble: Trouble | None = None) -> Run:
    """Give a request its folders and ports, and run it."""
    before = Left.now()
    with claimed(place.log_dir, name) as logs, private_folder() as folder:
        job_snapshots.clear(logs, request.resume)
        needs_credentials = request.port is not None and not request.insecure
        credentials = certificates_command.make(folder / "tls") if needs_credentials else {}
        variables = {} if trouble is None else trouble.variables
        token = secrets.token_hex(16)
        job = Job(request, name, token, folder, logs, credentials, variables)
        _check_ports(requested_endpoints(job))
        code = _run(job, place.limits, Screen(place.progress), trouble)
    notes = logs if trouble is None else trouble.folder
    return Run(code, token, notes, logs, folder, before)


def _under_chaos(seed: int, pace: float, request: Request, name: str, place: _Place) -> int:
    """Run the job under faults, in sync mode once more without; 0 if every promise is kept."""
    with tempfile.TemporaryDirectory(prefix="psfleet-chaos-") as parent:
        trouble, calm = (
            Trouble(seed, request, Path(parent, kind), is_calm=kind == "calm", pace=pace)
            for kind in ("trouble", "calm")
        )
        for one in (trouble, calm):
            one.folder.mkdir()
        run = _place(request, name, place, trouble)
        plain = None
        if {held["mode"] for held in run.held.values()} == {"sync"}:
            plain = _place(request, f"{name}-plain", place, calm)
        found = findings(run, plain, request.servers)
        kept = show(found, trouble.said(), run.logs / "chaos.json", seed)
    return 0 if kept else run.code or 1


def _one_mode(in_rounds: bool, at_once: bool, mode: str | None) -> str | None:
    """The mode that the flags name; None: they name none."""
    said = {"--sync": "sync"} if in_rounds else {}
    said |= {"--async": "async"} if at_once else {}
    said |= {f"--mode {mode}": mode} if mode else {}
    if len({*said.values()}) > 1:
        raise ConfigError(f"{' and '.join(said)} are different modes; name one")
    return next(iter(said.values()), None)


def merged(
    file: str | None, said: Mapping[str, Mapping[str, Any] | None]
) -> dict[str, dict[str, Any]]:
    """The settings of the strategy file, and over them those of the flags that were given."""
    flags: dict[str, dict[str, Any]] = {}
    for name, settings in said.items():
        given = {key: value for key, value in (settings or {}).items() if value is not None}
        if given or (settings is not None and not settings):
            flags[name] = given
    consistency = flags.get("consistency", {})
    if not file and not (len(consistency) > 1 and "mode" in consistency):
        return flags
    # Here: it loads NumPy, whose threads are better not there when processes are forked.
    from psfleet.strategy import Settings, load_strategy_file, overridden

    parts = overridden(load_strategy_file(file), flags) if file else flags
    if "mode" in parts.get("consistency", {}):  # else the script says what the rest belongs to
        Settings.from_parts({"consistency": parts["consistency"]})
    return parts


def _run(job: Job, limits: Limits, screen: Screen, trouble: Trouble | None = None) -> int:
    durability = job.request.durability
    often = _RESTARTS if trouble is None else _RESTARTS_IN_CHAOS
    restarts = often if durability in ("log", "log+fsync") else 0
    rollbacks = _RESTARTS if durability == "snapshot" else 0
    supervisor = Supervisor(
        tuple(job.servers),
        tuple(job.workers),
        limits,
        restarts,
        rollbacks,
        job.request.worker_restarts,
        spares_workers=job.request.dead_after > 0,
        standbys=Standbys() if job.request.replicas else None,
        watch=Watch(job.request.hung_after) if job.request.hung_after else None,
        restarts_hung=job.request.restart_hung,
    )
    engine = LocalEngine(job, supervisor, screen, trouble)
    screen.begin(job, importlib.metadata.version("psfleet"))
    code = engine.run()
    if code == 0 and not any(job.joined_file(worker).exists() for worker in job.workers):
        screen.end(1)
        screen.say(_NEVER_JOINED.format(script=job.request.script))
        return 1
    screen.end(code)
    if code:
        screen.say(report(job, supervisor, engine.ended_at))
    return code


def _check_ports(endpoints: Iterable[str]) -> None:
    """Refuse a TCP port that is taken while that is still one sentence."""
    for endpoint in endpoints:
        if endpoint.startswith("unix:"):
            continue
        host, _, port = endpoint.rpartition(":")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, int(port)))
            except OSError as error:
                raise ConfigError(
                    f"port {port} on {host} cannot be used ({error.strerror}); "
                    "choose another --port, or --tcp for free ones"
                ) from None


def _let_go_of_lost_streams() -> None:
    """Flush what is left to show, into nothing if the terminal is gone.

    Otherwise Python would try again at its end, fail, and exit with 120 in place of the job's code.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    try:
        code: int = launch.main(arguments, prog_name="psfleet-launch", standalone_mode=False)
        _let_go_of_lost_streams()
        return code
    except click.ClickException as error:
        message = error.format_message()
    except ConfigError as error:
        message = str(error)
    except click.Abort:
        return 130
    print(f"psfleet-launch: {message}", file=sys.stderr)
    return _USAGE_EXIT
