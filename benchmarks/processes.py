"""Contenders as processes: servers of psfleet, and workers that make steps on request.

A worker program prints READY. It then reads one number of steps per line from its standard input, and replies
to each with one line of JSON.
"""

import contextlib
import enum
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

__all__ = [
    "BETWEEN_HOSTS",
    "ROOT",
    "Connection",
    "Crew",
    "environment",
    "free_ports",
    "hushed",
    "keep_output",
    "many_workers",
    "obey",
    "psfleet_crew",
    "release",
    "start",
    "wait_ready",
]

ROOT = Path(__file__).resolve().parent.parent
_START = 120.0  # seconds within which everything must be ready
_STOP = 10.0  # seconds that a process gets to end by itself, and again after SIGTERM


class Connection(enum.Enum):
    """Connection between the workers and the servers of a contender."""

    MEMORY = "shared memory, with calls over unix sockets"
    TCP = "TCP in the clear without shared memory, as the peers are measured"
    TLS = "mutual TLS without shared memory, as between hosts"


BETWEEN_HOSTS = {
    "psfleet over TCP, no shared memory": Connection.TCP,
    "psfleet over TLS, no shared memory": Connection.TLS,
}
"""Contenders configured as on several machines, but without the network between them."""


class Crew:
    """A contender's processes, ready to be measured (measuring.Subject).

    Args:
        name: Name of the contender.
        servers: Process ids of its servers.
        controlled: Processes that get the number of steps: its workers, or a coordinator.
        workers: Process ids of the workers behind a coordinator.
        standbys: Process ids of the servers' standbys.
        endpoints: Endpoints of the servers.
    """

    def __init__(
        self,
        name: str,
        servers: list[int],
        controlled: list[subprocess.Popen[str]],
        workers: Sequence[int] = (),
        standbys: Sequence[int] = (),
        endpoints: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.endpoints = endpoints
        self.workers = len(workers or controlled)
        self._servers = servers
        self._told = controlled
        self._behind = list(workers)
        self._standbys = {"standbys": list(standbys)} if standbys else {}

    def processes(self) -> dict[str, list[int]]:
        """Return the process ids by group."""
        workers = [process.pid for process in self._told] + self._behind
        return {"servers": self._servers, "workers": workers, **self._standbys}

    def run(self, steps: int) -> list[dict[str, Any]]:
        """Make every worker run `steps` steps."""
        for process in self._told:
            assert process.stdin is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        return [json.loads(_line(process)) for process in self._told]


def obey(
    step: Callable[[int], None],
    finish: Callable[[], None] = lambda: None,
    replies: TextIO = sys.stdout,
) -> None:
    """Make steps as the driver requests, until it closes the pipe.

    Args:
        step: Called with 0, 1, 2, ... over all runs.
        finish: Called at the end of each run, within the measured time.
        replies: Stream to the driver.
    """
    step_count = 0
    print("READY", file=replies, flush=True)
    for line in sys.stdin:
        for number in range(step_count, step_count + int(line)):
            step(number)
        finish()
        step_count += int(line)
        print(json.dumps({"steps": step_count}), file=replies, flush=True)


def keep_output() -> TextIO:
    """Return a pipe to the driver.

    Anything that libraries print to the standard output from now on is dropped.
    """
    pipe = os.fdopen(os.dup(1), "w")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    return pipe


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Drop everything that libraries write to the standard error in this context."""
    errors = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(errors, 2)
        os.close(errors)


def many_workers(
    stack: contextlib.ExitStack, script: str, workers: int, count: int, endpoints: Sequence[str]
) -> list[subprocess.Popen[str]]:
    """Start `count` processes that share the workers, and wait until they are ready.

    Each runs the script with `--worker FIRST NUMBER`.
    """
    workers_each = workers // count
    crew = [
        start(
            stack,
            [sys.executable, script, "--worker", str(index * workers_each), str(workers_each)],
            environment(
                PSFLEET_ROLE="worker",
                PSFLEET_RANK="0",
                PSFLEET_SERVERS=",".join(endpoints),
                PSFLEET_WORKERS=str(workers),
            ),
        )
        for index in range(count)
    ]
    stack.callback(release, crew)
    for process in crew:
        wait_ready(process)
    return crew


def free_ports(count: int) -> list[int]:
    """Return ports of this host that were free a moment ago, for peers that need fixed ports."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def environment(**extra: str) -> dict[str, str]:
    """Return the environment of a measured process: one thread for each BLAS, psfleet importable.

    OPENBLAS_CORETYPE is removed, so that each BLAS chooses the kernels for this processor.
    PYTHONDONTWRITEBYTECODE is removed too: with it, each process would compile all modules of a checkout
    again.
    """
    paths = [str(ROOT / part) for part in (".", "server", "worker", "launch", "benchmarks")]
    single = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    left_out = {"OPENBLAS_CORETYPE", "PYTHONDONTWRITEBYTECODE"}
    inherited = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**inherited, **single, "PYTHONPATH": os.pathsep.join(paths), **extra}


