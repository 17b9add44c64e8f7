"""Checks of `psfleet doctor`: can this machine run a job, and can the machines connect to each other?

`check_machine` reads versions, limits, memory and kernel settings. It changes nothing. PeerCheck must run
on all machines at the same time. Each machine listens on the same port, connects to every other machine,
and measures the time until a byte comes back. The port does nothing but send bytes back, and is closed at
the end.
"""

import contextlib
import ctypes
import errno
import importlib.metadata
import os
import platform
import resource
import secrets
import shutil
import socket
import socketserver
import stat
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.settings.declaration import from_variable
from psfleet.core.base.settings.declared_settings import JobSettings, UserSettings
from psfleet.core.base.threads import ServiceThread
from psfleet.core.engine.tables.budget import tables_share
from psfleet_launch.engines.launch_engine import Engine
from psfleet_launch.engines.remote.machine import (
    describe_gpus,
    gpu_drivers,
    gpu_memory,
    own_address,
)

_CUDA_PACKAGES = ("cuda-toolkit", "numba-cuda")
_PACKAGES = ("psfleet", "numpy", "numba", "grpcio", "protobuf")
_FEW_FILES = (
    4096  # open files below which a warning is given; each connection of a server takes one
)
_LITTLE_MEMORY = 1 << 30  # bytes
_TIME_ERROR = 5  # result of adjtimex (TIME_ERROR) if the clock is not synchronized
_TIMEX = 512  # bytes of the buffer for the kernel's struct timex, which is smaller
_BLAS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


_NAME = 16  # bytes of the random name of a check
_ROUNDS = 20  # round trips of one byte; the median counts
_CONNECT = 2.0  # seconds for one try
_PAUSE = 0.1  # seconds between looks and tries
_SLOW = 0.005  # seconds; a step of training has several messages one after the other


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        name: Name of the check, or name of the other machine in a PeerCheck.
        value: Result in words.
        advice: Advice on what to change, or "" if nothing needs to change.
        is_fatal: True if a job would fail on this machine.
    """

    name: str
    value: str
    advice: str = ""
    is_fatal: bool = False


def check_machine(engine: type[Engine], root: Path = Path("/")) -> Iterator[Finding]:
    """Check this machine, and yield the result of each check.

    Args:
        root: Parent of the folders /proc and /sys, for tests.
    """
    yield _versions()
    yield from _programs(engine)
    if engine.spans_machines:
        yield _address()
    yield _clock()
    yield _open_files()
    yield _memory(root)
    yield _huge_pages(root)
    yield _kernel_cache()
    yield _blas_threads()
    gpus = describe_gpus()
    yield Finding("GPUs", ", ".join(gpus) or "none that nvidia-smi names")
    yield from _gpu_memory()
    yield _cuda(bool(gpus))


def _versions() -> Finding:
    versions, missing = _installed(_PACKAGES)
    advice = f"install {' and '.join(missing)}" if missing else ""
    value = ", ".join([f"Python {platform.python_version()}", *versions])
    return Finding("versions", value, advice, is_fatal=bool(missing))


def _installed(packages: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the installed packages, each with its version, and the missing packages."""
    versions, missing = [], []
    for package in packages:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    return versions, missing


def _cuda(has_gpu: bool) -> Finding:
    versions, missing = _installed(_CUDA_PACKAGES)
    drivers = [f"driver {version}" for version in gpu_drivers()] or ["no driver"]
    advice = (
        "for tables on the GPU: pip install '.[cuda]' in psfleet's checkout"
        if has_gpu and "numba-cuda" in missing
        else ""
    )
    return Finding("CUDA", ", ".join([*drivers, *versions]), advice)


def _gpu_memory() -> Iterator[Finding]:
    """Report the free memory of each GPU, and how much of it tables may use."""
    sizes = gpu_memory()
    if not sizes:
        return
    tables_limit = from_variable(JobSettings, "device_memory", os.environ)
    text = "; ".join(
        f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free, "
        f"{tables_share(free, tables_limit) / 2**30:.1f} for the tables of a server"
        for free, total in sizes
    )
    yield Finding("GPU memory", text)


def _programs(engine: type[Engine]) -> Iterator[Finding]:
    for program in engine.programs:
        path = shutil.which(program)
        advice = "" if path else f"engine {engine.name} calls it: put it on the path"
        yield Finding(program, path or "missing", advice, is_fatal=not path)


