"""Strangers who open connections without end keep no member out, wherever they come from."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from psfleet.core.base.settings.environment import Environment
from psfleet.core.base.settings.server_endpoints import addresses_of
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Read, Runtime, load_runtime
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.net.http2.connection_admission import (
    UnauthenticatedConnection,
    network_of,
    surplus,
)
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_server.process import Server

_IN = 60.0
"""Seconds within which a member must be in, however many strangers knock. It takes tenths of one."""
MANY = 4200  # connections; a server has room for 4096
_TABLE = TableSpec("t", "sparse", (4,), make_rule("sgd", {}))


@contextlib.contextmanager
def strangers(endpoint: str, sources: str, word: str = "", count: int = MANY) -> Iterator[None]:
    """A process that keeps so many connections to the server open, and refills them."""
    host, _, port = endpoint.rpartition(":")
    command = [sys.executable, "-m", "tests.security.flood", host, port, sources, str(count), word]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout:
        try:
            assert process.stdout.readline() == b"full\n"
            yield
        finally:
            process.stdin.close()
            process.wait(60)


def joined(environment: Environment) -> Runtime:
    """A worker that comes in, in time."""
    began = time.monotonic()
    runtime: Runtime = load_runtime("cluster", environment, "async")
    runtime.create(_TABLE)
    taken = time.monotonic() - began
    assert taken < _IN, f"a member came in after {taken:.1f} s"
    return runtime


def step(runtime: Runtime) -> None:
    """A push that is acknowledged, and a pull."""
    ids = np.arange(8)
    runtime.push([Gradient(_TABLE.key, np.ones((8, 4), np.float32), ids, 0.1)])
    runtime.flush(_IN)
    runtime.pull([Read(_TABLE.key, ids)])


@pytest.mark.long
def test_members_come_in_beside_strangers() -> None:
    """4,200 connections without a certificate from the address of the members, refilled: a worker that is in
    goes on, and a new one comes in once gRPC has ended some of those handshakes, after 10 s at most.
    (At the address for tensors, from 200 addresses: test_tensor_address.py.)"""
    with LocalFleet(1, 2, "tcp") as fleet:
        workers = [joined(fleet.environment(0))]
        step(workers[0])
        with strangers(addresses_of(fleet.endpoints[0]).control, "127.0.0.1"):
            step(workers[0])
            workers.append(joined(fleet.environment(1)))
            for worker in workers:
                step(worker)
        for worker in workers:
            worker.close()


def test_the_port_for_tensors_holds_few_connections() -> None:
    """The system keeps at most 128 connections for it until they are accepted."""
    environment = Environment("server", 0, ("127.0.0.1:0",), 1, insecure=True)
    with Server(environment) as server:
        assert _backlog(int(server.endpoint.rpartition("/")[2])) == 128


def _backlog(port: int) -> int:
    """Of the socket of this process that listens there."""
    for name in os.listdir("/proc/self/fd"):
        if not os.path.realpath(f"/proc/self/fd/{name}").rpartition("/")[2].startswith("socket:"):
            continue
        with socket.socket(fileno=os.dup(int(name))) as end:
            if end.family in (socket.AF_INET, socket.AF_INET6) and end.getsockname()[1] == port:
                known = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
                return int.from_bytes(known[28:], "little")  # tcpi_sacked of linux/tcp.h
    raise AssertionError(f"nothing listens at port {port}")


def some(
    address: str, count: int, *, silent: bool = False, since: float = 0.0
) -> list[UnauthenticatedConnection]:
    """Strangers from one address, the oldest first."""
    return [UnauthenticatedConnection(n, address, since + n, silent) for n in range(count)]


def test_an_address_has_its_bound() -> None:
    """Those beyond it go: the silent first, then the oldest; another address loses nothing."""
    busy = some("a", 6) + some("a", 4, silent=True, since=100)
    going = surplus(busy + some("b", 3), 5, 100)
    assert [(one.address, one.silent, one.since) for one in going] == [
        *(("a", True, 100.0 + n) for n in range(4)),
        ("a", False, 0.0),
    ]


def test_many_addresses_share_what_there_is() -> None:
    """As many of each are kept; when not even one of each has room, the oldest go."""
    crowd = some("a", 40) + some("b", 40) + some("c", 2)
    going = surplus(crowd, 64, 42)
    assert [sum(one.address == name for one in going) for name in "abc"] == [20, 20, 0]
    each = [UnauthenticatedConnection(n, f"host {n}", float(n), False) for n in range(10)]
    assert surplus(each, 64, 7) == each[:3]
    assert surplus(each, 64, 10) == []


def test_what_one_address_is() -> None:
    """An IPv6 host has a /64 for itself."""
    assert network_of("10.0.0.1") == "10.0.0.1"
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:2%eth0") == "2001:db8::/64"
    assert network_of("2001:db8:0:1::1") != network_of("2001:db8::1")
