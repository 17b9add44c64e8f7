"""A machine of a job: its resources, and the addresses by which others reach it."""

import ipaddress
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from psfleet.core.base.errors import ConfigError
from psfleet_launch.engines.remote.agent_messages import Hello
from psfleet_launch.job.resources import Resources

if TYPE_CHECKING:  # it loads gRPC
    from psfleet_launch.engines.remote.agent_hub import AgentConnection

_CONNECT = 5.0  # seconds; the kernel asks again after 1 and 3


_NVIDIA_SMI_TIMEOUT = 5.0  # seconds for nvidia-smi


def bracketed(address: str) -> str:
    """The address as it stands before a port: `[fd00::1]` for `fd00::1`, others as they are."""
    return f"[{address}]" if ":" in address and not address.startswith("[") else address


def listen_endpoint(text: str) -> str:
    """The endpoint of `ADDRESS` or `ADDRESS:PORT`; without a port it is any free one."""
    if text.startswith("["):
        return text if not text.endswith("]") else f"{text}:0"
    return text if text.count(":") == 1 else f"{bracketed(text)}:0"


def read_addresses(texts: Sequence[str]) -> dict[str, str]:
    """Machines and their addresses, of `HOST=ADDRESS`.

    Raises:
        ConfigError: An entry is none, or a machine is named twice.
    """
    addresses: dict[str, str] = {}
    for entry in texts:
        host, _, address = entry.rpartition("=")
        if not host or not address:
            raise ConfigError(f"--addresses says {entry!r}; write HOST=ADDRESS for each machine")
        if host in addresses:
            raise ConfigError(
                f"--addresses names host {host!r} twice; give each machine one address"
            )
        addresses[host] = bracketed(address)
    return addresses


def set_addresses(addresses: Mapping[str, str], machines: "Mapping[str, AgentConnection]") -> None:
    """Let servers on these machines listen at these addresses.

    Raises:
        ConfigError: One of them is no machine of the job.
    """
    for host, address in addresses.items():
        if host not in machines:
            machine_names = ", ".join(machines) or "none"
            raise ConfigError(
                f"--addresses names host {host!r}; the machines of this job are {machine_names}"
            )
        agent = machines[host]
        agent.hello = replace(agent.hello, address=address)


def address_towards(host: str, port: int = 1) -> str:
    """This machine's address on the route to a host. Nothing is sent: a datagram socket only looks.

    Raises:
        ConfigError: The host has no address, or there is no route.
    """
    try:
        infos = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, socket_address = infos[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(socket_address)
            return bracketed(str(probe.getsockname()[0]))
    except OSError as error:
        raise ConfigError(f"host {host}: there is no way to it ({error.strerror})") from None


def own_address() -> str:
    """The address of this machine's name.

    Raises:
        ConfigError: It has none that other machines could reach.
    """
    name = socket.gethostname()
    try:
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        infos = []
    own_addresses = [ipaddress.ip_address(where[0]) for *_, where in infos]
    usable = [
        address
        for address in own_addresses
        if not address.is_loopback and not address.is_link_local
    ]
    if not usable:
        raise ConfigError(
            f"the name of this machine, {name!r}, has no address that others could reach; name one with "
            "--listen"
        )
    return bracketed(str(min(usable, key=lambda address: address.version)))


def why_unreachable(endpoint: str) -> str:
    """Why this machine cannot connect to an endpoint on another one; empty: it can."""
    from psfleet.core.net.connections.tls_sockets import connected  # loads gRPC

    try:
        connected(endpoint, _CONNECT).close()
    except TimeoutError:
        return f"no answer within {_CONNECT:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def describe(name: str, address: str, launcher: str) -> Hello:
    """Describe this machine for an agent's hello.

    Args:
        name: Name for people; empty: the machine's own name.
        address: Address for servers to listen on; empty: the address from which the machine reaches the
            launcher.
    """
    host, _, port = launcher.rpartition(":")
    size = Resources.of_this_machine()
    return Hello(
        name=name or socket.gethostname(),
        address=bracketed(address) or address_towards(host, int(port)),
        cores=size.cores,
        memory=size.memory,
        gpus=describe_gpus(),
        pid=os.getpid(),
    )


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
