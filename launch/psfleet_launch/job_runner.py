"""Main loop of the launcher: passes events of the engine to the supervisor, and performs the supervisor's
actions.

The supervisor decides, the engine starts and signals processes, and the runner connects them. The runner
itself handles signals to the launcher, the screen, chaos, and changes of the number of servers. The loop
runs in the main thread, four times a second or when a file descriptor becomes readable. It passes every
event and action, in order, to the functions in `takers`, such as the job's history.

A full disk does not end a job. Request files and the file of moved servers are then written later, or not
at all.
"""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import TypeGuard

from psfleet.core.base.job_files import SERVERS, write_running_job
from psfleet.core.base.scaling_files import write_scale
from psfleet.core.base.settings.kinds import MOST_SERVERS
from psfleet.core.base.settings.server_endpoints import has_ports
from psfleet.core.base.threads import wakes_on_signals
from psfleet_launch.chaos.fault_schedule import ChaosSchedule
from psfleet_launch.chaos.follower_processes import FollowerProcesses
from psfleet_launch.console.screen import Screen, StandbyNotice
from psfleet_launch.engines.launch_engine import Engine
from psfleet_launch.job.job_folder import FinalSnapshot
from psfleet_launch.job.job_plan import Job, Member, Told
from psfleet_launch.job.spawn import children_without_grpc
from psfleet_launch.observability.fleet_reader import ServerUsageWatch
from psfleet_launch.observability.job_timeline import exit_words
from psfleet_launch.supervision.job_events import (
    Action,
    ClockTick,
    Event,
    FinishJob,
    KillHung,
    Output,
    Phase,
    ProcessExited,
    ReportHung,
    ReportLostWorker,
    ReportMissingLeave,
    Said,
    SendSignal,
    ServerReady,
    ServersMoved,
    Shown,
    StartProcesses,
    StopRequested,
)
from psfleet_launch.supervision.scaling_requests import ScalingRequests, ScalingStep
from psfleet_launch.supervision.standbys import PromoteStandby, ReleaseStandbys
from psfleet_launch.supervision.supervisor import Supervisor

Taker = Callable[[Event | Shown | Action, float], None]

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_REFRESH = (
    0.25  # seconds between two updates of the progress, and between two looks of the hang detector
)


