"""Agent: runs the processes of one job on this machine for a launcher elsewhere (`psfleet agent`).

The agent starts and signals processes as the launcher's messages say, and sends back events and output. All
decisions are the launcher's. The loop runs in the main thread. It must not block for long, because after a
second without messages the launcher suspects that the machine is lost.

An agent never leaves processes behind. It kills them and ends itself

- when the job is over,
- when the connection to the launcher is lost,
- when its standard input ends (agents that ssh or srun has started),
- at SIGINT, SIGTERM or SIGHUP.
"""

import contextlib
import os
import selectors
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.files import open_own_folder
from psfleet.core.base.job_files import write_relocations
from psfleet.core.base.settings.server_endpoints import addresses_of
from psfleet.core.base.threads import ServiceThread, wakes_on_signals
from psfleet_launch.agent.launcher_link import LauncherLink
from psfleet_launch.engines.local import LocalEngine
from psfleet_launch.engines.remote.agent_messages import (
    AgentMessage,
    Connect,
    Connected,
    Die,
    Expect,
    JobFile,
    JobFiles,
    LauncherMessage,
    Leaving,
    Opened,
    OpenJob,
    OutputChunk,
    Refused,
    Relocations,
    ServerCommand,
    Signal,
    Spawn,
    Sweep,
    Swept,
    read_request,
    write_secrets,
)
from psfleet_launch.engines.remote.machine import why_unreachable
from psfleet_launch.job.job_plan import Job, Member, Told
from psfleet_launch.supervision.job_events import (
    Event,
    LivenessSignal,
    Output,
    ProcessEnding,
    ProcessExited,
    Said,
    ServerReady,
    Shown,
)

_CHUNK = 1 << 16  # bytes
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK = 0.1  # seconds between looks at output files and at the connection


class AgentEngine(LocalEngine):
    """Engine of an agent: runs processes on this machine. The processes die if the agent dies.

    Args:
        job: The job, with the paths of its folders on this machine.
        selector: Selector of the agent's loop.
        workers: Number of the job's workers on this machine. They share the machine's cores.
    """

    def __init__(self, job: Job, selector: selectors.BaseSelector, workers: int) -> None:
        super().__init__(job, selector)
        # LocalEngine divides the cores by the number of all workers of the job. Multiply by that number and
        # divide by the workers on this machine, so that these share all cores of the machine.
        self._cores = len(os.sched_getaffinity(0)) * len(job.workers) // max(workers, 1)

    def placement(self) -> Mapping[str, Sequence[Member]]:
        """Return no members, because the launcher assigns members to machines."""
        return {}

    def endpoints(self) -> list[str]:
        """Return no endpoints, because the launcher chooses the servers' endpoints."""
        return []


class OutputTails:
    """Reads new output of members from their output files, to send it to the launcher.

    Exception: the engine reads the output of the shown member (worker 0) from pipes.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._read: dict[Member, int] = {}

    def follow(self, member: Member) -> None:
        """Begin to read the member's output file."""
        if member != self._job.shown:
            self._read.setdefault(member, 0)

    def fresh(self) -> Iterator[AgentMessage]:
        """Yield the next new output, at most 64 KiB, of each file that has grown."""
        for member in self._read:
            if data := self._next(member):
                yield OutputChunk(member, data)

    def rest(self, member: Member) -> Iterator[AgentMessage]:
        """Yield the remaining output of a member."""
        while member in self._read and (data := self._next(member)):
            yield OutputChunk(member, data)

    def _next(self, member: Member) -> bytes:
        path: Path = self._job.log(member)
        if path.stat().st_size <= self._read[member]:
            return b""
        with path.open("rb") as file:
            file.seek(self._read[member])
            data = file.read(_CHUNK)
        self._read[member] += len(data)
        return data


