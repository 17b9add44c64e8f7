"""Engine `local`: runs every member of the job as a child process on this machine. The default of `--engine`.

Each child runs in its own session and cannot outlive the launcher: the kernel kills the child when the
launcher's main thread ends (psfleet_launch.job.spawn), and a guard process kills the child's own children.
A server reports in two ways:

    ready file       exists when the server is ready, and contains its endpoint
    liveness pipe    has a NUL byte several times a second, and text lines for the user in between;
                     its end of file means that the server is about to end

An agent on another machine runs its processes with this engine too (psfleet_launch.agent.agent). All
methods are called in the main thread.
"""

import contextlib
import os
import selectors
import signal
import socket
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from resource import struct_rusage
from typing import IO

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.job_files import read_ready
from psfleet.core.base.memory import memory_kills
from psfleet.core.base.settings.server_endpoints import addresses_of
from psfleet_launch.engines.launch_engine import Engine
from psfleet_launch.job import guard
from psfleet_launch.job.job_plan import Job, Member, Told, child_environment, command, needed
from psfleet_launch.job.job_request import Launch
from psfleet_launch.job.resources import Resources
from psfleet_launch.job.spawn import MemberLogs, dismiss_guard, send, spawn, start_guard
from psfleet_launch.supervision.job_events import (
    Event,
    LivenessSignal,
    Output,
    ProcessEnding,
    ProcessExited,
    Said,
    ServerReady,
    Shown,
    causes_first,
    usage_text,
)

_OUT_OF_MEMORY = "killed by SIGKILL, because memory ran out (the kernel's out-of-memory killer)"


