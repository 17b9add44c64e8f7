"""Description of this machine, which an agent sends to its launcher: cores, memory, GPUs, and network
address.

The module also reads the addresses in `--listen` and `--addresses`. The functions run commands and resolve
names, so they may take seconds.
"""

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

_CONNECT = 5.0  # seconds; the kernel repeats its request for a connection after 1 and 3


_NVIDIA_SMI_TIMEOUT = 5.0  # seconds for nvidia-smi


def bracketed(address: str) -> str:
    """Return an address in the form that is followed by a port: `[fd00::1]` for an IPv6 address `fd00::1`."""
    return f"[{address}]" if ":" in address and not address.startswith("[") else address


def listen_endpoint(text: str) -> str:
    """Return the endpoint for `ADDRESS` or `ADDRESS:PORT`. Without a port the endpoint has port 0: any free
    port."""
    if text.startswith("["):
        return text if not text.endswith("]") else f"{text}:0"
    return text if text.count(":") == 1 else f"{bracketed(text)}:0"


def read_addresses(texts: Sequence[str]) -> dict[str, str]:
    """Return the address of each machine from entries `HOST=ADDRESS`.

    Raises:
        ConfigError: An entry has another form, or a host occurs twice.
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
    """Set the addresses that servers on some machines listen on.

    Raises:
        ConfigError: The job has no machine with one of the names.
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
    """Return the local address that this machine uses to connect to a host.

    Nothing is sent. Connecting a UDP socket only makes the kernel choose the route.

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
    """Return the address that this machine's name resolves to. IPv4 is preferred.

    Raises:
        ConfigError: The name has no address that other machines could connect to.
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
    """Try to connect to an endpoint, and return why this machine cannot, or "" if it can."""
    from psfleet.core.net.connections.tls_sockets import connected  # loads gRPC

    try:
        connected(endpoint, _CONNECT).close()
    except TimeoutError:
        return f"no answer within {_CONNECT:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def describe(name: str, address: str, launcher: str) -> Hello:
    """Return the description of this machine that an agent sends first.

    Args:
        name: Name of the machine, or "" for its host name.
        address: Address for servers to listen on, or "" for the address with which this machine connects to
            the launcher.
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
    """Return the names of the GPUs, or [] if nvidia-smi is not installed."""
    return _of_each_gpu("name")


def gpu_memory() -> list[tuple[int, int]]:
    """Return the free and the total memory of each GPU, in bytes."""
    pairs = [line.split(",") for line in _of_each_gpu("memory.free,memory.total")]
    return [
        (int(free) << 20, int(total) << 20)
        for free, total in pairs
        if free.isdigit() and total.strip().isdigit()  # otherwise the driver reports no numbers
    ]


def gpu_drivers() -> list[str]:
    """Return the versions of the GPUs' drivers, each once."""
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