def _address() -> Finding:
    """Check that a process can listen on the address of this machine's name and connect to it."""
    try:
        address = own_address()
    except ConfigError as error:
        return Finding("address", "none", str(error))
    try:
        family = socket.AF_INET6 if address.startswith("[") else socket.AF_INET
        with socket.create_server((address.strip("[]"), 0), family=family) as server:
            socket.create_connection(server.getsockname()[:2], 5).close()
    except OSError as error:
        advice = "let processes of this machine listen and connect there, or name another one with --listen"
        return Finding("address", f"{address}: {error.strerror}", advice, is_fatal=True)
    return Finding("address", f"{address}, on any free port")


def _clock() -> Finding:
    # With a zeroed struct adjtimex changes nothing and returns the state of the clock.
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX))
    if state == _TIME_ERROR:
        advice = (
            "run chrony or another NTP client: certificates of a job are refused by a machine whose clock is "
            "an hour off"
        )
        return Finding("clock", "not kept by NTP, as far as the kernel knows", advice)
    return Finding("clock", "kept by NTP")


def _open_files() -> Finding:
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_few = hard_limit != resource.RLIM_INFINITY and hard_limit < _FEW_FILES
    advice = f"raise the hard limit to {_FEW_FILES} (ulimit -Hn, LimitNOFILE)" if is_few else ""
    return Finding(
        "open files",
        "unlimited" if hard_limit == resource.RLIM_INFINITY else f"{hard_limit}",
        advice,
    )


def _memory(root: Path) -> Finding:
    """Report the free memory of the machine, or of the container if its limit is lower."""
    available = _kibibytes(root / "proc/meminfo", "MemAvailable:") << 10
    limit = _number(root / "sys/fs/cgroup/memory.max")
    free = (
        min(available, limit - _number(root / "sys/fs/cgroup/memory.current"))
        if limit
        else available
    )
    where = " of this container" if free < available else ""
    advice = "a server needs about 0.5 GiB beside its tables" if free < _LITTLE_MEMORY else ""
    return Finding("memory", f"{free / 2**30:.1f} GiB free{where}", advice)


def _huge_pages(root: Path) -> Finding:
    text = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    choice = text.partition("[")[2].partition("]")[0] or "unknown"
    advice = ""
    if choice == "never":
        advice = (
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled makes large tables faster"
        )
    return Finding("huge pages", choice, advice)


def _kernel_cache() -> Finding:
    """Check that processes can cache compiled kernels in a folder that only its owner can write.

    Kernels are machine code. psfleet does not load them from a folder that other users can write.
    """
    folder = Path(from_variable(UserSettings, "cache", os.environ)).expanduser()
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    status = nearest.stat()
    is_open = status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if os.access(nearest, os.W_OK) and not (nearest == folder and is_open):
        return Finding("kernel cache", str(folder))
    advice = (
        f"let {folder} be a folder that only its owner can write, or name one with PSFLEET_CACHE"
    )
    return Finding("kernel cache", "none: each process compiles its kernels again", advice)