class LocalEngine(Engine):
    """Engine that runs processes on this machine. The processes die if the launcher dies."""

    name = "local"

    def __init__(
        self, job: Job, selector: selectors.BaseSelector, launch: Launch | None = None
    ) -> None:
        super().__init__(job, selector, launch)
        self._processes: dict[Member, subprocess.Popen[bytes]] = {}
        self._ended: set[Member] = set()
        self._awaited: set[Member] = set()
        self._logs = MemberLogs(job)
        self._pulses: dict[Member, IO[bytes]] = {}  # read ends of the liveness pipes
        self._words: dict[Member, bytes] = {}  # incomplete line from each liveness pipe
        self._events: list[Event | Shown] = []
        self._memory_kills = memory_kills()
        self._used: dict[int, struct_rusage] = {}  # of ended processes, by process id
        self._cores: int | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    def open(self) -> None:
        self.placement()
        _check_ports(self.endpoints())
        self._logs.open_all()
        self._guard = start_guard(self.job.token, self.job.folder)

    def placement(self) -> Mapping[str, Sequence[Member]]:
        request, machine = self.job.request, Resources.of_this_machine()
        servers = needed(request, self.job.servers).cores * (1 + request.replicas)
        # Do not count the memory of servers. On one machine it is only a limit, and servers may never reach
        # it.
        needs = needed(request, self.job.workers) + Resources(servers)
        if not needs <= machine:
            raise ConfigError(
                f"the job needs {needs}, and this machine has {machine.said(needs)}; ask for less with "
                "--server-cores, --worker-cores and --worker-memory, or name more machines (--engine)"
            )
        return {"local": [*self.job.servers, *self.job.workers]}

    def asked_endpoint(self, rank: int) -> str:
        port = self.job.request.port
        if port is None:
            return f"unix:{self.job.folder}/server.{rank}"
        return f"127.0.0.1:{port + rank if port else 0}"

    def host(self, member: Member) -> str:
        return "local"

    def has_joined(self) -> bool:
        return any(self.job.joined_file(worker).exists() for worker in self.job.workers)

    def spawn(self, member: Member, told: Told) -> None:
        if member in self._processes:  # a restart
            _close_commands(self._processes[member])
        self._ended.discard(member)
        # Remove the files of an earlier process of this member before the new process can write its own.
        if member.role == "server":
            self.expect(member)
        else:
            self.job.left_file(member).unlink(missing_ok=True)
        if member.role == "server" and member.copy >= 0 and self.job.request.keeps_log:
            self.job.log_folder(member).mkdir(mode=0o700, exist_ok=True)
        log, piped = self._logs.file(member), member == self.job.shown
        environment = child_environment(self.job, member, told, cores=self._cores)
        with self._liveness_pipe(member) as pipe:
            environment["PSFLEET_PULSE"] = "".join(map(str, pipe))
            process = spawn(
                command(self.job, member), environment, log, piped, told.takes_commands, pipe
            )
        self._processes[member] = process
        if piped:
            self._pass_on(process.stdout, is_error=False)
            self._pass_on(process.stderr, is_error=True)

    def send(self, member: Member, number: int) -> None:
        send(self._processes[member], number)

    def command(self, member: Member, line: str) -> None:
        stdin = self._processes[member].stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            stdin.write(f"{line}\n".encode())

    def expect(self, member: Member) -> None:
        self.job.ready_file(member).unlink(missing_ok=True)
        self._awaited.add(member)

    def forget(self, member: Member) -> None:
        """Do nothing, because there is only one machine."""

    def share(self) -> None:
        """Do nothing, because all processes use the launcher's folder."""

    def sweep(self) -> None:
        guard.sweep(self.job.token)
        # The guard's `sweep` finds processes by a variable in their environment. A process may have
        # overwritten its environment, as setproctitle does. So kill the members by process id too.
        for process in self._processes.values():
            send(process, signal.SIGKILL)
            self._poll(process, wait=True)
            _close_commands(process)

    def close(self) -> None:
        for stream in [key.fileobj for key in self.selector.get_map().values()]:
            stream.close()  # type: ignore[union-attr]  # only streams are registered by now
        self._logs.close()
        if self._guard is not None:
            dismiss_guard(self._guard)

    def left_behind(self) -> list[str]:
        return [f"process {pid}" for pid in guard.find(self.job.token)]

    @property
    def pause(self) -> float:
        return float(
            "inf"
        )  # a server that has written its ready file also writes to the liveness pipe

    def events(self) -> list[Event | Shown]:
        exits = [
            self._exit(member, code)
            for member, process in self._processes.items()
            if member not in self._ended and (code := self._poll(process)) is not None
        ]
        self._ended.update(exit.member for exit in exits)
        for exit in exits:
            self._close_liveness_pipe(exit.member)
        events, self._events = self._events, []
        return [*events, *self._now_ready(), *causes_first(exits)]

    def _poll(self, process: "subprocess.Popen[bytes]", wait: bool = False) -> int | None:
        """Return the exit code of a process, or None if it is running. With `wait`, wait for its end.

        Like Popen.poll, but with wait4, because only wait4 returns the resources that the process has used.
        """
        if process.returncode is None:
            pid, status, usage = os.wait4(process.pid, 0 if wait else os.WNOHANG)
            if pid:
                process.returncode = os.waitstatus_to_exitcode(status)
                self._used[pid] = usage
        return process.returncode

    def _exit(self, member: Member, code: int) -> ProcessExited:
        usage = self._used.pop(self._processes[member].pid)
        text = usage_text(usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)
        return ProcessExited(member, code, self._has_left(member), self._cause(code), text)

    def _cause(self, code: int) -> str:
        """Return the cause of an exit if memory or the disk was certainly full, else ""."""
        before, self._memory_kills = self._memory_kills, memory_kills()
        if code == -signal.SIGKILL and self._memory_kills > before:
            return _OUT_OF_MEMORY
        if code > 0 and not os.statvfs(self.job.folder).f_bavail:
            return f"no room is left in {str(self.job.folder)!r}, where its output goes; make some"
        return ""

    def _has_left(self, member: Member) -> bool:
        return member.role == "worker" and self.job.left_file(member).exists()

    def _now_ready(self) -> Iterator[ServerReady]:
        for member in sorted(self._awaited):
            if endpoint := _read_endpoint(self.job.ready_file(member)):
                self._awaited.discard(member)
                yield ServerReady(member, endpoint)
            elif member in self._ended:
                self._awaited.discard(member)

    def _pass_on(self, stream: IO[bytes] | None, is_error: bool) -> None:
        assert stream is not None
        read = partial(self._read_output, stream, is_error)
        self.selector.register(stream, selectors.EVENT_READ, read)

    def _read_output(self, stream: IO[bytes], is_error: bool) -> None:
        """Read output of the shown member (worker 0), for its log and for the screen."""
        data = os.read(stream.fileno(), 1 << 16)
        if data:
            if complaint := self._logs.write(self.job.shown, data):
                self._events.append(Said(None, complaint))
            self._events.append(Output(data, is_error))
        else:
            self.selector.unregister(stream)
            stream.close()

    @contextlib.contextmanager
    def _liveness_pipe(self, member: Member) -> Iterator[tuple[int, ...]]:
        """Context in which a process is started. Opens a server's liveness pipe.

        Yields the descriptors to pass to the server's process, or () for other members. The server's end of
        the pipe is closed in this process at the end. Otherwise there would be no end of file when the
        server closes it.
        """
        if member.role != "server":
            yield ()
            return
        launcher_end, server_end = os.pipe()
        self._pulses[member] = os.fdopen(launcher_end, "rb", buffering=0)
        read = partial(self._read_liveness_pipe, member)
        self.selector.register(self._pulses[member], selectors.EVENT_READ, read)
        try:
            yield (server_end,)
        finally:
            os.close(server_end)

    def _read_liveness_pipe(self, member: Member) -> None:
        """Read what a server has written to its pipe: liveness signals, and lines for the user.

        A line reports, for example, the first NaN in a gradient. LivenessPipe of
        psfleet_server.engine.periodic_threads writes both.
        """
        data = os.read(self._pulses[member].fileno(), 1 << 16)
        if not data:
            self._close_liveness_pipe(member)
            self._events.append(ProcessEnding(member))
            return
        self._events.append(LivenessSignal(member))
        *lines, self._words[member] = (
            self._words.get(member, b"") + data.replace(b"\0", b"")
        ).split(b"\n")
        self._events += [Said(member, line.decode(errors="replace")) for line in lines]

    def _close_liveness_pipe(self, member: Member) -> None:
        self._words.pop(member, None)
        if pipe := self._pulses.pop(member, None):
            self.selector.unregister(pipe)
            pipe.close()


ENGINE = LocalEngine


def _close_commands(process: "subprocess.Popen[bytes]") -> None:
    if process.stdin is not None:
        process.stdin.close()


def _read_endpoint(path: Path) -> str:
    """Return the endpoint in a server's ready file, or "" if the server is not ready."""
    try:
        return read_ready(path)[0]
    except FileNotFoundError:
        return ""


def _check_ports(endpoints: Iterable[str]) -> None:
    """Raise ConfigError if a TCP port is in use. Otherwise each server would start and fail with its own
    error."""
    for endpoint in endpoints:
        if endpoint.startswith("unix:"):
            continue
        for address in addresses_of(endpoint):
            host, _, port = address.rpartition(":")
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((host, int(port)))
                except OSError as error:
                    raise ConfigError(
                        f"port {port} on {host} cannot be used ({error.strerror}); "
                        "choose another --port, or --tcp for free ones"
                    ) from None
