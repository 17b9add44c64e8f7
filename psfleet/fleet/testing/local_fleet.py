"""LocalFleet: real servers on this machine without a launcher, for tests and notebooks.

The servers are processes (or threads, with `in_process`) with real sockets, logs and snapshots. Workers are
runtimes in the calling process. LocalFleet also does the part of the launcher's work that tests need: it
restarts killed servers (`reviving`) and changes the number of servers (`scale`, `settle`).
"""

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

_LOOK = 0.01  # seconds between two looks for a ready file or a dead server
_DECIDES = 0.005  # seconds between two looks for the servers' promise to carry out a move
_DECISION = 10.0  # seconds for the thread that decides a move to end
_SERVERS = "psfleet.server"  # logger of all servers of this process


class LocalFleet:
    """Servers on this machine, which are ended at the end of the `with` block.

        with LocalFleet(servers=2, workers=1) as fleet:
            runtime = fleet.connect(0, "sync")

    With `in_process` the servers are threads of this process and ready in milliseconds. They have sockets,
    logs and snapshots like processes, but cannot be killed or stopped. The end of the `with` block raises
    an error if a thread, socket, pipe or named memory that was created inside is still open, for example
    because a worker was not closed.

    In a notebook use `start` and `close` instead of a `with` block. An open fleet is closed when it is
    garbage-collected or when the process ends.

    Args:
        servers: Number of servers.
        workers: Number of workers.
        transport: "unix" for sockets in a private folder, "tcp" for free ports with new credentials, "plain
            tcp" for ports without credentials.
        start_within: Seconds within which every server must be ready.
        durability: Durability of the servers. `reviving` needs "log".
        dead_after: Seconds without a heartbeat after which a worker is removed from the fleet. 0 never
            removes a worker.
        crashes: Points at which servers crash, by server number: the server's first process crashes at the
            first point in the list, its second process at the second, and so on (PSFLEET_CRASH;
            psfleet.core.base.crash_points lists the points).
        credentials: Folders with credentials, under the keys "server" and "worker". None makes new ones.
        limits: Limits of a server, as in PSFLEET_LIMITS.
        snapshot_every: Interval of snapshots, as in PSFLEET_SNAPSHOT_EVERY.
        resume: Path of a snapshot to start from, or "".
        replicas: Number of standbys of each server. A test starts the standbys with `spawn`.
        rules: Modules with update rules for the servers to import.
        in_process: True to run the servers as threads of this process.

    Attributes:
        endpoints: Endpoints of the servers, after the start.
        processes: Process of each server, or its thread with `in_process`.
        restarts: Number of restarts of servers so far.
        deaths: For each restart, the point at which the server had crashed, or "killed".
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
        self._deadly: dict[int, str] = {}  # crash point of each server's present process
        self.endpoints: tuple[str, ...] = ()
        self.processes: list[Any] = []
        self._move = 0
        self._launcher: ServiceThread | None = None
        self._spawning = threading.Lock()
        self._known: tuple[str, ...] = ()  # endpoints including servers that a move adds
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
        """Start the servers, and return this fleet once every server is ready.

        Raises:
            UsageError: The fleet was started before.
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
        """End every server, by force after 10 seconds, and remove the fleet's folder. Safe to call twice."""
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
        """Return the environment of the worker with this index."""
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
        """Connect as a worker, and return the worker's runtime.

            runtime = fleet.connect(0, "ssp", staleness=4)

        One process may connect as several workers if each is used in its own thread.

        Args:
            worker: Index of the worker, from 0.
            mode: Name of the consistency mode.
            settings: Settings of the mode, as in the section [consistency] of a strategy file.
        """
        strategy = Settings.from_parts({"consistency": {"mode": mode, **settings}})
        return connect(self.environment(worker), strategy.consistency)

    def kill(self, server: int) -> None:
        """Kill the process of one server, as a crash would. Not available with `in_process`."""
        process = self.processes[server]
        process.send_signal(signal.SIGKILL)
        process.wait()  # the killed process; `reviving` may have started another one meanwhile

    def scale(self, servers: int) -> None:
        """Change the number of servers, and start those that are missing.

        Returns once server 0 has begun to move rows to the new servers, or has refused. The workers use the
        new number after their next collective. Then call `settle`.
        """
        self._move += 1
        new_indices = range(self.servers, servers)
        for index in new_indices:  # an earlier server of this index may have left its ready file
            self.ready_file(index).unlink(missing_ok=True)
        self._known = (*self.endpoints, *map(self._asked, new_indices))
        self.processes += [self.spawn(index) for index in new_indices]
        more_endpoints = tuple(self._endpoint(index) for index in new_indices)
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
        """Return whether server 0 has neither begun nor refused the last request of `scale`."""
        is_open = read_scaled(self._folder).number < self._move
        return is_open and (self._folder / SCALE_READY).exists()

    def _decide_move(self, endpoints: tuple[str, ...]) -> None:
        """Commit or cancel the last request of `scale`, as a launcher would. Runs in a thread.

        Waits until the servers report that all rows are copied, or the reason why the move cannot happen.
        """
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
        """Finish a `scale` after the workers' collective: end the servers that are no longer needed.

        Returns:
            "" if the number of servers has changed, else the reason why it has not.

        Raises:
            UsageError: The servers have not decided yet.
        """
        if self._launcher is not None:
            self._launcher.join(_DECISION)  # it may be about to write that the move was given up
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
        """Context in which servers that are killed are restarted, as a launcher would restart them."""
        over = threading.Event()

        def revive() -> None:
            while not over.wait(_LOOK):
                with self._spawning:
                    revive_all()

        def revive_all() -> None:
            server_count = max(self.servers, len(read_scaled(self._folder).endpoints))
            for index, process in enumerate(self.processes[:server_count]):
                if process.poll() == -signal.SIGKILL:
                    self._keep_servers(f"server {index} has a new process")
                    self._revive(index)

        thread = threading.Thread(target=revive, name="reviving")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _revive(self, index: int) -> None:
        self.deaths.append(self._deadly.pop(index, "killed"))
        self.processes[index] = self.spawn(index)
        self.restarts += 1

    def wait(self, timeout: float = 60.0) -> list[int]:
        """Wait until the servers have ended by themselves, and return their exit codes."""
        return [process.wait(timeout) for process in self.processes]

    @property
    def snapshots(self) -> Path:
        """Folder of the fleet's snapshots."""
        return self._folder / "snapshots"

    def log(self, server: int) -> str:
        """Return the output of one server, or the log of all servers with `in_process`."""
        path = self._folder / ("serverlog" if self.in_process else f"serverlog.{server}")
        return path.read_text() if path.exists() else ""

    def spawn(self, index: int, standby: int = 0, follows: bool = True) -> Any:
        """Start a process of a server, or a thread with `in_process`.

        Args:
            index: Number of the server.
            standby: Number of the standby among the server's standbys, from 1, or 0 for the server itself.
            follows: False to restart a standby that has taken over from the server, from its own log.
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
        known = self.endpoints if index < self.servers else self._known
        endpoints = known or [*map(self._asked, range(self.servers))]
        # This process sets GRPC_VERBOSITY for itself; the servers must not inherit it.
        inherited = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
        return {
            **inherited,
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
        """Wait until a server is ready, and return its endpoint.

        Raises:
            ServerUnavailable: The server has ended or is not ready in time.
        """
        deadline = time.monotonic() + self.start_within
        while not self.ready_file(index).exists():
            status = self.processes[index].poll()
            # The first view is installed while the server becomes ready. On a busy machine, the server may
            # reach its crash point before it writes the ready file, and so before `reviving` begins.
            if status == -signal.SIGKILL and not self.endpoints and index in self._deadly:
                self._revive(index)
            elif status is not None:
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
        """Return the path of the file that a server, or one of its standbys, writes when it is ready."""
        return self._folder / (f"ready.{index}.{standby}" if standby else f"ready.{index}")

    def _log_folder(self, index: int, standby: int) -> Path:
        folder = self._folder / f"standby.{index}.{standby}" if standby else self._folder
        folder.mkdir(exist_ok=True)
        return folder


def _end(processes: Sequence[Any], folder: Path, lines: logging.Handler) -> None:
    """Kill the processes and remove the folder, without waiting for a regular end.

    This is the finalizer of a LocalFleet, so it may run while the interpreter shuts down.
    """
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    logging.getLogger(_SERVERS).removeHandler(lines)
    lines.close()
    shutil.rmtree(folder, ignore_errors=True)