def _blas_threads() -> Finding:
    variables = {name: os.environ[name] for name in _BLAS if os.environ.get(name)}
    cores = len(os.sched_getaffinity(0))
    many = [name for name, text in variables.items() if text.isdigit() and int(text) > cores]
    value = (
        ", ".join(f"{name}={text}" for name, text in variables.items()) or "as the launcher says"
    )
    advice = f"{many[0]} is more than the {cores} cores of this machine: unset it" if many else ""
    return Finding("BLAS threads", f"{value}, {cores} cores", advice)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int:
    """Return the number in a file, or 0 if the content is no number, such as "max" for no limit."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else 0


def _kibibytes(path: Path, name: str) -> int:
    for line in _text(path).splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return 0


class PeerCheck:
    """This machine's part of the check that all machines can connect to each other.

        with PeerCheck(hosts, port, seconds) as check:
            for finding in check.findings(): ...

    Args:
        hosts: All machines including this one. Must be the same list on every machine.
        port: TCP port for the check, the same on every machine.
        seconds: Time limit. Machines that have not answered by then are reported as unreachable.

    Raises:
        ConfigError: A host has no address, no host is this machine, or the port is in use.
    """

    def __init__(self, hosts: Sequence[str], port: int, seconds: float) -> None:
        self._addresses = {host: _peer_address(host) for host in hosts}
        self._port = port
        self._seconds = seconds
        self._name = secrets.token_bytes(_NAME)
        self._came: set[bytes] = set()
        self._host, self._server = self._listen()
        self._thread = ServiceThread(self._server.serve_forever, "peers", (_PAUSE,))

    def __enter__(self) -> "PeerCheck":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def findings(self) -> Iterator[Finding]:
        """Try until all machines have connected to each other, or until the time limit. Then yield
        findings."""
        deadline = time.monotonic() + self._seconds
        names: dict[str, bytes] = {}
        findings: dict[str, Finding] = {}
        other_hosts = [host for host in self._addresses if host != self._host]
        # Each machine's PeerCheck has a random name. `names` has the names of the checks on machines that
        # this machine has reached, and `_came` the names of the checks that have connected to this machine.
        # If `_came` includes all of `names`, both directions work.
        while len(names) < len(other_hosts) or not self._came >= set(names.values()):
            for host in [peer for peer in other_hosts if peer not in names]:
                findings[host], name = self._measure(host)
                if name:
                    names[host] = name
            if time.monotonic() > deadline:
                break
            time.sleep(_PAUSE)
        for host in other_hosts:
            yield findings[host]
            if host in names and names[host] not in self._came:
                advice = (
                    f"let {host} open connections to {self._host}, port {self._port} and others"
                )
                yield Finding(host, f"has not reached {self._host}", advice, is_fatal=True)

    def _listen(self) -> tuple[str, "_EchoServer"]:
        """Return the host name of this machine, and a server that listens there.

        This machine is the first host in the list whose address this process can listen on.
        """
        why = "none of them is this machine"
        for host, address in self._addresses.items():
            try:
                return host, _EchoServer((address, self._port), self._name, self._came)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    why = f"port {self._port} of {host} cannot be used ({error.strerror})"
        raise ConfigError(f"--peers is {','.join(self._addresses)!r}; {why}")

    def _measure(self, host: str) -> tuple[Finding, bytes]:
        """Connect to a host. Return the finding and the name of the check on that host, b"" if
        unreachable."""
        try:
            with socket.create_connection((self._addresses[host], self._port), _CONNECT) as line:
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                line.sendall(self._name)
                name = _read(line, _NAME)
                seconds = statistics.median(_echo(line) for _ in range(_ROUNDS))
        except OSError as error:
            cause = error.strerror or str(error) or "it does not answer"
            advice = (
                f"run this check there at the same time, and let this machine open connections to {host}, "
                f"port {self._port} and others"
            )
            return Finding(host, f"cannot be reached: {cause}", advice, is_fatal=True), b""
        advice = "every step waits for several such messages: use machines that are nearer"
        value = f"{seconds * 1e3:.2f} ms there and back"
        return Finding(host, value, advice if seconds > _SLOW else ""), name


class _EchoServer(socketserver.ThreadingTCPServer):
    """Server that sends received bytes back, and collects the names of the checks that have connected."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, where: tuple[str, int], name: bytes, came: set[bytes]) -> None:
        self.name = name
        self.came = came
        self.address_family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
        super().__init__(where, _EchoHandler)


class _EchoHandler(socketserver.BaseRequestHandler):
    """Handles one connection: exchanges the names of the checks, then sends single bytes back."""

    server: _EchoServer

    def handle(self) -> None:
        self.request.settimeout(_CONNECT)
        with contextlib.suppress(OSError):
            peer_name = _read(self.request, _NAME)
            self.request.sendall(self.server.name)
            for _ in range(_ROUNDS):
                self.request.sendall(_read(self.request, 1))
            self.server.came.add(peer_name)


def _read(line: socket.socket, size: int) -> bytes:
    """Read exactly `size` bytes.

    Raises:
        OSError: The connection ended before all bytes were read.
    """
    data = b""
    while len(data) < size:
        chunk = line.recv(size - len(data))
        if not chunk:
            raise ConnectionResetError("the connection has ended")
        data += chunk
    return data


def _echo(line: socket.socket) -> float:
    """Send one byte, and return the seconds until it has come back."""
    started_at = time.perf_counter()
    line.sendall(b"?")
    _read(line, 1)
    return time.perf_counter() - started_at


def _peer_address(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"--peers names {host!r}, which has no address: {error.strerror}"
        ) from None
