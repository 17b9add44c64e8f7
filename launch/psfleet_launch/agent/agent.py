"""The engine of an agent: this machine, what processes use of it, and what they write."""

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
from psfleet.core.net.v1 import agent_pb2 as pb
from psfleet_launch.agent.launcher_link import LauncherLink
from psfleet_launch.engines.local import LocalEngine
from psfleet_launch.engines.remote.agent_messages import (
    JobFiles,
    member_message,
    member_of,
    message_of,
    read_request,
    write_secrets,
)
from psfleet_launch.engines.remote.machine import why_unreachable
from psfleet_launch.job.job_plan import Job, Member, Told
from psfleet_launch.supervision.job_events import Event, ProcessExited, Shown

_CHUNK = 1 << 16  # bytes
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK = 0.1  # seconds between looks for output and for the end of the connection


class AgentEngine(LocalEngine):
    """Processes of this machine, which die with the agent.

    Args:
        workers: Workers of the job on this machine; they share its cores.
    """

    def __init__(self, job: Job, selector: selectors.BaseSelector, workers: int) -> None:
        super().__init__(job, selector)
        # LocalEngine divides the cores by the job's workers, of which only these are here.
        self._cores = len(os.sched_getaffinity(0)) * len(job.workers) // max(workers, 1)

    def placement(self) -> Mapping[str, Sequence[Member]]:
        """None: the launcher places members."""
        return {}

    def endpoints(self) -> list[str]:
        """None: the launcher chooses them."""
        return []

    def exit_message(self, event: ProcessExited) -> pb.Exited:
        """Return the message to the launcher about a process that has ended."""
        usage = self._used.pop(self._processes[event.member].pid)
        return pb.Exited(
            member=member_message(event.member),
            code=event.code,
            left=event.left,
            cause=event.cause,
            cpu_seconds=usage.ru_utime + usage.ru_stime,
            peak_memory=usage.ru_maxrss * 1024,
        )


class OutputTails:
    """Read positions in the members' output files. The shown member's output comes by pipes."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._read: dict[Member, int] = {}

    def follow(self, member: Member) -> None:
        """Read this member's file from now on."""
        if member != self._job.shown:
            self._read.setdefault(member, 0)

    def fresh(self) -> Iterator[pb.AgentMessage]:
        """One chunk of each file that has grown."""
        for member in self._read:
            if data := self._next(member):
                yield _message(member, data)

    def rest(self, member: Member) -> Iterator[pb.AgentMessage]:
        """All that a file holds."""
        while member in self._read and (data := self._next(member)):
            yield _message(member, data)

    def _next(self, member: Member) -> bytes:
        path: Path = self._job.log(member)
        if path.stat().st_size <= self._read[member]:
            return b""
        with path.open("rb") as file:
            file.seek(self._read[member])
            data = file.read(_CHUNK)
        self._read[member] += len(data)
        return data


def _message(member: Member, data: bytes) -> pb.AgentMessage:
    chunk = pb.OutputChunk(member=member_message(member), data=data)
    return pb.AgentMessage(output=chunk)


