"""A real fleet on this machine, for tests and notebooks: server processes, and runtimes for workers."""

import contextlib
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
from typing import Literal

from psfleet.errors import ServerUnavailable, UsageError
from psfleet.formats.ready_file import read_ready
from psfleet.mode_runtimes.switch import connect
from psfleet.platform.sockets import make_private_folder
from psfleet.runtime.interface import Runtime
from psfleet.settings.environment import Environment
from psfleet.strategy import Settings
from psfleet.wire.certificates import make_credentials

__all__ = ["LocalFleet"]

_LOOK = 0.01  # seconds between looks for a ready file


class LocalFleet:
    """Servers as processes of their own; leaving the `with` block ends them all.

        with LocalFleet(servers=2, workers=1) as fleet:
            runtime = fleet.connect(0, "sync")

    Where a block does not fit, as in the cells of a notebook, `start` and `close` do the same; a
    fleet that nobody holds any more, or that is there when the process ends, closes itself.

    Args:
        servers: How many servers.
        workers: How many workers will come.
        transport: "unix" sockets in a private folder, "tcp" on free ports with credentials of its
            own, or "plain tcp" without.
        start_within: Seconds until every server must be ready.
        dead_after: Seconds of silence after which a worker's seat is removed; 0: never.
        durability: What servers keep; with a log `reviving` starts those that die again.
        crashes: Of some servers where each of its processes dies, one after the other
            (psfleet.faults.crash_points.CrashFaults).
        credentials: Folders of the credentials of servers and workers, in place of its own.
        limits: What a server takes at most, as PSFLEET_LIMITS says it.
        snapshot_every: How often server 0 takes a snapshot, as PSFLEET_SNAPSHOT_EVERY says it.
        resume: A snapshot that the servers start from.
        replicas: Servers are made for standbys, which a test starts with `spawn`.
        rules: Modules of rules that the servers import.

    Attributes:
        endpoints: Of the servers, once entered.
        processes: Of the servers, in order.
        restarts: How often a server was started again.
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
        self._crashes = {server: list(points) for server, points in (crashes or {}).items()}
        self._deadly: dict[int, str] = {}  # where the present process of a server is to die
        self.endpoints: tuple[str, ...] = ()
        self.processes: list[subprocess.Popen[bytes]] = []
        self._folder = Path()
        self._end: weakref.finalize[..., LocalFleet] | None = None

    def __enter__(self) -> "LocalFleet":
        return self.start()

    def start(self) -> "LocalFleet":
        """Start the servers and return this fleet, once all of them are ready.

        Raises:
            UsageError: It has been started.
            ServerUnavailable: A server has ended or is not ready in time.
        """
        if self.processes:
            raise UsageError("this LocalFleet has been started before; make another one")
        self._folder = make_private_folder()
        self._end = weakref.finalize(self, _end, self.processes, self._folder)
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
        """What the environment of that worker's process would say."""
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

    def connect(self, worker: int, mode: str, **settings: int) -> Runtime:
        """The runtime of one worker; several may live in this process, each with its own thread.

        Args:
            worker: Its seat.
            mode: When pushes take effect.
            settings: Of that mode, as in a strategy file's [consistency].
        """
        wanted = Settings.from_parts({"consistency": {"mode": mode, **settings}})
        return connect(self.environment(worker), wanted.consistency)

    def kill(self, server: int) -> None:
        """Kill one server as a crash would."""
        self.processes[server].send_signal(signal.SIGKILL)
        self.processes[server].wait()

    @contextlib.contextmanager
    def reviving(self) -> Iterator[None]:
        """Within, a server that is killed is started again, as a launcher would."""
        over = threading.Event()

        def revive() -> None:
            while not over.wait(_LOOK):
                for index, process in enumerate(self.processes):
                    if process.poll() == -signal.SIGKILL:
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
        """Where the fleet keeps its snapshots."""
        return self._folder / "snapshots"

    def log(self, server: int) -> str:
        """What one server has printed."""
        return (self._folder / f"serverlog.{server}").read_text()

    def spawn(
        self, index: int, standby: int = 0, follows: bool = True
    ) -> "subprocess.Popen[bytes]":
        """Start a process of a server.

        Args:
            index: The server.
            standby: Ordinal of this standby among the server's standbys, starting at 1; 0: not a standby.
            follows: False: that standby has taken over, and starts again from its log.
        """
        asked = self.endpoints or [
            f"unix:{self._folder}/{number}.sock" if self.transport == "unix" else "127.0.0.1:0"
            for number in range(self.servers)
        ]
        command = [
            sys.executable,
            "-m",
            "psfleet_server",
            "--index",
            str(index),
            "--servers",
            ",".join(asked),
            "--workers",
            str(self.workers),
            "--ready-file",
            str(self.ready_file(index, standby)),
        ]
        path = os.pathsep.join(entry for entry in sys.path if entry)
        # What this process has settled for its own gRPC is not for the servers.
        inherited = {name: said for name, said in os.environ.items() if name != "GRPC_VERBOSITY"}
        settled = {
            "PYTHONPATH": path,
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
        if crashes := self._crashes.get(index):
            settled["PSFLEET_CRASH"] = self._deadly[index] = crashes.pop(0)
        with (self._folder / f"serverlog.{index}").open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE if self.replicas else subprocess.DEVNULL,
                bufsize=0,
                stdout=log,
                stderr=log,
                env={**inherited, **settled},
            )

    def _endpoint(self, index: int) -> str:
        """Where the server listens, once it says so."""
        deadline = time.monotonic() + self.start_within
        while not self.ready_file(index).exists():
            if self.processes[index].poll() is not None:
                raise ServerUnavailable(
                    f"server {index} ended with code "
                    f"{self.processes[index].returncode}: {self.log(index)}"
                )
            if time.monotonic() > deadline:
                raise ServerUnavailable(
                    f"server {index} is not ready after {self.start_within:g} "
                    f"seconds: {self.log(index)}"
                )
            time.sleep(_LOOK)
        return read_ready(self.ready_file(index))[0]

    def ready_file(self, index: int, standby: int = 0) -> Path:
        """What a process of a server writes when it is ready."""
        return self._folder / (f"ready.{index}.{standby}" if standby else f"ready.{index}")

    def _log_folder(self, index: int, standby: int) -> Path:
        folder = self._folder / f"standby.{index}.{standby}" if standby else self._folder
        folder.mkdir(exist_ok=True)
        return folder


def _end(processes: Sequence["subprocess.Popen[bytes]"], folder: Path) -> None:
    """End the processes by force, and remove the folder: quick enough for a process that is to end."""
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)
