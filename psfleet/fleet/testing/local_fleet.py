"""A real fleet on this machine, for tests and notebooks: servers, and runtimes for workers."""

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from psfleet.core.base.errors import ServerUnavailable, UsageError
from psfleet.core.base.files import make_private_folder
from psfleet.core.base.job_files import read_ready
from psfleet.core.base.scaling_files import (
    SCALE_READY,
    Scaled,
    read_promise,
    read_scaled,
    write_scale_ready,
    write_scaled,
    write_unscaled,
)
from psfleet.core.base.settings.environment import Environment, read_environment
from psfleet.core.base.threads import ServiceThread
from psfleet.core.net.connections.certificates import make_credentials
from psfleet.core.runtime.modes.switch import ModeSwitchRuntime, connect
from psfleet.core.runtime.strategy import Settings
from psfleet.fleet.testing.server_thread import EndCheck, ServerThread

__all__ = ["LocalFleet"]

_LOOK = 0.01  # seconds between looks for a ready file
_DECIDES = 0.005  # and for what servers promise
_DECISION = 10.0  # seconds for that to be read
_SERVERS = "psfleet.server"  # logger of all servers of this process


class LocalFleet:
    """Servers as processes of their own, or as threads; leaving the `with` block ends them all.

        with LocalFleet(servers=2, workers=1) as fleet:
            runtime = fleet.connect(0, "sync")

    With `in_process` the servers are threads of this process, ready in milliseconds. They have sockets,
    logs and snapshots as ever, but cannot be killed or stopped. The `with` block then raises if a thread,
    a socket, a pipe or named memory that came inside is left, such as those of a worker that is not closed.

    Where a block does not fit, as in the cells of a notebook, `start` and `close` do the same; a
    fleet without references, or that is there when the process ends, closes itself.

    Args:
        servers: Number of servers.
        workers: Number of workers.
        transport: "unix" sockets in a private folder, "tcp" on free ports with credentials of its
            own, or "plain tcp" without.
        start_within: Seconds until every server must be ready.
        dead_after: Seconds of silence after which a worker's seat is removed; 0: never.
        durability: Durability of servers; with a log `reviving` starts those that die again.
        crashes: For some servers the crash point of each process, one after the other
            (PSFLEET_CRASH; psfleet.core.base.faults lists the points).
        credentials: Folders of the credentials of servers and workers, in place of its own.
        limits: Limits of a server, as in PSFLEET_LIMITS.
        snapshot_every: Interval of server 0's snapshots, as in PSFLEET_SNAPSHOT_EVERY.
        resume: A snapshot that the servers start from.
        replicas: Servers are made for standbys, which a test starts with `spawn`.
        rules: Modules of rules that the servers import.
        in_process: Servers are threads of this process.

    Attributes:
        endpoints: Endpoints of the servers, once entered.
        processes: Processes of the servers, in order; with `in_process` their threads.
        restarts: Number of times that a server was started again.
        deaths: Points at which servers have died and were started again, as `crashes` says them.
    """

    def __init__(
        self,
        servers: int = 2,
        workers: int = 2,
        transport: Literal["unix", "tcp", "plain tcp"] = "unix",
        start_within: float = 120.0,
        durability: str = "none",
        dead_after: float = 0.0,
        crashes: Mapping[int, Sequence[str]] | None = None,
        credentials: Mapping[str, Path] | None = None,
        limits: str = "",
        snapshot_every: str = "",
        resume: str = "",
        replicas: int = 0,
        rules: Sequence[str] = (),
        in_process: bool = False,
    ) -> None:
        self.servers = servers
        self.workers = workers
        self.transport = transport
        self.start_within = start_within
        self.durability = durability
        self.dead_after = dead_after
        self.restarts = 0
        self.deaths: list[str] = []
        self.credentials = dict(credentials or {})
        self.limits = limits
        self.snapshot_every = snapshot_every
        self.resume = resume
        self.replicas = replicas
        self.rules = rules
        self.in_process = in_process
        self._crashes = {server: list(points) for server, points in (crashes or {}).items()}
        self._deadly: dict[int, str] = {}  # where the present process of a server is to die
        self.endpoints: tuple[str, ...] = ()
        self.processes: list[Any] = []
        self._move = 0
        self._launcher: ServiceThread | None = None
        self._spawning = threading.Lock()
        self._known: tuple[str, ...] = ()  # endpoints of new servers too
        self._folder = Path()
        self._end_check: EndCheck | None = None
        self._end: weakref.finalize[..., LocalFleet] | None = None

    def __enter__(self) -> "LocalFleet":
        if not self.in_process:
            return self.start()
        self._end_check = EndCheck()
        try:
            return self.start()
        except BaseException:
            self._end_check.drop()
            raise

    def start(self) -> "LocalFleet":
        """Start the servers and return this fleet, once all of them are ready.

        Raises:
            UsageError: It has been started.
            ServerUnavailable: A server has ended or is not ready in time.
        """
        if self.processes:
            raise UsageError("this LocalFleet has been started before; make another one")
        self._folder = make_private_folder()
        lines = logging.FileHandler(self._folder / "serverlog", delay=True)
        if self.in_process:
            logging.getLogger(_SERVERS).addHandler(lines)
        self._end = weakref.finalize(self, _end, self.processes, self._folder, lines)
        if self.transport == "tcp" and not self.credentials:
            self.credentials = make_credentials(self._folder / "tls")
        try:
            for index in range(self.servers):
                self.processes.append(self.spawn(index))
            self.endpoints = tuple(self._endpoint(index) for index in range(self.servers))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
        if self._end_check is not None:
            if error is None:
                self._end_check.check()
            else:
                self._end_check.drop()

    def close(self) -> None:
        """End every server, by force where asking does not help, and remove the folder.

        Safe to call twice.
        """
        if self._end is None or not self._end.alive:
            return
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        self._end()

    def environment(self, worker: int) -> Environment:
        """Return the environment of that worker's process."""
        return Environment(
            "worker",
            worker,
            self.endpoints,
            self.workers,
            durability=self.durability,
            dead_after=self.dead_after,
            replicas=self.replicas,
            tls=str(self.credentials.get("worker", "")),
            insecure=self.transport == "plain tcp",
        )

    def connect(self, worker: int, mode: str, **settings: int) -> ModeSwitchRuntime:
        """The runtime of one worker; several may live in this process, each with its own thread.

        Args:
            worker: Its seat.
            mode: Consistency mode.
            settings: Settings of that mode, as in a strategy file's [consistency].
        """
        strategy = Settings.from_parts({"consistency": {"mode": mode, **settings}})
        return connect(self.environment(worker), strategy.consistency)

    def kill(self, server: int) -> None:
        """Kill one server as a crash would, which must be a process."""
        process = self.processes[server]
        process.send_signal(signal.SIGKILL)
        process.wait()  # not for the one that `reviving` may have put in its place

    def scale(self, servers: int) -> None:
        """Start the servers that are missing, and ask for this number; workers go on with it after their next
        collective. Call `settle` then.
        """
        self._move += 1
        more = range(self.servers, servers)
        for index in more:  # another one may have had the place
            self.ready_file(index).unlink(missing_ok=True)
        self._known = (*self.endpoints, *map(self._asked, more))
        self.processes += [self.spawn(index) for index in more]
        more_endpoints = tuple(self._endpoint(index) for index in more)
        self._known = (*self.endpoints, *more_endpoints)
        write_scale_ready(self._folder, self._move, self._known[:servers])
        self._launcher = ServiceThread(self._decide_move, "decision", (self._known[:servers],))
        self._launcher.start()
        deadline = time.monotonic() + self.start_within
        while self._awaits_rows():
            if time.monotonic() > deadline:
                raise ServerUnavailable(f"server 0 has sent no rows: {self.log(0)}")
            time.sleep(_LOOK)

    def _awaits_rows(self) -> bool:
        """Return whether the last request is neither taken by server 0 nor given up."""
        is_open = read_scaled(self._folder).number < self._move
        return is_open and (self._folder / SCALE_READY).exists()

    def _decide_move(self, endpoints: tuple[str, ...]) -> None:
        """Decide the last request as a launcher would, once servers promise to carry it out, or do not."""
        while self._end is not None and self._end.alive:
            with self._spawning:
                if read_scaled(self._folder).number == self._move:
                    return
                number, why = read_promise(self._folder)
                if number == self._move and why:
                    self._keep_servers(why)
                elif number == self._move:
                    write_scaled(self._folder, Scaled(number, endpoints, number))
            time.sleep(_DECIDES)

    def _keep_servers(self, why: str) -> None:
        if read_scaled(self._folder).number < self._move:
            write_unscaled(self._folder, self._move, self.endpoints, why)

    def settle(self) -> str:
        """End the servers that are not in the fleet after a move; why there was none, or nothing."""
        if self._launcher is not None:
            self._launcher.join(_DECISION)  # it may be about to write that there is none
        decision = read_scaled(self._folder)
        if decision.number != self._move:
            raise UsageError("no move is over; let all workers come to a collective")
        self.endpoints = self._known = decision.endpoints
        self.servers = len(self.endpoints)
        with self._spawning:
            for process in self.processes[self.servers :]:
                process.terminate()
                process.wait(10)
            del self.processes[self.servers :]
        return decision.why

    @contextlib.contextmanager
    def reviving(self) -> Iterator[None]:
        """Within, a server that is killed is started again, as a launcher would."""
        over = threading.Event()

        def revive() -> None:
            while not over.wait(_LOOK):
                with self._spawning:
                    revive_all()

        def revive_all() -> None:
            there = max(self.servers, len(read_scaled(self._folder).endpoints))
            for index, process in enumerate(self.processes[:there]):
                if process.poll() == -signal.SIGKILL:
                    self._keep_servers(f"server {index} has a new process")
                    self.deaths.append(self._deadly.pop(index, "killed"))
                    self.processes[index] = self.spawn(index)
                    self.restarts += 1

        thread = threading.Thread(target=revive, name="reviving")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def wait(self, timeout: float = 60.0) -> list[int]:
        """The servers' exit codes, once they have ended by themselves."""
        return [process.wait(timeout) for process in self.processes]

    @property
    def snapshots(self) -> Path:
        """Folder of the fleet's snapshots."""
        return self._folder / "snapshots"

    def log(self, server: int) -> str:
        """Return the output of one server, or what all servers in this process log."""
        path = self._folder / ("serverlog" if self.in_process else f"serverlog.{server}")
        return path.read_text() if path.exists() else ""

    def spawn(self, index: int, standby: int = 0, follows: bool = True) -> Any:
        """Start a process of a server, or its thread.

        Args:
            index: The server.
            standby: Ordinal of this standby among the server's standbys, starting at 1; 0: not a standby.
            follows: False: that standby has taken over, and starts again from its log.
        """
        variables = self._variables(index, standby, follows)
        if self.in_process:
            return ServerThread(read_environment(variables))
        if crashes := self._crashes.get(index):
            variables["PSFLEET_CRASH"] = self._deadly[index] = crashes.pop(0)
        variables["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if entry)
        with (self._folder / f"serverlog.{index}").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "psfleet_server"],
                stdin=subprocess.PIPE if self.replicas else subprocess.DEVNULL,
                bufsize=0,
                stdout=log,
                stderr=log,
                env=variables,
            )

    def _variables(self, index: int, standby: int, follows: bool) -> dict[str, str]:
        """Return the environment variables of a server."""
        known = self.endpoints if index < self.servers else self._known
        endpoints = known or [*map(self._asked, range(self.servers))]
        # What this process has settled for its own gRPC is not for the servers.
        others = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
        return {
            **others,
            "PSFLEET_ROLE": "server",
            "PSFLEET_RANK": str(index),
            "PSFLEET_SERVERS": ",".join(endpoints),
            "PSFLEET_WORKERS": str(self.workers),
            "PSFLEET_READY_FILE": str(self.ready_file(index, standby)),
            "PSFLEET_DURABILITY": self.durability,
            "PSFLEET_DEAD_AFTER": str(self.dead_after),
            "PSFLEET_LOG_FOLDER": str(self._log_folder(index, standby)),
            "PSFLEET_SNAPSHOTS": str(self._folder / "snapshots"),
            "PSFLEET_REPLICAS": str(self.replicas),
            "PSFLEET_STANDBY": str(standby if follows else 0),
            "PSFLEET_TLS": str(self.credentials.get("server", "")),
            "PSFLEET_INSECURE": "1" if self.transport == "plain tcp" else "",
            "PSFLEET_LIMITS": self.limits,
            "PSFLEET_SNAPSHOT_EVERY": self.snapshot_every,
            "PSFLEET_RESUME": self.resume,
            "PSFLEET_RULES": ",".join(self.rules),
        }

    def _asked(self, index: int) -> str:
        return f"unix:{self._folder}/{index}.sock" if self.transport == "unix" else "127.0.0.1:0"

    def _endpoint(self, index: int) -> str:
        """Return the endpoint of the server, once it is printed."""
        deadline = time.monotonic() + self.start_within
        while not self.ready_file(index).exists():
            if self.processes[index].poll() is not None:
                raise ServerUnavailable(
                    f"server {index} ended with code "
                    f"{self.processes[index].returncode}: "
                    f"{getattr(self.processes[index], 'error', self.log(index))}"
                )
            if time.monotonic() > deadline:
                raise ServerUnavailable(
                    f"server {index} is not ready after {self.start_within:g} "
                    f"seconds: {self.log(index)}"
                )
            time.sleep(_LOOK)
        return read_ready(self.ready_file(index))[0]

    def ready_file(self, index: int, standby: int = 0) -> Path:
        """Return the file that a process of a server writes when it is ready."""
        return self._folder / (f"ready.{index}.{standby}" if standby else f"ready.{index}")

    def _log_folder(self, index: int, standby: int) -> Path:
        folder = self._folder / f"standby.{index}.{standby}" if standby else self._folder
        folder.mkdir(exist_ok=True)
        return folder


def _end(processes: Sequence[Any], folder: Path, lines: logging.Handler) -> None:
    """End the processes by force, and remove the folder: quick enough for a process that is to end."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    logging.getLogger(_SERVERS).removeHandler(lines)
    lines.close()
    shutil.rmtree(folder, ignore_errors=True)
