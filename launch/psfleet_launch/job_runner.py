"""Runs a job: performs the supervisor's actions through an engine, and passes it the events."""

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
_REFRESH = 0.25  # seconds between two pictures of the progress


class JobRunner:
    """Runs one job. The calling thread must be the main thread: it takes the signals.

    Attributes:
        ended_at: Time at which the last process of a member ended.
        takers: Are given all that happens and is done, with the time of the monotonic clock.
        on_training: Is called when the workers have been started, and when the number of servers has changed.
        endpoints: Endpoints of the servers, in order of rank, as far as they are known.
        usage: Gets looks at the job, and asks for another number of servers.
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
        self._ends: dict[Member, str] = {}  # how they have ended
        self._answering: set[Member] = set()
        self._asked: list[int] = []
        self._final: FinalSnapshot | None = None
        self._exit_code: int | None = None
        self._generation = 0
        self._resume = job.request.resume
        self._notice = StandbyNotice()
        self._leaving: set[Member] = set()  # servers that the job has no more, until they end
        self.usage = ServerUsageWatch(job)
        self._scaling = ScalingRequests(
            job.logs, self._too_many, engine.asked_endpoint, self._prepared_standbys
        )
        if chaos is not None:
            chaos.scales = not self._too_many(job.request.servers)

    def run(self) -> int:
        """Start the job, see it through and return its exit code; nothing is left running."""
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
        if self._chaos is not None:  # which strikes those that the job has now
            self._make(self._chaos)
        if self._supervisor.phase is Phase.TRAINING:
            standbys = self._supervisor.standbys
            if standbys and (line := self._notice.look(standbys, time.monotonic())):
                self._screen.say(line)
            self._screen.refresh()

    # -- what happens ----------------------------------------------------------------------------

    def _wait(self, timeout: float) -> bool:
        """Wait for anything to read, and have it read. Was there any?"""
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
                    # Not a new server, nor a standby that a move has dropped while it started.
                    if member in self._supervisor.alive:
                        self.endpoints[member.rank] = endpoint
        theirs = [event for event in events if self._is_of_new_server(event)]
        for event in theirs:
            self._scaling.take(event)
            if isinstance(event, ServerReady) and self._supervisor.standbys is not None:
                self._supervisor.standbys.is_ready(event.member)
        return [*stops, *self._show([event for event in events if event not in theirs])]

    def _is_of_new_server(self, event: Event | Shown) -> TypeGuard[ProcessExited | ServerReady]:
        """Return whether it has happened to a server that is none of the job's yet."""
        return isinstance(event, ProcessExited | ServerReady) and self._scaling.is_new(event.member)

    def _tell(self, item: Event | Shown | Action) -> None:
        for take in self.takers:
            take(item, time.monotonic())

    def _stops(self) -> Iterator[StopRequested]:
        """Signals that end the job now; SIGUSR1 ends it once there is a snapshot."""
        for _ in range(len(self._asked)):
            number = self._asked.pop(0)
            if number != signal.SIGUSR1 or not self._takes_snapshot():
                yield StopRequested(number)
        if self._final is not None and self._final.outcome:
            self._screen.say(self._final.outcome)
            self._final = None
            yield StopRequested(signal.SIGUSR1)

    def _takes_snapshot(self) -> bool:
        """Have a last snapshot taken, if the job keeps any and trains; whether it is under way."""
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
        """Show what members write and say; the other events."""
        for event in events:
            match event:
                case Output(data, is_error):
                    self._screen.output(data, is_error)
                case Said(member, text):
                    self._screen.say(f"{self._named(member)}: {text}" if member else text)
        return [event for event in events if not isinstance(event, Output | Said)]

    def _named(self, member: Member) -> str:
        """The member, and its machine where there are several."""
        where = f" on host {self._engine.host(member)}" if self._engine.spans_machines else ""
        return f"{member}{where}"

    def _make(self, chaos: ChaosSchedule) -> None:
        """Do what chaos wants now; processes are stopped and killed from here alone."""
        trains, standbys = self._supervisor.phase is Phase.TRAINING, self._supervisor.standbys
        servers = {member for member in self._supervisor.alive if member.role == "server"}
        living = self._supervisor.alive - servers | servers & self._answering
        if standbys is None or self._job.request.keeps_log:  # else such a death may end the job
            living |= self._scaling.ready
        for fault in chaos.due(
            time.monotonic(),
            living,
            trains=trains,
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
        if trains and self._followers is not None:
            for text in self._followers.due(time.monotonic()):
                self._say(text)

    # -- what is done ----------------------------------------------------------------------------

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, StartProcesses):
                self._start(action.members)
            self._tell(action)  # which machine a process has got is known now
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

    # -- another number of servers ----------------------------------------------------------------

    def _too_many(self, servers: int) -> str:
        """Why the job cannot have so many servers; empty: it can."""
        request = self._job.request
        if not 1 <= servers <= MOST_SERVERS:
            return f"{servers} servers are wanted; ask for 1 to {MOST_SERVERS}"
        if request.port and not has_ports(request.port, servers):
            return f"--port is {request.port}, and {servers} servers from there on have no ports"
        return ""

    def _prepared_standbys(self, servers: int) -> tuple[Member, ...]:
        """Standbys of so many servers, which take rows while these move. Logs do without."""
        standbys = self._supervisor.standbys
        return () if standbys is None or self._job.request.keeps_log else standbys.prepare(servers)

    def _watch_usage(self) -> None:
        """Choose the number of servers from now on, if the user leaves that open and it can change."""
        count = self._job.request.server_count
        if count.most > count and (why := self._too_many(count.most)):
            self._say(f"the number of servers stays as it is: {why}")
        else:
            self.usage.follow(len(self.endpoints))

    def _scale(self) -> None:
        """Do what there is to be done for another number of servers."""
        if self._leaving:  # the end of one would be taken for that of a new one in its place
            return
        if not self._scaling.under_way and not self._supervisor.primaries <= self._answering:
            return  # it is not known yet where they are
        try:
            if line := self.usage.ask():
                self._say(line)
            self._take_step(self._scaling.step(self.endpoints))
        except OSError as error:
            self._screen.say(
                f"the request for another number of servers cannot be answered: {error}"
            )

    def _keep_servers(self, member: Member) -> None:
        """Give up what is not decided: this process takes a server's place, and holds its rows of before.

        A standby does so without logs: it would have a later number than the one that follows after the move.
        """
        follows = self._follows(member)
        counts = member.role == "server" and not (follows and self._job.request.keeps_log)
        if counts and self._scaling.under_way:
            what = "standby" if follows else "process"
            why = f"{member.seat} has a new {what}; ask once more"
            with contextlib.suppress(OSError):  # it is written later
                self._take_step(self._scaling.give_up(why, self.endpoints))

    def _take_step(self, step: ScalingStep) -> None:
        if self._chaos is not None:
            self._chaos.follow(step)
        for member in step.start:
            endpoints = self._scaling.endpoints(self.endpoints)
            takes = self._supervisor.standbys is not None
            self._engine.spawn(member, Told(endpoints, takes_commands=takes))
            self._tell(StartProcesses((member,)))
        for member in step.standbys:
            assert self._supervisor.standbys is not None
            before = self._supervisor.standbys.standby.get(member.rank)
            told = Told(step.endpoints, follows=True, takes_commands=True, displaces=before)
            self._engine.spawn(member, told)
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
        """The job has these servers from now on."""
        supervisor = self._supervisor
        primaries, members = supervisor.primaries, {*supervisor.servers, *supervisor.alive}
        actions = supervisor.rescale(servers)
        self._leaving |= primaries - supervisor.primaries
        for member in members - {*servers} - supervisor.alive:
            self._engine.forget(member)
        self._perform(actions)

    def _say(self, line: str) -> None:
        said = Said(None, line)
        self._tell(said)
        self._show([said])

    def _publish(self) -> None:
        """Tell readers where the servers are."""
        known = self._job.known_at(self.endpoints, self._engine.spans_machines)
        with contextlib.suppress(OSError):  # a disk that is full ends readers, not the job
            write_running_job(self._job.logs, known)

    def _left_alone(self) -> str:
        """Why a silent server is not killed."""
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
        self._engine.expect(promote.member)
        self._engine.command(promote.member, f"promote {promote.term}")
        end = self._ends.get(promote.before)
        why = "cannot be reached" if end is None else f"ended with {end}"
        self._screen.say(f"{promote.before} {why}; {promote.member} takes over")

    def _go_back(self) -> None:
        """Everything has ended; the job starts from its last snapshot."""
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
        """Return the message about a member that starts again."""
        often, what = self._supervisor.restarts, "it goes on from its log"
        if member.role == "worker":
            often, what = self._supervisor.worker_restarts, "a new process takes its seat"
        count = self._supervisor.restarted[member]
        end = self._ends[member]
        return f"{member} ended with {end}; {what} (restart {count} of {often})"