class Agent:
    """Runs processes of one job on this machine. Call `run` from the main thread, because it handles signals.

    Args:
        folder: Private folder for sockets, ready files, credentials and output.
        lifeline: File descriptor, such as standard input. The agent ends at its end of file. -1 for none.
    """

    def __init__(self, link: LauncherLink, folder: Path, name: str, lifeline: int = -1) -> None:
        self._link = link
        self._folder = folder
        self._name = name
        self._lifeline = lifeline
        self._selector = selectors.DefaultSelector()
        self._engine: AgentEngine | None = None
        self._tails: OutputTails | None = None
        self._files: JobFiles | None = None
        self._asked = ""
        self._refused = ""

    def run(self) -> int:
        """Serve until the end of the job.

        Returns:
            Exit code: 0 if the job is over. 1 if the connection was lost, the launcher refused the agent,
            or a signal or the lifeline ended it.
        """
        self._selector.register(self._link, selectors.EVENT_READ, lambda: None)
        if self._lifeline >= 0:
            self._selector.register(self._lifeline, selectors.EVENT_READ, self._read_lifeline)
        with wakes_on_signals(self._selector, _ENDING, self._note):
            try:
                reason = ""
                while not (self._asked or self._refused or (reason := self._link.lost)):
                    self._step()
                self._hear_refusal()
            finally:
                self._end()
        self._close()
        why = self._refused or self._asked or reason
        over = why == "the job is over"
        print(f"psfleet agent {self._name}: {why}", file=sys.stdout if over else sys.stderr)
        return 0 if over else 1

    def _hear_refusal(self) -> None:
        """Read the reason for a refusal, if the launcher has sent one before it closed the connection."""
        for message in self._link.take():
            if isinstance(message, Refused):
                self._perform(message)

    def _step(self) -> None:
        self._wait(min(_LOOK, self._engine.pause if self._engine else _LOOK))
        for message in self._link.take():
            self._perform(message)
        self._tell()

    def _note(self, number: int) -> None:
        self._asked = f"it was asked to end by {signal.Signals(number).name}"

    def _read_lifeline(self) -> None:
        if not os.read(self._lifeline, 1 << 16):
            self._asked = "its standard input has ended"

    def _wait(self, seconds: float) -> bool:
        ready = self._selector.select(seconds)
        for key, _ in ready:
            key.data()
        return bool(ready)

    def _tell(self) -> None:
        """Send events and output to the launcher. All output of a process is sent before its exit."""
        if self._engine is None or self._tails is None:
            return
        events = self._engine.events()
        exits = [event for event in events if isinstance(event, ProcessExited)]
        if any(event.member == self._engine.job.shown for event in exits):
            events += self._last_words()
        for event in events:
            if isinstance(event, Output):
                shown = self._engine.job.shown
                self._link.send(OutputChunk(shown, event.data, event.is_error))
            elif isinstance(event, ServerReady | LivenessSignal | ProcessEnding | Said):
                self._link.send(event)
        if not self._link.is_full:
            self._send(self._tails.fresh())
            self._send(self._changed_files())
        for end in [event for event in events if isinstance(event, ProcessExited)]:
            self._send(self._tails.rest(end.member))
            self._link.send(end)

    def _changed_files(self) -> Iterator[AgentMessage]:
        if self._files is not None:
            yield from self._files.changed(self._files.present())

    def _last_words(self) -> list[Event | Shown]:
        """Return the remaining output of the shown member (worker 0)."""
        assert self._engine is not None
        events: list[Event | Shown] = []
        # `_wait` also returns True while a message of the launcher is unread. So the loop ends at the first
        # call without new events.
        while self._wait(0) and (new_events := self._engine.events()):
            events += new_events
        return events

    def _send(self, messages: Iterator[AgentMessage]) -> None:
        for message in messages:
            self._link.send(message)

    def _perform(self, message: LauncherMessage) -> None:
        match message:
            case Refused(why):
                self._refused = f"the launcher has refused it: {why}"
            case OpenJob():
                self._link.send(self._open(message))
            case Sweep():
                self._sweep()
            case _:
                assert self._engine is not None, f"{message} before the job was opened"
                self._command(self._engine, message)

    def _command(self, engine: AgentEngine, message: LauncherMessage) -> None:
        match message:
            case Spawn(member, told):
                self._spawn(engine, member, told)
            case Signal(member, number):
                engine.send(member, number)
            case ServerCommand(member, line):
                engine.command(member, line)
            case Relocations(moved):
                assert engine.job.relocations is not None
                write_relocations(engine.job.relocations, moved)
            case Expect(member):
                engine.expect(member)
            case JobFile():
                assert self._files is not None, "a file for a folder that is the launcher's"
                self._files.take(message)
            case Die():
                engine.sweep()
                os.kill(
                    os.getpid(), signal.SIGKILL
                )  # without a word to the launcher, like a power loss
            case Connect(endpoint):
                # In another thread, because connecting may take seconds and the loop must not block.
                ServiceThread(self._connect, "connect", (endpoint,)).start()

    def _connect(self, endpoint: str) -> None:
        errors = filter(None, map(why_unreachable, addresses_of(endpoint)))
        self._link.send(Connected(endpoint, next(errors, "")))

    def _open(self, message: OpenJob) -> Opened:
        """Prepare this machine for processes of the job, and return the reply for the launcher."""
        try:
            os.chdir(message.working_folder)
            job = self._job(message)
            engine = AgentEngine(job, self._selector, message.workers)
            self._engine, self._tails = engine, OutputTails(job)
            engine.open()
        except ConfigError as error:
            return Opened(error=str(error))
        except OSError as error:
            return Opened(error=f"folder {error.filename!r} cannot be used ({error.strerror})")
        if (job.logs / message.probe).exists():
            return Opened(has_shared_logs=True)
        self._files = JobFiles(job.logs)
        self._files.clear()
        return Opened()

    def _job(self, message: OpenJob) -> Job:
        logs, spool = Path(message.logs), self._folder / "output"
        if not (
            logs / message.probe
        ).exists():  # with the probe file the folder is the launcher's, shared
            os.close(open_own_folder(logs))
        spool.mkdir(mode=0o700)
        return Job(
            read_request(message.request),
            message.name,
            message.token,
            self._folder,
            logs,
            write_secrets(self._folder / "tls", message.credentials),
            message.variables,
            spool,
            self._folder / "relocations.json",
        )

    def _spawn(self, engine: AgentEngine, member: Member, parameters: Told) -> None:
        assert self._tails is not None
        if self._files is not None and self._files.late:
            self._asked = (
                f"no room is left in {str(engine.job.logs)!r} for what its processes must know"
            )
            return
        engine.spawn(member, parameters)
        self._tails.follow(member)

    def _sweep(self) -> None:
        """Kill every process, send the remaining events, and then send Swept."""
        if self._engine is None or self._tails is None:
            self._link.send(Swept())
            return
        self._engine.sweep()
        self._tell()
        self._link.send(Swept(self._engine.has_joined(), [*self._engine.left_behind()]))

    def _end(self) -> None:
        """Kill all processes, then close the connection.

        In this order, because the launcher may start the members elsewhere once the connection has ended.
        """
        if self._asked:
            self._link.send(Leaving(self._asked))
        if self._engine is not None:
            self._engine.sweep()
        self._selector.unregister(self._link)
        self._link.close()
        if self._lifeline >= 0:
            self._selector.unregister(self._lifeline)

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            if self._files is not None:
                self._files.clear()
            with contextlib.suppress(
                OSError
            ):  # not empty: a server's log, or the launcher's folder
                self._engine.job.logs.rmdir()
        self._selector.close()
