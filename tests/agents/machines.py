"""Machines of a test: network namespaces on a bridge of their own, each with an sshd."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.waiting import until

__all__ = ["Lab", "laboratory"]

NETWORK = "198.18.7"  # for benchmarks of networks (RFC 2544), and seen by these namespaces only
NAMES = ("alpha", "beta")
_SSHD = "/usr/sbin/sshd"


@dataclass(frozen=True)
class Lab:
    """A launcher's namespace and those of two hosts.

    Attributes:
        folder: Of keys and configurations.
        mark: Part of the names of all namespaces.
    """

    folder: Path
    mark: str

    @property
    def inside(self) -> list[str]:
        """What a command begins with that runs where the launcher does."""
        return ["ip", "netns", "exec", f"{self.mark}-0"]

    @property
    def ssh_options(self) -> str:
        """The value of --ssh-options."""
        return f"-F,{self.folder / 'ssh_config'}"

    def cut(self, host: str, is_up: bool = False) -> None:
        """Take a host's cable out of the switch, or put it back."""
        state = "up" if is_up else "down"
        number = NAMES.index(host) + 1
        _run("ip", "-n", f"{self.mark}-sw", "link", "set", f"port{number}", state)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (command, done.stderr)


@contextlib.contextmanager
def laboratory(folder: Path) -> Iterator[Lab]:
    """Make the machines; skip by name where that cannot be done."""
    if os.geteuid() != 0:
        pytest.skip("engine ssh: network namespaces need root")
    for program in ("ip", "ssh", "ssh-keygen", _SSHD):
        if shutil.which(program) is None:
            pytest.skip(
                f"engine ssh: {program} is not installed (packages iproute2, openssh-server)"
            )
    lab = Lab(folder, f"psfleet-{os.getpid()}")
    with contextlib.ExitStack() as stack:
        switch = f"{lab.mark}-sw"
        for namespace in (switch, *(f"{lab.mark}-{number}" for number in range(len(NAMES) + 1))):
            _run("ip", "netns", "add", namespace)
            stack.callback(_run, "ip", "netns", "del", namespace)
        _run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "br0", "up")
        for number in range(len(NAMES) + 1):
            _plug(lab, switch, number)
        _make_keys(lab)
        for number in range(1, len(NAMES) + 1):
            stack.enter_context(_sshd(lab, number))
        yield lab


def _plug(lab: Lab, switch: str, number: int) -> None:
    """A cable between a namespace and the switch."""
    own, port = f"{lab.mark}-{number}", f"port{number}"
    link = ["ip", "-n", switch, "link"]
    _run(*link, "add", port, "type", "veth", "peer", "name", "eth0", "netns", own)
    _run(*link, "set", port, "master", "br0", "up")
    _run("ip", "-n", own, "address", "add", f"{NETWORK}.{number + 1}/24", "dev", "eth0")
    _run("ip", "-n", own, "link", "set", "eth0", "up")
    _run("ip", "-n", own, "link", "set", "lo", "up")


def _make_keys(lab: Lab) -> None:
    for name in ("host", "user", "stranger"):
        _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(lab.folder / name))
    hosts = "".join(
        f"Host {name}\n HostName {NETWORK}.{number + 2}\n" for number, name in enumerate(NAMES)
    )
    common = "Host *\n Port 2222\n User root\n StrictHostKeyChecking no\n LogLevel ERROR\n"
    common += " UserKnownHostsFile /dev/null\n SendEnv PSFLEET_TEST\n IdentitiesOnly yes\n"
    for config, key in (("ssh_config", "user"), ("stranger_config", "stranger")):
        identity = f" IdentityFile {lab.folder / key}\n"
        (lab.folder / config).write_text(
            f"{hosts}Host away\n HostName {NETWORK}.99\n{common}{identity}"
        )


@contextlib.contextmanager
def _sshd(lab: Lab, number: int) -> Iterator[None]:
    Path("/run/sshd").mkdir(exist_ok=True)  # where it separates privileges
    config = lab.folder / f"sshd_config.{number}"
    address = f"{NETWORK}.{number + 1}"
    config.write_text(
        f"ListenAddress {address}:2222\nHostKey {lab.folder / 'host'}\nPidFile none\nUsePAM no\n"
        f"AuthorizedKeysFile {lab.folder / 'user.pub'}\nStrictModes no\nAcceptEnv PSFLEET_TEST\n"
        "PermitRootLogin prohibit-password\n"
    )
    command = ["ip", "netns", "exec", f"{lab.mark}-{number}", _SSHD, "-D", "-e", "-f", str(config)]
    with (lab.folder / f"sshd.{number}").open("w") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        until(lambda: _listens(lab, address) or process.poll() is not None, "sshd")
        assert process.poll() is None, (lab.folder / f"sshd.{number}").read_text()
        yield
    finally:
        process.terminate()
        process.wait()


def _listens(lab: Lab, address: str) -> bool:
    """Whether somebody answers on port 2222, as the launcher sees it."""
    probe = f"import socket; socket.create_connection(({address!r}, 2222), 1).close()"
    command = [*lab.inside, "python3", "-c", probe]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