class Agent:
    """Runs processes of one job on this machine. The calling thread must be the main thread.

    Args:
        folder: Private; sockets, ready files, credentials and output.
        lifeline: A file descriptor whose end of file ends the agent; -1: none.
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
        """Serve until the job is over; 0, or 1 if the connection was lost or the job was refused."""
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
        """Log the reason that the launcher sent just before it closed the connection."""
        for message in self._link.take():
            if message.HasField("refused"):
                self._perform(message)

    def _step(self) -> None:
        self._wait(min(_LOOK, self._engine.pause if self._engine else _LOOK))
        for message in self._link.take():
            self._perform(message)
        self._tell()

    # -- what happens ----------------------------------------------------------------------------

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
        """Send on what has happened; output before the end of who has written it."""
        if self._engine is None or self._tails is None:
            return
        events = self._engine.events()
        exits = [event for event in events if isinstance(event, ProcessExited)]
        if any(event.member == self._engine.job.shown for event in exits):
            events += self._last_words()
        for event in events:
            if not isinstance(event, ProcessExited):
                self._link.send(message_of(event, self._engine.job.shown))
        if not self._link.is_full:
            self._send(self._tails.fresh())
            self._send(self._changed_files())
        for end in [event for event in events if isinstance(event, ProcessExited)]:
            self._send(self._tails.rest(end.member))
            self._link.send(pb.AgentMessage(exited=self._engine.exit_message(end)))

    def _changed_files(self) -> Iterator[pb.AgentMessage]:
        if self._files is not None:
            for file in self._files.changed(self._files.present()):
                yield pb.AgentMessage(job_file=file)

    def _last_words(self) -> list[Event | Shown]:
        """Return the shown member's output that was not read yet."""
        assert self._engine is not None
        events: list[Event | Shown] = []
        # A message of the launcher stays to be read, so that something ready does not mean output.
        while self._wait(0) and (more := self._engine.events()):
            events += more
        return events

    def _send(self, messages: Iterator[pb.AgentMessage]) -> None:
        for message in messages:
            self._link.send(message)

    # -- what is done ----------------------------------------------------------------------------

    def _perform(self, message: pb.LauncherMessage) -> None:
        match message.WhichOneof("kind"):
            case "refused":
                self._refused = f"the launcher has refused it: {message.refused}"
            case "open":
                self._link.send(pb.AgentMessage(opened=self._open(message.open)))
            case "sweep":
                self._sweep()
            case kind:
                assert self._engine is not None, f"{kind} before the job was opened"
                self._command(self._engine, message)

    def _command(self, engine: AgentEngine, message: pb.LauncherMessage) -> None:
        match message.WhichOneof("kind"):
            case "spawn":
                self._spawn(engine, message.spawn)
            case "signal":
                engine.send(member_of(message.signal.member), message.signal.number)
            case "command":
                engine.command(member_of(message.command.member), message.command.line)
            case "relocations":
                assert engine.job.relocations is not None
                write_relocations(engine.job.relocations, message.relocations.moved)
            case "expect":
                engine.expect(member_of(message.expect))
            case "job_file":
                assert self._files is not None, "a file for a folder that is the launcher's"
                self._files.take(message.job_file)
            case "die":
                engine.sweep()
                os.kill(os.getpid(), signal.SIGKILL)
            case "connect":
                where = (message.connect.endpoint,)
                ServiceThread(self._connect, "connect", where).start()  # the loop must not wait

    def _connect(self, endpoint: str) -> None:
        errors = filter(None, map(why_unreachable, addresses_of(endpoint)))
        reply = pb.Connected(endpoint=endpoint, error=next(errors, ""))
        self._link.send(pb.AgentMessage(connected=reply))

    def _open(self, message: pb.OpenJob) -> pb.Opened:
        """Make ready for processes of the job."""
        try:
            os.chdir(message.working_folder)
            job = self._job(message)
            engine = AgentEngine(job, self._selector, message.workers)
            self._engine, self._tails = engine, OutputTails(job)
            engine.open()
        except ConfigError as error:
            return pb.Opened(error=str(error))
        except OSError as error:
            return pb.Opened(error=f"folder {error.filename!r} cannot be used ({error.strerror})")
        if (job.logs / message.probe).exists():
            return pb.Opened(has_shared_logs=True)
        self._files = JobFiles(job.logs)
        self._files.clear()
        return pb.Opened()

    def _job(self, message: pb.OpenJob) -> Job:
        logs, spool = Path(message.logs), self._folder / "output"
        if not (logs / message.probe).exists():  # else it is the launcher's own, and shared
            os.close(open_own_folder(logs))
        spool.mkdir(mode=0o700)
        return Job(
            read_request(message.request),
            message.name,
            message.token,
            self._folder,
            logs,
            write_secrets(self._folder / "tls", dict(message.credentials)),
            dict(message.variables),
            spool,
            self._folder / "relocations.json",
        )

    def _spawn(self, engine: AgentEngine, message: pb.Spawn) -> None:
        member = member_of(message.member)
        parameters = Told(
            tuple(message.endpoints),
            message.resume,
            message.follows,
            message.takes_commands,
            message.listen,
        )
        assert self._tails is not None
        if self._files is not None and self._files.late:
            self._asked = (
                f"no room is left in {str(engine.job.logs)!r} for what its processes must know"
            )
            return
        engine.spawn(member, parameters)
        self._tails.follow(member)

    def _sweep(self) -> None:
        """End every process, and report the rest of the events."""
        if self._engine is None or self._tails is None:
            self._link.send(pb.AgentMessage(swept=pb.Swept()))
            return
        self._engine.sweep()
        self._tell()
        swept = pb.Swept(joined=self._engine.has_joined(), left_behind=self._engine.left_behind())
        self._link.send(pb.AgentMessage(swept=swept))

    def _end(self) -> None:
        """Leave nothing: no process, no connection."""
        if self._asked:
            self._link.send(pb.AgentMessage(leaving=self._asked))
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
            with contextlib.suppress(OSError):  # it holds a server's log, or is the launcher's
                self._engine.job.logs.rmdir()
        self._selector.close()
