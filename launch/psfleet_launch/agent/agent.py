"""The agent's loop: does what the launcher says, tells it what happens, and ends all that it has started."""

import contextlib
import os
import selectors
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from psfleet.errors import ConfigError
from psfleet.formats.relocations import write_relocations
from psfleet.platform.service_thread import ServiceThread
from psfleet.wire.v1 import agent_pb2 as pb
from psfleet_launch.agent.agent_engine import AgentEngine
from psfleet_launch.agent.launcher_link import LauncherLink
from psfleet_launch.agent.output_tail import OutputTails
from psfleet_launch.engines.launch_engine import Told
from psfleet_launch.engines.remote.addresses import why_unreachable
from psfleet_launch.engines.remote.agent_messages import (
    member_of,
    message_of,
    read_request,
    write_secrets,
)
from psfleet_launch.job.job_plan import Job
from psfleet_launch.supervision.job_events import Event, ProcessExited, Shown

__all__ = ["Agent"]

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK = 0.1  # seconds between looks for output and for the end of the connection


class Agent:
    """Runs processes of one job on this machine. The calling thread must be the main thread.

    Args:
        link: Is connected.
        folder: Private; sockets, ready files, credentials and output.
        name: Of the machine.
        held: A file descriptor whose end of file ends the agent; -1: none.
    """

    def __init__(self, link: LauncherLink, folder: Path, name: str, held: int = -1) -> None:
        self._link = link
        self._folder = folder
        self._name = name
        self._held = held
        self._selector = selectors.DefaultSelector()
        self._engine: AgentEngine | None = None
        self._tails: OutputTails | None = None
        self._asked = ""
        self._refused = ""

    def run(self) -> int:
        """Serve until the job is over; 0, or 1 if the connection was lost or the job was refused."""
        self._selector.register(self._link, selectors.EVENT_READ, lambda: None)
        if self._held >= 0:
            self._selector.register(self._held, selectors.EVENT_READ, self._read_held)
        with self._signals():
            try:
                lost = ""
                while not (self._asked or self._refused or (lost := self._link.lost)):
                    self._step()
                self._hear_refusal()
            finally:
                self._end()
        self._close()
        why = self._refused or self._asked or lost
        over = why == "the job is over"
        print(f"psfleet agent {self._name}: {why}", file=sys.stdout if over else sys.stderr)
        return 0 if over else 1

    def _hear_refusal(self) -> None:
        """What the launcher has said just before it hung up."""
        for message in self._link.take():
            if message.HasField("refused"):
                self._perform(message)

    def _step(self) -> None:
        self._wait(min(_LOOK, self._engine.pause if self._engine else _LOOK))
        for message in self._link.take():
            self._perform(message)
        self._tell()

    # -- what happens ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Signals wake the loop; those that end the agent are noted."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        self._selector.register(ours, selectors.EVENT_READ, lambda: ours.recv(1 << 16))
        before = {n: signal.signal(n, self._note) for n in (*_ENDING, signal.SIGCHLD)}
        wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._selector.unregister(ours)
            ours.close()
            theirs.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number in _ENDING:
            self._asked = f"it was asked to end by {signal.Signals(number).name}"

    def _read_held(self) -> None:
        if not os.read(self._held, 1 << 16):
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
        ended = [event for event in events if isinstance(event, ProcessExited)]
        if any(exited.member == self._engine.job.shown for exited in ended):
            events += self._last_words()
        for event in events:
            if not isinstance(event, ProcessExited):
                self._link.send(message_of(event, self._engine.job.shown))
        if not self._link.is_full:
            self._send(self._tails.fresh())
        for exited in [event for event in events if isinstance(event, ProcessExited)]:
            self._send(self._tails.rest(exited.member))
            self._link.send(pb.AgentMessage(exited=self._engine.exit_message(exited)))

    def _last_words(self) -> list[Event | Shown]:
        """What the shown member has written and nobody has read yet."""
        assert self._engine is not None
        events: list[Event | Shown] = []
        while self._wait(0):
            events += self._engine.events()
        return events + self._engine.events()

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
            case "order":
                engine.order(member_of(message.order.member), message.order.line)
            case "relocations":
                assert engine.job.relocations is not None
                write_relocations(engine.job.relocations, message.relocations.moved)
            case "expect":
                engine.expect(member_of(message.expect))
            case "die":
                engine.sweep()
                os.kill(os.getpid(), signal.SIGKILL)
            case "connect":
                where = (message.connect.endpoint,)
                ServiceThread(self._connect, "connect", where).start()  # the loop must not wait

    def _connect(self, endpoint: str) -> None:
        tried = pb.Connected(endpoint=endpoint, error=why_unreachable(endpoint))
        self._link.send(pb.AgentMessage(connected=tried))

    def _open(self, said: pb.OpenJob) -> pb.Opened:
        """Make ready for processes of the job."""
        try:
            os.chdir(said.working_folder)
            job = self._job(said)
            engine = AgentEngine(job, self._selector, said.workers)
            self._engine, self._tails = engine, OutputTails(job)
            engine.open()
        except ConfigError as error:
            return pb.Opened(error=str(error))
        except OSError as error:
            return pb.Opened(error=f"folder {error.filename!r} cannot be used ({error.strerror})")
        return pb.Opened(shares_logs=(job.logs / said.probe).exists())

    def _job(self, said: pb.OpenJob) -> Job:
        logs, spool = Path(said.logs), self._folder / "output"
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        spool.mkdir(mode=0o700)
        return Job(
            read_request(said.request),
            said.name,
            said.token,
            self._folder,
            logs,
            write_secrets(self._folder / "tls", dict(said.credentials)),
            dict(said.variables),
            spool,
            self._folder / "relocations.json",
        )

    def _spawn(self, engine: AgentEngine, said: pb.Spawn) -> None:
        member = member_of(said.member)
        told = Told(
            tuple(said.endpoints), said.resume, said.follows, said.takes_orders, said.listen
        )
        assert self._tails is not None
        engine.spawn(member, told)
        self._tails.follow(member)

    def _sweep(self) -> None:
        """End every process, and tell what was left to tell."""
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
        if self._held >= 0:
            self._selector.unregister(self._held)

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            with contextlib.suppress(OSError):  # it holds a server's log, or is the launcher's
                self._engine.job.logs.rmdir()
        self._selector.close()
