"""Contenders as processes: servers of psfleet, and workers that take steps when they are told to.

A worker program prints READY, then reads one number of steps per line from its standard input and
answers each with one line of JSON.
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
    """How workers reach the servers of a contender."""

    MEMORY = "shared memory, with calls over unix sockets"
    TCP = "TCP in the clear without shared memory, as the peers are measured"
    TLS = "mutual TLS without shared memory, as between hosts"


BETWEEN_HOSTS = {
    "psfleet over TCP, no shared memory": Connection.TCP,
    "psfleet over TLS, no shared memory": Connection.TLS,
}
"""Contenders as on several machines, less the network between them."""


class Crew:
    """A contender: its processes, ready to be measured (see measuring.Subject).

    Args:
        name: Of the contender.
        servers: Process ids of its servers.
        told: The processes that are told how many steps to make: its workers, or a coordinator.
        workers: Process ids of the workers behind a coordinator.
        standbys: Process ids of the servers' standbys.
        endpoints: Where the servers listen.
    """

    def __init__(
        self,
        name: str,
        servers: list[int],
        told: list[subprocess.Popen[str]],
        workers: Sequence[int] = (),
        standbys: Sequence[int] = (),
        endpoints: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.endpoints = endpoints
        self.workers = len(workers or told)
        self._servers = servers
        self._told = told
        self._behind = list(workers)
        self._standbys = {"standbys": list(standbys)} if standbys else {}

    def processes(self) -> dict[str, list[int]]:
        """Process ids by group."""
        workers = [process.pid for process in self._told] + self._behind
        return {"servers": self._servers, "workers": workers, **self._standbys}

    def run(self, steps: int) -> list[dict[str, Any]]:
        """Have every worker make `steps` steps."""
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
    """Take steps as the driver says, until it closes the pipe.

    Args:
        step: Called with 0, 1, 2, ... throughout all runs.
        finish: Called at the end of each run, within the measured time.
        replies: Leads to the driver.
    """
    done = 0
    print("READY", file=replies, flush=True)
    for line in sys.stdin:
        for number in range(done, done + int(line)):
            step(number)
        finish()
        done += int(line)
        print(json.dumps({"steps": done}), file=replies, flush=True)


def keep_output() -> TextIO:
    """The pipe to the driver, for answers alone: what libraries print from now on is dropped."""
    pipe = os.fdopen(os.dup(1), "w")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    return pipe


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Drop what libraries write to the errors meanwhile, however they are told not to."""
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
    """So many processes, ready, that share the workers: each runs the script with --worker FIRST NUMBER."""
    each = workers // count
    crew = [
        start(
            stack,
            [sys.executable, script, "--worker", str(place * each), str(each)],
            environment(
                PSFLEET_ROLE="worker",
                PSFLEET_RANK="0",
                PSFLEET_SERVERS=",".join(endpoints),
                PSFLEET_WORKERS=str(workers),
            ),
        )
        for place in range(count)
    ]
    stack.callback(release, crew)
    for process in crew:
        wait_ready(process)
    return crew


def free_ports(count: int) -> list[int]:
    """Ports of this host that nobody used a moment ago; for peers that must be told theirs."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def environment(**more: str) -> dict[str, str]:
    """The environment of a measured process: one thread for each BLAS, psfleet importable.

    OPENBLAS_CORETYPE is taken out: each BLAS shall choose the kernels of this processor by itself. So is
    PYTHONDONTWRITEBYTECODE, with which each process would compile all modules of a checkout anew.
    """
    paths = [str(ROOT / part) for part in (".", "server", "worker", "launch", "benchmarks")]
    single = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    left_out = {"OPENBLAS_CORETYPE", "PYTHONDONTWRITEBYTECODE"}
    inherited = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**inherited, **single, "PYTHONPATH": os.pathsep.join(paths), **more}


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
    """Servers of psfleet and workers that run `program` (a script and its arguments).

    server: What Python runs as a server.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="psfleet-bench-")))
        more = {**_settings(over, folder), **(variables or {})}
        if standbys:
            more["PSFLEET_REPLICAS"] = "1"
        wanted = [
            f"unix:{folder}/server.{i}" if over is Connection.MEMORY else "127.0.0.1:0"
            for i in range(servers)
        ]
        endpoints, running = _start_servers(stack, server, folder / "ready", wanted, workers, more)
        following: list[subprocess.Popen[str]] = []
        if standbys:
            more["PSFLEET_STANDBY"] = "1"
            _, following = _start_servers(
                stack, server, folder / "following", endpoints, workers, more
            )
            del more["PSFLEET_STANDBY"]
        crew = []
        for rank in range(workers):
            own = environment(
                **more,
                PSFLEET_ROLE="worker",
                PSFLEET_RANK=str(rank),
                PSFLEET_SERVERS=",".join(endpoints),
                PSFLEET_WORKERS=str(workers),
            )
            crew.append(start(stack, [sys.executable, *program], own))
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
    """What makes processes connect in this way; makes a job's certificates if it takes some."""
    if over is Connection.MEMORY:
        return {}
    if over is Connection.TCP:
        return {"PSFLEET_LANE": "inline", "PSFLEET_INSECURE": "1"}
    # Here, for the environments of peers have no cryptography.
    from psfleet.core.net.connections.certificates import make_credentials

    return {
        "PSFLEET_LANE": "inline",
        "PSFLEET_TLS": str(make_credentials(folder / "credentials")["server"]),
    }


def start(
    stack: contextlib.ExitStack, command: Sequence[str], variables: Mapping[str, str]
) -> subprocess.Popen[str]:
    """A process with pipes that does not outlive the stack."""
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
    """Return when the worker has said READY."""
    line = _line(worker)
    if line.strip() != "READY":
        raise RuntimeError(f"a worker said {line!r} instead of READY")


def release(workers: Sequence[subprocess.Popen[str]]) -> None:
    """Tell all workers together that there is no more to do; they may have to end together."""
    for worker in workers:
        assert worker.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            worker.stdin.close()


def _start_servers(
    stack: contextlib.ExitStack,
    program: Sequence[str],
    ready: Path,
    wanted: Sequence[str],
    workers: int,
    more: Mapping[str, str],
) -> tuple[list[str], list[subprocess.Popen[str]]]:
    """A server for each endpoint; `ready`: how the names of their ready files begin."""
    files = [ready.with_suffix(f".{i}") for i in range(len(wanted))]
    running = []
    for rank, file in enumerate(files):
        command = [
            sys.executable,
            *program,
            "--index",
            str(rank),
            "--servers",
            ",".join(wanted),
            "--workers",
            str(workers),
            "--ready-file",
            str(file),
        ]
        running.append(start(stack, command, environment(**more)))
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
    """Wait for its end; stop it if it does not end by itself."""
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
