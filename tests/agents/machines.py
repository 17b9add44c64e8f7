"""Machines of a test: network namespaces on a bridge of their own."""

import contextlib
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.programs import ended

NETWORK = "198.18.7"  # for benchmarks of networks (RFC 2544), and seen by these namespaces only
NAMES = ("alpha", "beta")


@dataclass(frozen=True)
class Lab:
    """A launcher's namespace and those of two hosts.

    Attributes:
        folder: Of keys and configurations.
        mark: Part of the names of all namespaces.
        hosts: What the hosts are called.
    """

    folder: Path
    mark: str
    hosts: Sequence[str] = NAMES

    @property
    def inside(self) -> list[str]:
        """What a command begins with that runs where the launcher does."""
        return self.within(0)

    def within(self, number: int) -> list[str]:
        """What a command begins with that runs on a host, from 1 on; 0: where the launcher does."""
        return ["nsenter", f"--net=/run/netns/{self.mark}-{number}"]

    def cut(self, host: str, is_up: bool = False) -> None:
        """Take a host's cable out of the switch, or put it back."""
        state = "up" if is_up else "down"
        number = self.hosts.index(host) + 1
        run("ip", "-n", f"{self.mark}-sw", "link", "set", f"port{number}", state)

    @contextlib.contextmanager
    def blocked(self, host: str, chain: str, *rule: str) -> Iterator[None]:
        """A packet filter on a host stops new TCP connections; skip where there is none."""
        new = (chain, "--protocol", "tcp", "--syn", *rule)
        filters = (*self.within(self.hosts.index(host) + 1), "iptables", "--wait")
        try:
            run(*filters, "--append", *new)
        except AssertionError as error:
            pytest.skip(f"no packet filter can be had here (package iptables): {error}")
        try:
            yield
        finally:
            run(*filters, "--delete", *new)

    def power_off(self, host: str) -> None:
        """Cut a host off, so that nobody hears of the end of its processes, and kill all of them."""
        self.cut(host)
        number = self.hosts.index(host) + 1
        listed = subprocess.check_output(
            ["ip", "netns", "pids", f"{self.mark}-{number}"], text=True
        )
        for pid in map(int, listed.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def run(*command: str) -> None:
    """Run a command, which must not fail."""
    process = ended(command)
    assert process.returncode == 0, (command, process.stderr)


def has(engine: str, programs: Sequence[str], packages: str) -> None:
    """Skip by name where an engine cannot be had."""
    if os.geteuid() != 0:
        pytest.skip(f"engine {engine}: network namespaces need root")
    for program in ("ip", "nsenter", *programs):
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin") is None:
            pytest.skip(f"engine {engine}: {program} is not installed (packages {packages})")


@contextlib.contextmanager
def laboratory(folder: Path, hosts: Sequence[str] = NAMES) -> Iterator[Lab]:
    """Make the machines; skip where this one may not."""
    lab = Lab(folder, f"psfleet-{uuid.uuid4().hex[:8]}", hosts)
    with contextlib.ExitStack() as stack:
        try:
            _build(lab, stack)
        except AssertionError as error:
            pytest.skip(f"network namespaces with a bridge cannot be made here: {error}")
        yield lab


def _build(lab: Lab, stack: contextlib.ExitStack) -> None:
    """The switch, the machines and their cables; the stack takes them away."""
    switch = f"{lab.mark}-sw"
    for namespace in (switch, *(f"{lab.mark}-{number}" for number in range(len(lab.hosts) + 1))):
        run("ip", "netns", "add", namespace)
        stack.callback(run, "ip", "netns", "del", namespace)
    run("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
    run("ip", "-n", switch, "link", "set", "br0", "up")
    for number in range(len(lab.hosts) + 1):
        _plug(lab, switch, number)


def _plug(lab: Lab, switch: str, number: int) -> None:
    """A cable between a namespace and the switch."""
    own, port = f"{lab.mark}-{number}", f"port{number}"
    link = ["ip", "-n", switch, "link"]
    run(*link, "add", port, "type", "veth", "peer", "name", "eth0", "netns", own)
    run(*link, "set", port, "master", "br0", "up")
    run("ip", "-n", own, "address", "add", f"{NETWORK}.{number + 1}/24", "dev", "eth0")
    run("ip", "-n", own, "link", "set", "eth0", "up")
    run("ip", "-n", own, "link", "set", "lo", "up")
