"""The command `psfleet-launch`: reads flags and a job file, runs the job, and returns its exit code.

`launch` reads the settings and chooses the engine. `_place` creates the job's folders. `_run` creates the
supervisor, the screen, the history and the recorder of figures. The main loop is in `job_runner.py`.
"""

import contextlib
import importlib.metadata
import os
import secrets
import selectors
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from psfleet.core.base.errors import ConfigError, FrameError
from psfleet.core.base.object_store import latest_snapshot
from psfleet.core.base.observability.trace_setup import check_tracing
from psfleet.core.base.settings.declaration import settings_of
from psfleet.core.base.settings.environment import unknown_variables
from psfleet.core.base.settings.kinds import local_path
from psfleet.core.engine.consistency import MODES, NO_MODE
from psfleet.core.runtime.strategy.distributed_strategy import PARTS
from psfleet_launch.chaos.fault_schedule import ChaosSchedule
from psfleet_launch.chaos.follower_processes import FollowerProcesses
from psfleet_launch.chaos.report import FinishedJob, Leftovers, findings, show
from psfleet_launch.commands.options import (
    GroupedCommand,
    given,
    load_job_file,
    merged,
    mode_of,
    options,
    requested,
    run_command,
    strategy_options,
)
from psfleet_launch.console.failure_report import report
from psfleet_launch.console.progress_line import frame_progress
from psfleet_launch.console.screen import Screen
from psfleet_launch.engines.launch_engine import Engine, EngineSettings, load_engine
from psfleet_launch.job import job_folder
from psfleet_launch.job.job_folder import claimed, private_folder
from psfleet_launch.job.job_plan import Job, job_name, needed, unread_variables
from psfleet_launch.job.job_request import JobRequest, Launch
from psfleet_launch.job.start_checks import check_this_machine, check_variables
from psfleet_launch.job_runner import JobRunner
from psfleet_launch.observability.fleet_reader import FleetReader, Recorder
from psfleet_launch.observability.job_history import JobHistory, heading
from psfleet_launch.observability.page_and_report import write_report
from psfleet_launch.observability.tensorboard_figures import FigureEvents
from psfleet_launch.supervision.job_events import FinishJob, Timeouts
from psfleet_launch.supervision.standbys import HangDetector, Standbys
from psfleet_launch.supervision.supervisor import Supervisor

_RESTARTS_IN_CHAOS = 1000
_NEVER_JOINED = (
    "no worker has used the fleet: {script} trained nothing on the servers. Call fleet.init() and train "
    "with fleet.distributed_optimizer or psfleet.torch.convert, or use tables of psfleet.connect(); a "
    "script that needs no servers is run by itself. Job exit code 1."
)


_SETTINGS = (*settings_of(JobRequest), *settings_of(Launch))
_PARTS = ("consistency", "pipeline", "wire")
"""Parts of a strategy that have flags."""
_STRATEGY = (
    *("--sync", "--async", "--recompute", "--strategy"),
    *(setting.flag for part in _PARTS for setting in settings_of(PARTS[part]) if setting.flag),
)
_EXAMPLES = (
    ("psfleet-launch train.py", "One server and one worker."),
    ("psfleet-launch --servers 2 --workers 4 --sync train.py", "Rounds of all workers."),
    ("psfleet-launch --durability log --restart-workers 3 train.py", "What dies comes back."),
    ("psfleet-launch --engine ssh --hosts alpha,beta train.py", "On other machines."),
    (
        "psfleet-launch --watch 9100 train.py --epochs 3",
        "With a dashboard; --epochs is the script's.",
    ),
)
_USUAL = (
    *("--servers", "--replicas", "--server-memory", "--workers", "--restart-workers"),
    *("--durability", "--snapshot-every", "--resume", "--tensorboard", "--on-nan", "--engine"),
    *("--log-dir", "--job", "--watch", "--hosts", "--sync", "--async", "--mode", "--config"),
    "--dry-run",
)