@contextlib.contextmanager
def psfleet_crew(
    name: str,
    program: Sequence[str],
    *,
    servers: int = 2,
    workers: int = 1,
    over: Connection = Connection.MEMORY,
    standbys: bool = False,
    variables: Mapping[str, str] | None = None,
    server: Sequence[str] = ("-m", "psfleet_server"),
) -> Iterator[Crew]:
    """Yield servers of psfleet and workers that run `program` (a script and its arguments).

    Args:
        name: Name of the contender.
        program: Script of the workers, and its arguments.
        servers: Number of servers.
        workers: Number of workers.
        over: Connection between workers and servers.
        standbys: True to give each server a standby.
        variables: Additional environment variables, or None.
        server: Python arguments that start a server, such as `-m psfleet_server`.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="psfleet-bench-")))
        settings = {**_settings(over, folder), **(variables or {})}
        if standbys:
            settings["PSFLEET_REPLICAS"] = "1"
        requested_endpoints = [
            f"unix:{folder}/server.{i}" if over is Connection.MEMORY else "127.0.0.1:0"
            for i in range(servers)
        ]
        endpoints, running = _start_servers(
            stack, server, folder / "ready", requested_endpoints, workers, settings
        )
        following: list[subprocess.Popen[str]] = []
        if standbys:
            settings["PSFLEET_STANDBY"] = "1"
            _, following = _start_servers(
                stack, server, folder / "following", endpoints, workers, settings
            )
            del settings["PSFLEET_STANDBY"]
        crew = []
        for rank in range(workers):
            worker_environment = environment(
                **settings,
                PSFLEET_ROLE="worker",
                PSFLEET_RANK=str(rank),
                PSFLEET_SERVERS=",".join(endpoints),
                PSFLEET_WORKERS=str(workers),
            )
            crew.append(start(stack, [sys.executable, *program], worker_environment))
        stack.callback(release, crew)
        for worker in crew:
            wait_ready(worker)
        yield Crew(
            name,
            [server.pid for server in running],
            crew,
            standbys=[standby.pid for standby in following],
            endpoints=endpoints,
        )


def _settings(over: Connection, folder: Path) -> dict[str, str]:
    """Return the variables for this kind of connection. For TLS this makes a job's certificates."""
    if over is Connection.MEMORY:
        return {}
    if over is Connection.TCP:
        return {"PSFLEET_LANE": "inline", "PSFLEET_INSECURE": "1"}
    # Imported here, because the environments of peers have no cryptography.
    from psfleet.core.net.connections.certificates import make_credentials

    return {
        "PSFLEET_LANE": "inline",
        "PSFLEET_TLS": str(make_credentials(folder / "credentials")["server"]),
    }


def start(
    stack: contextlib.ExitStack, command: Sequence[str], variables: Mapping[str, str]
) -> subprocess.Popen[str]:
    """Start a process with pipes. It is ended with the stack."""
    process = subprocess.Popen(
        command,
        env=dict(variables),
        cwd=ROOT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    stack.callback(_end, process)
    return process


def wait_ready(worker: subprocess.Popen[str]) -> None:
    """Return when the worker has printed READY."""
    line = _line(worker)
    if line.strip() != "READY":
        raise RuntimeError(f"a worker said {line!r} instead of READY")


def release(workers: Sequence[subprocess.Popen[str]]) -> None:
    """Tell all workers that there is no more to do.

    All are told before the first is awaited, because some can only end together.
    """
    for worker in workers:
        assert worker.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.close()


def _start_servers(
    stack: contextlib.ExitStack,
    program: Sequence[str],
    ready: Path,
    endpoints: Sequence[str],
    workers: int,
    variables: Mapping[str, str],
) -> tuple[list[str], list[subprocess.Popen[str]]]:
    """Start a server for each endpoint. The names of the ready files begin with `ready`."""
    files = [ready.with_suffix(f".{i}") for i in range(len(endpoints))]
    running = []
    for rank, file in enumerate(files):
        command = [
            sys.executable,
            *program,
            "--index",
            str(rank),
            "--servers",
            ",".join(endpoints),
            "--workers",
            str(workers),
            "--ready-file",
            str(file),
        ]
        running.append(start(stack, command, environment(**variables)))
    return [_endpoint(file, server) for file, server in zip(files, running, strict=True)], running


def _endpoint(file: Path, server: subprocess.Popen[str]) -> str:
    deadline = time.monotonic() + _START
    while not file.exists():
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"a server did not become ready (exit code {server.poll()})")
        time.sleep(0.01)
    endpoint: str = json.loads(file.read_text())["endpoint"]
    return endpoint


def _line(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise RuntimeError(f"a worker ended with exit code {worker.wait()}; its error is above")
    return line


def _end(process: subprocess.Popen[str]) -> None:
    """Wait for the end of a process, and stop it if it does not end by itself."""
    for stop in (process.terminate, process.kill):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP)
            break
        stop()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
