"""Resources of a machine: cores, memory, GPUs and addresses; and whether its memory has run out."""

import os
import socket
import subprocess
from pathlib import Path

from psfleet.wire.v1 import agent_pb2 as pb
from psfleet_launch.engines.remote.addresses import address_towards, bracketed
from psfleet_launch.engines.remote.agent_messages import versions
from psfleet_launch.job.job_request import Resources

_CGROUPS = Path("/sys/fs/cgroup")
_NVIDIA_SMI_TIMEOUT = 5.0  # seconds for nvidia-smi


def describe(name: str, address: str, launcher: str) -> pb.Hello:
    """Describe this machine for an agent's hello.

    Args:
        name: Name for people; empty: the machine's own name.
        address: Address for servers to listen on; empty: the address from which the machine reaches the
            launcher.
    """
    host, _, port = launcher.rpartition(":")
    hello, size = versions(), Resources.of_this_machine()
    hello.MergeFrom(
        pb.Hello(
            name=name or socket.gethostname(),
            address=bracketed(address) or address_towards(host, int(port)),
            cores=size.cores,
            memory=size.memory,
            gpus=describe_gpus(),
            pid=os.getpid(),
        )
    )
    return hello


def describe_gpus() -> list[str]:
    """Names of the GPUs that the driver knows."""
    return _of_each_gpu("name")


def gpu_memory() -> list[tuple[int, int]]:
    """Bytes of each GPU's memory that are free, and that there are."""
    pairs = [line.split(",") for line in _of_each_gpu("memory.free,memory.total")]
    return [
        (int(free) << 20, int(total) << 20)
        for free, total in pairs
        if free.isdigit() and total.strip().isdigit()  # else the driver does not say
    ]


def gpu_drivers() -> list[str]:
    """Versions of their drivers, without repeats."""
    return sorted({*_of_each_gpu("driver_version")})


def _of_each_gpu(field: str) -> list[str]:
    try:
        output = subprocess.run(
            ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_NVIDIA_SMI_TIMEOUT,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in output.stdout.splitlines() if line.strip()]


def memory_kills() -> int:
    """Return the number of processes that the kernel has killed for lack of memory: of this cgroup, else of
    all.
    """
    for path in [*_own_cgroup(), Path("/proc/vmstat")]:
        for line in _lines(path):
            words = line.split()
            if words[:1] == ["oom_kill"]:
                return int(words[1])
    return 0


def _own_cgroup() -> list[Path]:
    """Return the folders in which the kernel counts for this process's cgroup, in versions 2 and 1."""
    folders = []
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            folders.append(_CGROUPS / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            folders.append(_CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control")
    return folders


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