class JobRunner:
    """Runs one job. Call `run` from the main thread, because it handles signals.

    Attributes:
        ended_at: Time at which the last process of a member ended.
        takers: Functions to call with every event and action, and its time on the monotonic clock.
        on_training: Functions to call when the workers were started, and when the number of servers has
            changed.
        endpoints: Endpoints of the servers, in order of rank. For a server that is not ready, the requested
            endpoint.
        usage: Watches the load of the servers, and requests another number of servers if --servers is a
            range.
    """

    def __init__(
        self,
        job: Job,
        engine: Engine,
        supervisor: Supervisor,
        screen: Screen,
        chaos: ChaosSchedule | None = None,
        followers: FollowerProcesses | None = None,
    ) -> None:
        self.ended_at: dict[Member, datetime] = {}
        self._job = job
        self._engine = engine
        self._supervisor = supervisor
        self._screen = screen
        self._chaos, self._followers = chaos, followers
        self.takers: list[Taker] = []
        self.on_training: Callable[[], None] = lambda: None
        self.endpoints = engine.endpoints()
        self._ends: dict[Member, str] = {}  # how a member's last process ended, in words
        self._answering: set[Member] = set()  # servers and standbys that are ready
        self._asked: list[
            int
        ] = []  # numbers of signals to the launcher, appended by the signal handler
        self._final: FinalSnapshot | None = None
        self._exit_code: int | None = None
        self._generation = 0
        self._resume = job.request.resume
        self._notice = StandbyNotice()
        self._leaving: set[Member] = (
            set()
        )  # members that were removed from the job and have not ended yet
        self.usage = ServerUsageWatch(job)
        self._unanswered = ""  # why the last request for servers cannot be answered, as was said
        self._scaling = ScalingRequests(
            job.logs, self._too_many, engine.asked_endpoint, self._prepared_standbys
        )
        if chaos is not None:
            chaos.scales = not self._too_many(job.request.servers)

    def run(self) -> int:
        """Start the job, wait for its end, and return its exit code. No process is left running."""
        try:
            with wakes_on_signals(self._engine.selector, _ENDING, self._asked.append):
                self._perform(self._supervisor.begin(time.monotonic()))
                while self._exit_code is None:
                    self._step()
        finally:
            if self._followers is not None:
                self._followers.close()
            self._engine.sweep()
            (self._job.logs / SERVERS).unlink(missing_ok=True)
            while self._wait(0):
                self._show(self._engine.events())
        return self._exit_code

    def _step(self) -> None:
        seconds = max(0.0, self._supervisor.deadline - time.monotonic())
        self._wait(min(_REFRESH, self._engine.pause, seconds))
        for event in [*self._happened(), ClockTick()]:
            self._perform(self._supervisor.handle(event, time.monotonic()))
        if self._supervisor.phase is Phase.TRAINING:
            self._scale()
        # After `_scale`, so that faults are injected into members that the job has now.
        if self._chaos is not None:
            self._make(self._chaos)
        if self._supervisor.phase is Phase.TRAINING:
            standbys = self._supervisor.standbys
            if standbys and (line := self._notice.look(standbys, time.monotonic())):
                self._screen.say(line)
            self._screen.refresh()

    def _wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for registered files, read those that are readable, and return
        whether any was.
        """
        ready = self._engine.selector.select(timeout)
        for key, _ in ready:
            key.data()
        return bool(ready)

    def _happened(self) -> list[Event]:
        stops: list[Event] = [*self._stops()]
        events = self._engine.events()
        for event in [*stops, *events]:
            self._tell(event)
            match event:
                case ProcessExited(member, code, cause=cause):
                    self.ended_at[member] = datetime.now()
                    self._ends[member] = exit_words(code, cause)
                    self._answering.discard(member)
                    self._leaving.discard(member)
                case ServerReady(member, endpoint):
                    self._answering.add(member)
                    # Ignore members that do not belong to the job: a new server of a move that is not
                    # decided yet, and a standby that was dropped by a move while it was starting. They must
                    # not replace an endpoint in use.
                    if member in self._supervisor.alive:
                        self.endpoints[member.rank] = endpoint
        new_server_events = [event for event in events if self._is_of_new_server(event)]
        for event in new_server_events:
            self._scaling.take(event)
            if isinstance(event, ServerReady) and self._supervisor.standbys is not None:
                self._supervisor.standbys.is_ready(event.member)
        return [*stops, *self._show([event for event in events if event not in new_server_events])]

    def _is_of_new_server(self, event: Event | Shown) -> TypeGuard[ProcessExited | ServerReady]:
        """Return whether the event is about a new server or standby that does not belong to the job yet."""
        return isinstance(event, ProcessExited | ServerReady) and self._scaling.is_new(event.member)

    def _tell(self, item: Event | Shown | Action) -> None:
        for take in self.takers:
            take(item, time.monotonic())

    def _stops(self) -> Iterator[StopRequested]:
        """Yield the requests to stop that are due: after a signal at once, after SIGUSR1 when a snapshot is
        complete."""
        for _ in range(len(self._asked)):
            number = self._asked.pop(0)
            if number != signal.SIGUSR1 or not self._takes_snapshot():
                yield StopRequested(number)
        if self._final is not None and self._final.outcome:
            self._screen.say(self._final.outcome)
            self._final = None
            yield StopRequested(signal.SIGUSR1)

    def _takes_snapshot(self) -> bool:
        """Begin a last snapshot if the job is training and keeps snapshots. Return whether one is under
        way."""
        request = self._job.request
        if not request.keeps_snapshots:
            self._screen.say(
                "the job keeps no snapshots, so it ends without one; see --snapshot-every"
            )
        elif self._supervisor.phase is Phase.TRAINING:
            if self._final is None:
                self._screen.say("SIGUSR1: the job takes a snapshot, then it ends")
                children_without_grpc()
                self._final = FinalSnapshot(self.endpoints[0], self._job.reader)
            return True
        return False

    def _show(self, events: Sequence[Event | Shown]) -> list[Event]:
        """Show the output and messages among these events, and return the events for the supervisor."""
        for event in events:
            match event:
                case Output(data, is_error):
                    self._screen.output(data, is_error)
                case Said(member, text):
                    self._screen.say(f"{self._named(member)}: {text}" if member else text)
        return [event for event in events if not isinstance(event, Output | Said)]

    def _named(self, member: Member) -> str:
        """Return the member's name. If the job may have several machines, include the name of the machine."""
        where = f" on host {self._engine.host(member)}" if self._engine.spans_machines else ""
        return f"{member}{where}"

    def _make(self, chaos: ChaosSchedule) -> None:
        """Inject the faults that are due. (ChaosSchedule only chooses them.)"""
        is_training, standbys = self._supervisor.phase is Phase.TRAINING, self._supervisor.standbys
        servers = {member for member in self._supervisor.alive if member.role == "server"}
        living = self._supervisor.alive - servers | servers & self._answering
        # With standbys but without logs, the death of a new server may end the job. Do not inject faults
        # into it.
        if standbys is None or self._job.request.keeps_log:
            living |= self._scaling.ready
        for fault in chaos.due(
            time.monotonic(),
            living,
            trains=is_training,
            standbys=standbys,
            moving=self._scaling.under_way,
            whole=servers <= self._answering and not self._scaling.starts,
        ):
            if fault.text:
                self._say(f"chaos: {fault.text}")
            if fault.servers:
                write_scale(self._job.logs, fault.servers)
            elif fault.takes_machine:
                self._engine.kill_machine(fault.member)
            elif fault.signal:
                self._engine.send(fault.member, fault.signal)
        if is_training and self._followers is not None:
            for text in self._followers.due(time.monotonic()):
                self._say(text)

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, StartProcesses):
                self._start(action.members)
            self._tell(
                action
            )  # after the start, because only now the machine of a process is known
            match action:
                case SendSignal(members, number):
                    for member in members:
                        self._engine.send(member, number)
                case KillHung(member, seconds):
                    self._screen.say(f"{member} was silent for {seconds:g} s and is killed")
                    self._engine.send(member, signal.SIGKILL)
                case ReportHung(member, seconds):
                    self._screen.say(
                        f"{member} has been silent for {seconds:g} s{self._left_alone()}"
                    )
                case ReportLostWorker(member, left=left):
                    without = "it had left the fleet" if left else "the job goes on without it"
                    self._screen.say(f"{member} ended with {self._ends[member]}; {without}")
                case ReportMissingLeave(member):
                    self._screen.say(
                        f"{member} ended without leaving the fleet; workers that wait for it "
                        "give up after minutes"
                    )
                case PromoteStandby():
                    self._promote(action)
                case ReleaseStandbys(member, attach):
                    self._engine.command(member, f"release {attach}")
                case FinishJob(code):
                    self._exit_code = code

    def _too_many(self, servers: int) -> str:
        """Return why the job cannot have this number of servers, or "" if it can."""
        request = self._job.request
        if not 1 <= servers <= MOST_SERVERS:
            return f"{servers} servers are wanted; ask for 1 to {MOST_SERVERS}"
        if request.port and not has_ports(request.port, servers):
            return f"--port is {request.port}, and {servers} servers from there on have no ports"
        return ""

    def _prepared_standbys(self, servers: int) -> tuple[Member, ...]:
        """Return the standbys to start before a change to this number of servers. Empty for a job with logs.

        These standbys receive the moved rows at the same time as the future servers. In a job with logs the
        rows are safe on disk, so the new standbys are started after the change.
        """
        standbys = self._supervisor.standbys
        return () if standbys is None or self._job.request.keeps_log else standbys.prepare(servers)

    def _watch_usage(self) -> None:
        """Begin to choose the number of servers by their load, if --servers is a range and the number can
        change."""
        count = self._job.request.server_count
        if count.most > count and (why := self._too_many(count.most)):
            self._say(f"the number of servers stays as it is: {why}")
        else:
            self.usage.follow(len(self.endpoints))

    def _scale(self) -> None:
        """Continue a change of the number of servers, if one was requested."""
        # Wait for removed servers to end. A new server would have the same name as a removed one with its
        # rank, and the exit of the removed one would be attributed to the new one.
        if self._leaving:
            return
        # Begin a request only when all servers are ready, because their endpoints must be known.
        if not self._scaling.under_way and not self._supervisor.primaries <= self._answering:
            return
        try:
            if line := self.usage.ask():
                self._say(line)
            self._take_step(self._scaling.step(self.endpoints))
            why = ""
        except OSError as error:
            why = str(error)
        # Once for each reason: the step is tried again many times a second.
        if why and why != self._unanswered:
            self._screen.say(f"the request for another number of servers cannot be answered: {why}")
        self._unanswered = why

    def _keep_servers(self, member: Member) -> None:
        """Give up an undecided change of the number of servers, because a process has been started that
        does not have the moved rows.

        A new standby matters only in a job without logs. There it would have a higher number than the
        standby that was prepared for the time after the move.
        """
        follows = self._follows(member)
        takes_place = member.role == "server" and not (follows and self._job.request.keeps_log)
        if takes_place and self._scaling.under_way:
            newcomer = "standby" if follows else "process"
            why = f"{member.seat} has a new {newcomer}; ask once more"
            with contextlib.suppress(OSError):  # `ScalingRequests.step` tries to write it again
                self._take_step(self._scaling.give_up(why, self.endpoints))

    def _take_step(self, step: ScalingStep) -> None:
        if self._chaos is not None:
            self._chaos.follow(step)
        for member in step.start:
            endpoints = self._scaling.endpoints(self.endpoints)
            takes_commands = self._supervisor.standbys is not None
            self._engine.spawn(member, Told(endpoints, takes_commands=takes_commands))
            self._tell(StartProcesses((member,)))
        for member in step.standbys:
            assert self._supervisor.standbys is not None
            before = self._supervisor.standbys.standby.get(member.rank)
            start = Told(step.endpoints, follows=True, takes_commands=True, displaces=before)
            self._engine.spawn(member, start)
            self._tell(StartProcesses((member,)))
        if step.servers is not None:
            self.endpoints[:] = step.endpoints
            self._tell(ServersMoved(len(step.servers)))
            self._rescale(step.servers)
            self._publish()
            self.usage.follow(len(self.endpoints))
            self.on_training()
        self._leaving |= {*step.end}
        for member in step.given_up:
            self._engine.forget(member)
        for member in step.end:
            self._engine.send(member, signal.SIGTERM)
        if step.said:
            self._engine.share()
            self._say(step.said)

    def _rescale(self, servers: tuple[Member, ...]) -> None:
        """Make the supervisor and the engine use these servers, and perform the resulting actions."""
        supervisor = self._supervisor
        primaries, members = supervisor.primaries, {*supervisor.servers, *supervisor.alive}
        actions = supervisor.rescale(servers)
        self._leaving |= primaries - supervisor.primaries
        for member in members - {*servers} - supervisor.alive:
            self._engine.forget(member)
        self._perform(actions)

    def _say(self, line: str) -> None:
        message = Said(None, line)
        self._tell(message)
        self._show([message])

    def _publish(self) -> None:
        """Write the endpoints of the servers to the job's folder. Readers and followers read the file."""
        known = self._job.known_at(self.endpoints, self._engine.spans_machines)
        with contextlib.suppress(
            OSError
        ):  # a full disk keeps readers away, but must not end the job
            write_running_job(self._job.logs, known)

    def _left_alone(self) -> str:
        """Return the reason, in words, why a silent server is not killed."""
        if self._job.request.keeps_log:
            return "; workers wait for it. --restart-hung would have it go on from its log"
        return "; workers wait for it. What it has in memory would be lost with it, so it is not killed"

    def _start(self, members: tuple[Member, ...]) -> None:
        if self._supervisor.generation > self._generation:
            self._go_back()
        for member in members:
            self._keep_servers(member)
            if member in self._supervisor.restarted and member in self._ends:
                self._screen.say(self._restart(member))
            self.ended_at.pop(member, None)
            self._engine.spawn(member, self._told(member))
        if members == self._supervisor.workers:
            self._publish()
            self._screen.servers_ready()
            self._watch_usage()
            self.on_training()

    def _told(self, member: Member) -> Told:
        return Told(
            self.endpoints,
            self._resume,
            follows=self._follows(member),
            takes_commands=self._supervisor.standbys is not None and member.role == "server",
        )

    def _follows(self, member: Member) -> bool:
        standbys = self._supervisor.standbys
        return standbys is not None and standbys.follows(member)

    def _promote(self, promote: PromoteStandby) -> None:
        self._keep_servers(promote.member)
        self._answering.discard(promote.member)
        # Remove the old ready file before sending the command. The next ready file then means that the
        # takeover is complete.
        self._engine.expect(promote.member)
        self._engine.command(promote.member, f"promote {promote.term}")
        end = self._ends.get(promote.before)
        why = "cannot be reached" if end is None else f"ended with {end}"
        self._screen.say(f"{promote.before} {why}; {promote.member} takes over")

    def _go_back(self) -> None:
        """Prepare a restart of the whole job from its last snapshot. All processes have ended."""
        self._generation = self._supervisor.generation
        if self._chaos is not None:
            self._chaos.went_back()
        self.ended_at.clear()
        self._ends.clear()
        self._resume = self._engine.last_snapshot() or self._job.request.resume
        self._screen.say(
            f"a server died; generation {self._generation} starts from "
            f"{self._resume or 'the beginning: there is no snapshot yet'}"
        )

    def _restart(self, member: Member) -> str:
        allowed, remedy = self._supervisor.restarts, "it goes on from its log"
        if member.role == "worker":
            allowed, remedy = self._supervisor.worker_restarts, "a new process takes its seat"
        count = self._supervisor.restarted[member]
        end = self._ends[member]
        return f"{member} ended with {end}; {remedy} (restart {count} of {allowed})"
