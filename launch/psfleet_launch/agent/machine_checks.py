"""Whether a machine is fit to run processes of a job, and what to change where it is not."""

import ctypes
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from psfleet.errors import ConfigError
from psfleet.settings.declaration import from_variable
from psfleet.settings.declared_settings import JobSettings, UserSettings
from psfleet.tables.budget import tables_share
from psfleet_launch.agent.machine import describe_gpus, gpu_drivers, gpu_memory
from psfleet_launch.engines.launch_engine import Engine
from psfleet_launch.engines.remote.addresses import own_address

__all__ = ["Finding", "check_machine"]

_CUDA_PACKAGES = ("cuda-toolkit", "numba-cuda")
_PACKAGES = ("psfleet", "numpy", "numba", "grpcio", "protobuf")
_FEW_FILES = 4096  # each connection of a server takes one
_LITTLE_MEMORY = 1 << 30
_TIME_ERROR = 5  # what adjtimex returns while nobody sets the clock
_TIMEX = 512  # bytes, more than the kernel's struct has
_BLAS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What it is.
        value: How it is.
        advice: What to change; empty: nothing.
        is_fatal: A job would fail.
    """

    name: str
    value: str
    advice: str = ""
    is_fatal: bool = False


def check_machine(engine: type[Engine], root: Path = Path("/")) -> Iterator[Finding]:
    """What can be said of this machine without a job.

    Args:
        engine: That a job would use.
        root: Where the kernel's files are.
    """
    yield _versions()
    yield from _programs(engine)
    if engine.spans_machines and engine.reaches_servers:
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
    found, missing = _installed(_PACKAGES)
    advice = f"install {' and '.join(missing)}" if missing else ""
    value = ", ".join([f"Python {platform.python_version()}", *found])
    return Finding("versions", value, advice, is_fatal=bool(missing))


def _installed(packages: Sequence[str]) -> tuple[list[str], list[str]]:
    """Of these packages those that are there, with their versions, and those that are missing."""
    found, missing = [], []
    for package in packages:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    return found, missing


def _cuda(has_gpu: bool) -> Finding:
    """What servers need to hold tables on a GPU."""
    found, missing = _installed(_CUDA_PACKAGES)
    drivers = [f"driver {version}" for version in gpu_drivers()] or ["no driver"]
    advice = (
        "for tables on the GPU: pip install 'psfleet[cuda]'"
        if has_gpu and "numba-cuda" in missing
        else ""
    )
    return Finding("CUDA", ", ".join([*drivers, *found]), advice)


def _gpu_memory() -> Iterator[Finding]:
    """What is free on the GPUs, and what of it tables may take."""
    sizes = gpu_memory()
    if not sizes:
        return
    most = from_variable(JobSettings, "device_memory", os.environ)
    said = "; ".join(
        f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free, "
        f"{tables_share(free, most) / 2**30:.1f} for the tables of a server"
        for free, total in sizes
    )
    yield Finding("GPU memory", said)


def _programs(engine: type[Engine]) -> Iterator[Finding]:
    for program in engine.programs:
        path = shutil.which(program)
        advice = "" if path else f"engine {engine.name} calls it: put it on the path"
        yield Finding(program, path or "missing", advice, is_fatal=not path)


def _address() -> Finding:
    """The address of this machine's name, and whether one can listen and connect there."""
    try:
        address = own_address()
    except ConfigError as error:
        return Finding("address", "none", str(error))
    try:
        with socket.create_server((address, 0)) as server:
            socket.create_connection(server.getsockname()[:2], 5).close()
    except OSError as error:
        advice = "let processes of this machine listen and connect there, or name another one with --listen"
        return Finding("address", f"{address}: {error.strerror}", advice, is_fatal=True)
    return Finding("address", f"{address}, on any free port")


def _clock() -> Finding:
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX))
    if state == _TIME_ERROR:
        advice = (
            "run chrony or another NTP client: certificates of a job are refused by a machine whose clock is "
            "an hour off"
        )
        return Finding("clock", "not kept by NTP, as far as the kernel knows", advice)
    return Finding("clock", "kept by NTP")


def _open_files() -> Finding:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_few = most != resource.RLIM_INFINITY and most < _FEW_FILES
    advice = f"raise the hard limit to {_FEW_FILES} (ulimit -Hn, LimitNOFILE)" if is_few else ""
    return Finding(
        "open files", "unlimited" if most == resource.RLIM_INFINITY else f"{most}", advice
    )


def _memory(root: Path) -> Finding:
    """What is free: of the machine, or of the container if that may take less."""
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
    said = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = said.partition("[")[2].partition("]")[0] or "unknown"
    advice = ""
    if chosen == "never":
        advice = (
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled makes large tables faster"
        )
    return Finding("huge pages", chosen, advice)


def _kernel_cache() -> Finding:
    """Whether processes may keep compiled kernels: in a folder that only its owner can write."""
    folder = Path(from_variable(UserSettings, "cache", os.environ)).expanduser()
    nearest = next(one for one in (folder, *folder.parents) if one.exists())
    status = nearest.stat()
    is_open = status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if os.access(nearest, os.W_OK) and not (nearest == folder and is_open):
        return Finding("kernel cache", str(folder))
    advice = (
        f"let {folder} be a folder that only its owner can write, or name one with PSFLEET_CACHE"
    )
    return Finding("kernel cache", "none: each process compiles its kernels anew", advice)


def _blas_threads() -> Finding:
    told = {name: os.environ[name] for name in _BLAS if os.environ.get(name)}
    cores = len(os.sched_getaffinity(0))
    many = [name for name, said in told.items() if said.isdigit() and int(said) > cores]
    value = ", ".join(f"{name}={said}" for name, said in told.items()) or "as the launcher says"
    advice = f"{many[0]} is more than the {cores} cores of this machine: unset it" if many else ""
    return Finding("BLAS threads", f"{value}, {cores} cores", advice)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int:
    """The number in a file; 0 if there is none, as where nothing is limited."""
    said = _text(path).strip()
    return int(said) if said.isdigit() else 0


def _kibibytes(path: Path, name: str) -> int:
    for line in _text(path).splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    return 0
