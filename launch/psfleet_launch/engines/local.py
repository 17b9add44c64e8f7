"""A job on this machine: performs what the supervisor decides, and tells it what happens."""

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import IO, Any

from psfleet.platform.sockets import make_private_folder
from psfleet_launch.chaos.fault_schedule import Trouble
from psfleet_launch.console.screen import Screen
from psfleet_launch.engines.spawn import open_log, send, spawn
from psfleet_launch.job import guard, job_snapshots
from psfleet_launch.job.job_plan import Job, Member, child_environment, command, requested_endpoints
from psfleet_launch.supervision.standbys import Promote, Release
from psfleet_launch.supervision.supervisor import (
    Action,
    Asked,
    Event,
    Exited,
    Finish,
    GiveUp,
    Heard,
    Lost,
    Parting,
    Phase,
    Ready,
    Send,
    Silent,
    Start,
    Supervisor,
    Tick,
    Wordless,
    causes_first,
)

__all__ = ["LocalEngine", "private_folder"]

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK = 0.02
"""Seconds between looks for ready files; everything else wakes the loop by itself."""
_REFRESH = 0.25


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """See make_private_folder; removed at the end."""
    folder = make_private_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class LocalEngine:
    """Runs one job. The calling thread must be the main thread: it takes the signals."""

    def __init__(
        self, job: Job, supervisor: Supervisor, screen: Screen, trouble: Trouble | None = None
    ) -> None:
        self.ended_at: dict[Member, datetime] = {}
        self._job = job
        self._supervisor = supervisor
        self._screen = screen
        self._trouble = trouble
        self._endpoints = requested_endpoints(job)
        self._processes: dict[Member, subprocess.Popen[bytes]] = {}
        self._logs: dict[Member, IO[bytes]] = {}
        self._pulses: dict[Member, IO[bytes]] = {}
        self._heard: set[Member] = set()
        self._parting: set[Member] = set()
        self._words: dict[Member, bytes] = {}
        self._asked: list[int] = []
        self._loses_output = False
        self._exit_code: int | None = None
        self._generation = 0
        self._resume = job.request.resume
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Start the job, see it through and return its exit code; nothing is left running."""
        for member in (*self._job.servers, *self._job.workers):
            self._logs[member] = open_log(self._job.log(member))
        watcher = guard.start(self._job.token, self._job.folder)
        try:
            with self._signals():
                self._perform(self._supervisor.begin(time.monotonic()))
                while self._exit_code is None:
                    self._step()
        finally:
            self._clear_up(watcher)
        return self._exit_code

    def _step(self) -> None:
        self._wait()
        for event in [*self._happened(), Tick()]:
            self._perform(self._supervisor.handle(event, time.monotonic()))
        if self._trouble is not None:
            self._make(self._trouble)
        if self._supervisor.phase is Phase.TRAINING:
            self._screen.refresh()

    def _clear_up(self, watcher: subprocess.Popen[bytes]) -> None:
        guard.sweep(self._job.token)
        for process in self._processes.values():
            process.wait()
            _close_orders(process)
        while self._take_output(0):
            pass
        for stream in [key.fileobj for key in self._selector.get_map().values()]:
            stream.close()  # type: ignore[union-attr]  # only streams are registered by now
        self._selector.close()
        for log in self._logs.values():
            log.close()
        guard.dismiss(watcher)

    # -- what happens ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Signals wake the loop; those that end the job are noted, SIGCHLD need not be."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        self._selector.register(ours, selectors.EVENT_READ, None)
        before = {
            number: signal.signal(number, self._note) for number in (*_ENDING, signal.SIGCHLD)
        }
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
            self._asked.append(number)

    def _wait(self) -> None:
        if self._supervisor.phase is Phase.STARTING:
            self._take_output(_LOOK)
        else:
            left = self._supervisor.deadline - time.monotonic()
            self._take_output(min(_REFRESH, max(0.0, left)))

    def _happened(self) -> list[Event]:
        asked = [Asked(self._asked.pop(0)) for _ in range(len(self._asked))]
        ended = [
            Exited(member, process.returncode, self._has_left(member))
            for member, process in self._processes.items()
            if member not in self.ended_at and process.poll() is not None
        ]
        self.ended_at.update(dict.fromkeys((exit.member for exit in ended), datetime.now()))
        heard = [Heard(member) for member in sorted(self._heard)]
        parting = [Parting(member) for member in sorted(self._parting)]
        self._heard.clear()
        self._parting.clear()
        for exit in ended:
            self._close_pulse(exit.member)
        return [*asked, *heard, *parting, *self._now_ready(), *causes_first(ended)]

    def _has_left(self, member: Member) -> bool:
        return member.role == "worker" and self._job.left_file(member).exists()

    def _now_ready(self) -> list[Ready]:
        ready = []
        for member in sorted(self._supervisor.unready):
            if endpoint := _read_endpoint(self._job.ready_file(member)):
                self._endpoints[member.rank] = endpoint
                ready.append(Ready(member))
        return ready

    def _take_output(self, timeout: float) -> bool:
        """Wait, and pass on what worker 0 writes: to its log and to the screen. Was there any?"""
        ready = self._selector.select(timeout)
        for key, _ in ready:
            data = os.read(key.fd, 1 << 16)
            if key.data is None:
                continue  # a signal; its handler has noted it
            if isinstance(key.data, Member):
                if data:
                    self._heard.add(key.data)
                    self._say_words(key.data, data)
                else:
                    self._close_pulse(key.data)
                    self._parting.add(key.data)
            elif data:
                log, is_error = key.data
                self._keep(log, data)
                self._screen.output(data, is_error)
            else:
                self._selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]  # a pipe
        return bool(ready)

    def _say_words(self, member: Member, data: bytes) -> None:
        """Say what the member has told, by lines between its signs of life (psfleet_server.liveness)."""
        *lines, self._words[member] = (
            self._words.get(member, b"") + data.replace(b"\0", b"")
        ).split(b"\n")
        for line in lines:
            self._screen.say(f"{member}: {line.decode(errors='replace')}")

    def _keep(self, log: IO[bytes], data: bytes) -> None:
        """Write what worker 0 has said; if its log takes no more, as on a full disk, the job goes on."""
        try:
            log.write(data)
        except OSError as error:
            if not self._loses_output:
                self._screen.say(
                    f"log {log.name!r} cannot be written ({error.strerror}); the job goes on"
                )
            self._loses_output = True

    def _make(self, trouble: Trouble) -> None:
        """Do what chaos wants now; processes are stopped and killed from here alone."""
        trains = self._supervisor.phase is Phase.TRAINING
        living = {member for member in self._supervisor.alive if self._has_started(member)}
        standbys = self._supervisor.standbys
        for strike in trouble.due(time.monotonic(), living, trains=trains, standbys=standbys):
            if strike.text:
                self._screen.say(f"chaos: {strike.text}")
            if strike.signal:
                send(self._processes[strike.member], strike.signal)

    def _has_started(self, member: Member) -> bool:
        """Whether a server has said that it is ready: this process, not one before it."""
        if member.role == "worker":
            return True
        try:
            said = json.loads(self._job.ready_file(member).read_bytes())
        except FileNotFoundError:
            return False
        return bool(said["pid"] == self._processes[member].pid)

    # -- what is done ----------------------------------------------------------------------------

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start(members):
                    self._start(members)
                case Send(members, number):
                    for member in members:
                        send(self._processes[member], number)
                case GiveUp(member, seconds):
                    self._screen.say(f"{member} was silent for {seconds:g} s and is killed")
                    send(self._processes[member], signal.SIGKILL)
                case Silent(member, seconds):
                    self._screen.say(
                        f"{member} has been silent for {seconds:g} s{self._left_alone()}"
                    )
                case Lost(member, code, left):
                    without = "it had left the fleet" if left else "the job goes on without it"
                    self._screen.say(f"{member} ended with {_words(code)}; {without}")
                case Wordless(member):
                    self._screen.say(
                        f"{member} ended without leaving the fleet; workers that wait for it "
                        "give up after minutes"
                    )
                case Promote():
                    self._promote(action)
                case Release(member, attach):
                    self._order(member, f"release {attach}")
                case Finish(code):
                    self._exit_code = code

    def _left_alone(self) -> str:
        """Why a silent server is not killed."""
        if self._job.request.keeps_log:
            return "; workers wait for it. --restart-hung would have it go on from its log"
        return "; workers wait for it. What it has in memory would be lost with it, so it is not killed"

    def _start(self, members: tuple[Member, ...]) -> None:
        if self._supervisor.generation > self._generation:
            self._go_back()
        for member in members:
            if member in self._supervisor.restarted:
                self._screen.say(self._restart(member))
            if member in self._processes:  # it starts again
                _close_orders(self._processes[member])
            self._processes[member] = self._spawn(member)
        if members == self._supervisor.workers:
            self._screen.servers_ready(self._endpoints)

    def _promote(self, promote: Promote) -> None:
        self._job.ready_file(promote.member).unlink(missing_ok=True)
        self._order(promote.member, f"promote {promote.term}")
        code = self._processes[promote.before].returncode
        self._screen.say(f"{promote.before} ended with {_words(code)}; {promote.member} takes over")

    def _order(self, member: Member, order: str) -> None:
        """Tell a server; one that has died does not hear it."""
        stdin = self._processes[member].stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(f"{order}\n".encode())

    def _go_back(self) -> None:
        """Everything has ended; the job starts from its last snapshot."""
        self._generation = self._supervisor.generation
        if self._trouble is not None:
            self._trouble.went_back()
        self.ended_at.clear()
        self._processes.clear()
        for member in self._job.servers:
            self._job.ready_file(member).unlink(missing_ok=True)
        for member in self._job.workers:
            self._job.left_file(member).unlink(missing_ok=True)
        self._resume = job_snapshots.latest(self._job.logs) or self._job.request.resume
        self._screen.say(
            f"a server died; generation {self._generation} starts from "
            f"{self._resume or 'the beginning, for there is no snapshot yet'}"
        )

    def _restart(self, member: Member) -> str:
        """Forget that the member has ended; what to say about it."""
        code = self._processes[member].returncode
        self.ended_at.pop(member, None)
        often, what = self._supervisor.restarts, "it goes on from its log"
        if member.role == "worker":
            often, what = self._supervisor.worker_restarts, "a new process takes its seat"
        count = self._supervisor.restarted[member]
        return f"{member} ended with {_words(code)}; {what} (restart {count} of {often})"

    def _spawn(self, member: Member) -> subprocess.Popen[bytes]:
        piped = member == self._job.shown
        log = self._log(member)
        standbys = self._supervisor.standbys
        environment = child_environment(
            self._job,
            member,
            self._endpoints,
            resume=self._resume,
            follows=standbys is not None and standbys.follows(member),
        )
        ordered = standbys is not None and member.role == "server"
        with self._pulse(member) as kept:
            environment["PSFLEET_PULSE"] = "".join(map(str, kept))
            process = spawn(command(self._job, member), environment, log, piped, ordered, kept)
        if piped:
            self._pass_on(process.stdout, (log, False))
            self._pass_on(process.stderr, (log, True))
        return process

    @contextlib.contextmanager
    def _pulse(self, member: Member) -> Iterator[tuple[int, ...]]:
        """A pipe for a server's signs of life and words: the end that it gets, open until it has it."""
        if member.role != "server":
            yield ()
            return
        ours, theirs = os.pipe()
        self._pulses[member] = os.fdopen(ours, "rb", buffering=0)
        self._selector.register(self._pulses[member], selectors.EVENT_READ, member)
        try:
            yield (theirs,)
        finally:
            os.close(theirs)

    def _close_pulse(self, member: Member) -> None:
        """Hear no more of the member, nor of one that had its place before."""
        self._heard.discard(member)
        self._parting.discard(member)
        self._words.pop(member, None)
        if pipe := self._pulses.pop(member, None):
            self._selector.unregister(pipe)
            pipe.close()

    def _log(self, member: Member) -> IO[bytes]:
        if member not in self._logs:  # a standby's
            if self._job.request.keeps_log:
                self._job.log_folder(member).mkdir(mode=0o700, exist_ok=True)
            self._logs[member] = open_log(self._job.log(member))
        return self._logs[member]

    def _pass_on(self, stream: IO[bytes] | None, data: Any) -> None:
        assert stream is not None
        self._selector.register(stream, selectors.EVENT_READ, data)


def _words(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _close_orders(process: "subprocess.Popen[bytes]") -> None:
    if process.stdin is not None:
        process.stdin.close()


def _read_endpoint(path: Path) -> str:
    """The endpoint that a server has written; empty: it is not ready."""
    try:
        said = json.loads(path.read_bytes())
    except FileNotFoundError:
        return ""
    return str(said["endpoint"])