@click.command(
    cls=GroupedCommand,
    settings=_SETTINGS,
    more=EngineSettings.settings,  # which load all engines
    tables={"--tcp": "network", "--render": "engine", **dict.fromkeys(_STRATEGY, "strategy")},
    examples=_EXAMPLES,
    usual=_USUAL,
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
)
@click.option(
    "--config",
    metavar="FILE",
    help="A TOML file of these settings, see docs/settings.md; flags go before it.",
)
@options(_SETTINGS)
@click.option("--tcp", is_flag=True, help="Free TCP ports instead of unix sockets.")
@click.option(
    "--sync", is_flag=True, help="Rounds of all workers, whatever the script's strategy says."
)
@click.option(
    "--async",
    is_flag=True,
    help="Each push is applied at once, whatever the script's strategy says.",
)
@strategy_options(*_PARTS)
@click.option(
    "--render",
    type=(click.Choice(["kubernetes"]), str),
    metavar="kubernetes FOLDER",
    help="Write the files of the job to this folder, and do not run it.",
)
@click.version_option(package_name="psfleet", prog_name="psfleet-launch")
@click.argument("script", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def launch(
    context: click.Context,
    /,
    config: str | None,
    script: str | None,
    arguments: tuple[str, ...],
    tcp: bool,
    strategy: str | None,
    render: tuple[str, str] | None,
    **flags: Any,
) -> int:
    """Train SCRIPT on a cluster of processes, on this machine or on others (--engine).

    The output of worker 0 is shown; all output is in the logs. Nothing is left running afterwards. The
    exit code is that of the process that failed first (128 plus the number of a signal), 1 if no worker
    has used the fleet, or 2 for wrong usage.
    """
    check_variables()
    groups = (JobRequest, Launch, EngineSettings)
    file_values, parts = load_job_file(config, *groups) if config else ({}, {})
    values = file_values | given(context, launch.settings)
    if render is not None:
        values |= _rendered(context, *render)
    if script is not None:
        values |= {"script": script, "arguments": arguments}
    if "script" not in values:
        raise click.MissingParameter(ctx=context, param_hint="'SCRIPT'", param_type="argument")
    if tcp and not values.get("port"):
        values["port"] = 0
    if values.get("durability") == "snapshot":
        values.setdefault("snapshot_every", "60s")
    if values.get("resume"):
        values["resume"] = job_folder.check_snapshot(values["resume"])
    values["strategy"] = merged(parts, requested(context, mode_of(context)), file=strategy)
    run = Launch(**_of(Launch, values))
    engine = load_engine(run.engine)
    # A job file that names its engine may also have tables for other engines. Do not refuse their settings.
    _refuse_other_engines(
        engine, values.keys() - (file_values.keys() if "engine" in values else set())
    )
    run = replace(run, of_engine=engine.settings(**_of(engine.settings, values)))
    if engine.spans_machines:
        values.setdefault("port", 0)
    request = JobRequest(**_of(JobRequest, values))
    name = run.name or job_name(request)
    if request.trace and not engine.spans_machines:
        check_tracing(request.trace)
    if (code := engine.hand_over(request, name, run, context.obj)) is not None:
        return code
    if run.dry_run:
        return _show_placement(request, name, run)
    if not engine.spans_machines:
        check_this_machine(request)
    if engine.is_requeued():
        request = _resumed(request, name, run.log_dir / name)
    if run.chaos is not None:
        return _under_chaos(run.chaos, run, request, name)
    return _place(request, name, run).code


def _rendered(context: click.Context, engine: str, folder: str) -> dict[str, str]:
    """Return the settings that `--render ENGINE FOLDER` sets."""
    chosen = given(context, launch.settings).get("engine", engine)
    if chosen not in (engine, "join"):
        raise ConfigError(
            f"--render {engine} is for jobs whose agents run in pods, and --engine is {chosen!r}; leave one "
            "of them out"
        )
    return {"engine": engine, "render": str(local_path(folder))}


def _of(group: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: values[field.name] for field in fields(group) if field.name in values}


def _refuse_other_engines(engine: type[Engine], names: Iterable[str]) -> None:
    """Raise ConfigError for settings that only other engines have. The user probably meant another engine."""
    known = {
        field.name for group in (JobRequest, Launch, engine.settings) for field in fields(group)
    }
    for name in sorted(set(names) - known):
        unknown = next(setting for setting in EngineSettings.settings() if setting.name == name)
        names = " or ".join(
            f"--engine {engine_name}" for engine_name in EngineSettings.engines_with(name)
        )
        raise ConfigError(
            f"{unknown.flag} is of {names}, and this job is for --engine {engine.name}; use {names}, "
            f"or leave {unknown.flag} out"
        )
    if "listen" in names and not engine.spans_machines:
        raise ConfigError(
            f"--listen is for engines with agents, and this job is for --engine {engine.name}, which runs it "
            "on this machine; add --engine, or leave --listen out"
        )


def _resumed(request: JobRequest, name: str, logs: Path) -> JobRequest:
    """Return the request for a job that a batch queue has restarted, so that it starts from its last
    snapshot."""
    snapshots = job_folder.place_of(request.snapshot_store, name, logs)
    snapshot = latest_snapshot(snapshots) or request.resume
    click.echo(
        f"the job runs again, from {snapshot or 'its beginning: it has no snapshot'}", err=True
    )
    return replace(request, resume=snapshot)


def _show_placement(request: JobRequest, name: str, launch: Launch) -> int:
    with selectors.DefaultSelector() as selector:
        job = Job(request, name, "", Path(), launch.log_dir / name)
        engine = load_engine(launch.engine)(job, selector, launch)
        try:
            for machine, members in engine.placement().items():
                needs = str(needed(request, members))
                note = f" ({needs})" if needs else ""
                click.echo(f"{machine}: {', '.join(map(str, members)) or 'nothing'}{note}")
        finally:
            engine.close()
    return 0


def _place(
    request: JobRequest, name: str, launch: Launch, chaos: ChaosSchedule | None = None
) -> FinishedJob:
    kind = load_engine(launch.engine)
    before = Leftovers.now()
    with (
        claimed(launch.log_dir, name) as logs,
        private_folder() as folder,
        selectors.DefaultSelector() as selector,
    ):
        snapshots = job_folder.place_of(request.snapshot_store, name, logs)
        job_folder.clear(snapshots, request.resume)
        credentials: Mapping[str, Path] = {}
        if request.port is not None and not request.insecure:
            from psfleet.core.net.connections.certificates import (
                make_credentials,  # loads cryptography
            )

            credentials = make_credentials(folder / "tls")
        variables = {} if chaos is None else chaos.variables
        token = secrets.token_hex(16)
        job = Job(request, name, token, folder, logs, credentials, variables)
        engine = kind(job, selector, launch)
        timeouts = replace(engine.timeouts, start=launch.start_timeout)
        try:
            engine.open()
            code = _run(job, engine, timeouts, launch, chaos)
        finally:
            engine.close()
    audit, moves = (logs, 0) if chaos is None else (chaos.folder, chaos.moves)
    left = engine.left_behind()
    return FinishedJob(code, left, audit, logs, snapshots, folder, before, request.servers, moves)


def _under_chaos(seed: int, launch: Launch, request: JobRequest, name: str) -> int:
    """Run the job with faults, in sync mode also without. Return 0 if all promises were kept."""
    with tempfile.TemporaryDirectory(prefix="psfleet-chaos-") as parent:
        chaos, calm = (
            ChaosSchedule(
                seed, request, Path(parent, kind), is_calm=kind == "calm", pace=launch.chaos_pace
            )
            for kind in ("chaos", "calm")
        )
        for schedule in (chaos, calm):
            schedule.folder.mkdir()
        run = _place(request, name, launch, chaos)
        plain = None
        modes = [MODES.get(state["mode"], NO_MODE) for state in run.held.values()]
        if modes and all(mode.has_rounds for mode in modes):
            plain = _place(request, f"{name}-plain", launch, calm)
        results = findings(run, plain)
        is_kept = show(results, chaos.said(), run.logs / "chaos.json", seed)
    return 0 if is_kept else run.code or 1


def _run(
    job: Job, engine: Engine, timeouts: Timeouts, launch: Launch, chaos: ChaosSchedule | None = None
) -> int:
    often = job.request.server_restarts if chaos is None else _RESTARTS_IN_CHAOS
    restarts = often if job.request.keeps_log else 0
    rollbacks = job.request.server_restarts if job.request.durability == "snapshot" else 0
    supervisor = Supervisor(
        tuple(job.servers),
        tuple(job.workers),
        timeouts,
        restarts,
        rollbacks,
        job.request.worker_restarts,
        spares_workers=job.request.dead_after > 0,
        standbys=Standbys() if job.request.replicas else None,
        watch=HangDetector(job.request.hung_after) if job.request.hung_after else None,
        restarts_hung=job.request.restart_hung,
    )
    followers = None
    if chaos is not None:
        chaos.machines = len(engine.placement())
        followers = FollowerProcesses(chaos, job.logs, launch.chaos_followers)
    screen = Screen(launch.progress)
    runner = JobRunner(job, engine, supervisor, screen, chaos, followers)
    screen.begin(job, engine.name, importlib.metadata.version("psfleet"))
    for sentence in (*unknown_variables(), *unread_variables(job.request)):
        screen.say(f"warning   {sentence}")
    with _observed(launch, engine, runner, screen) as history:
        code = runner.run()
        if is_unused := code == 0 and not engine.has_joined():
            history.take(FinishJob(1), time.monotonic())
    if is_unused:
        screen.end(1)
        screen.say(_NEVER_JOINED.format(script=job.request.script))
        return 1
    screen.end(code)
    if code:
        screen.say(report(job, supervisor, runner.ended_at, engine.host))
    return code


@contextlib.contextmanager
def _observed(
    launch: Launch, engine: Engine, runner: JobRunner, screen: Screen
) -> Iterator[JobHistory]:
    """Context in which a job has a history and can be watched. Writes the report at its end.

    Figures are recorded only if something uses them: the progress line, `--watch`, TensorBoard or a range
    of servers.
    """
    job, version = engine.job, importlib.metadata.version("psfleet")
    machines = engine.placement()
    history = JobHistory(job.logs, heading(job, engine.name, version, machines), host=engine.host)
    runner.takers.append(history.take)
    reader = FleetReader(job.name, runner.endpoints, job.reader, history.timeline)
    listeners = [history.add_frame, lambda frame: screen.set_progress(frame_progress(frame))]
    with contextlib.ExitStack() as closing:
        closing.callback(history.close)
        if job.request.tensorboard:
            events = FigureEvents(Path(job.request.tensorboard, job.name, "job"))
            closing.callback(events.close)
            listeners.append(events.add_frame)
        recorder = Recorder(
            reader.read, listeners, read_last=reader.read_last, on_look=runner.usage.add_look
        )
        shown = launch.progress or launch.watch or job.request.tensorboard
        if shown or runner.usage.is_needed:
            runner.on_training = recorder.start
        closing.callback(reader.close)
        if launch.watch:
            from psfleet_launch.observability.watch_port import WatchPort  # loads a web server

            port = WatchPort(launch.watch, job, reader, history)
            port.open()
            closing.callback(port.close)
            screen.say(f"watch     {port.url}")
        closing.callback(recorder.stop)
        yield history
    # The job is over. An error of the disk must not change its exit code.
    with contextlib.suppress(OSError, FrameError):
        write_report(job.logs)


def _let_go_of_lost_streams() -> None:
    """Flush the standard streams. If the terminal is gone, replace them by /dev/null.

    Otherwise Python would flush them at its end, fail, and exit with 120 instead of the job's exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    code = run_command(launch, "psfleet-launch", words, (ConfigError,))
    _let_go_of_lost_streams()
    return code
