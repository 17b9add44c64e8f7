"""Garbage at the doors of a real server, with TLS and without: it stays up, and small."""

import contextlib
import random
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from psfleet.core.base.settings.server_endpoints import addresses_of
from psfleet.core.net.connections.access import Access
from psfleet.core.net.v1 import shard_pb2
from psfleet.fleet.testing.local_fleet import LocalFleet
from tests.fuzz.frames import Ground
from tests.fuzz.mutations import mutated_bytes
from tests.leaks import nothing_left
from tests.server_channels import ServerChannel
from tests.trainings import TrainingWorkload

pytestmark = pytest.mark.long

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAMES = 300
CONNECTIONS = 60


@pytest.fixture(scope="module", params=["tcp", "plain tcp"])
def fleet(request: pytest.FixtureRequest) -> Iterator[LocalFleet]:
    """A server with certificates, and one without."""
    with nothing_left(), LocalFleet(1, 1, request.param) as fleet:
        yield fleet


def address(fleet: LocalFleet) -> tuple[str, int]:
    """Where the server listens."""
    host, _, port = addresses_of(fleet.endpoints[0]).control.rpartition(":")
    return host, int(port)


def inside_tls(fleet: LocalFleet, plain: socket.socket) -> socket.socket:
    """A connection of somebody with the job's certificate, where there are such."""
    folder = fleet.credentials.get("worker")
    if folder is None:
        return plain
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    context.load_verify_locations(folder / "ca.pem")
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context.wrap_socket(plain, server_hostname="psfleet-server")


def memory(fleet: LocalFleet) -> int:
    """The most that the server has had, in kilobytes."""
    status = Path(f"/proc/{fleet.processes[0].pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def test_garbage_connections(fleet: LocalFleet) -> None:
    """Noise before, in place of and within HTTP/2, with and without TLS around it."""
    dice = random.Random(3)
    settings = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
    huge = b"\xff\xff\xff\x00\x00\x00\x00\x00\x01"  # a frame of 16 MB is announced
    before = memory(fleet)
    for number in range(CONNECTIONS):
        good = PREFACE + settings + dice.choice((b"", huge, dice.randbytes(200)))
        noise = dice.choice((dice.randbytes(400), mutated_bytes(dice, good), good))
        with socket.create_connection(address(fleet), 60) as plain:
            to = inside_tls(fleet, plain) if number % 2 else plain
            with to:
                to.settimeout(0.05)
                try:
                    to.sendall(noise)
                    to.recv(1000)
                except OSError:
                    pass  # it hangs up, or waits for more
    assert fleet.processes[0].poll() is None
    assert memory(fleet) - before < 100_000


def test_changed_requests_over_the_wire(
    fleet: LocalFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The frames of the other fuzz test, through gRPC; every one gets an answer or an error."""
    monkeypatch.chdir(tmp_path)
    access = Access.of(fleet.environment(0))
    ground = Ground(shard_pb2.MODE_ASYNC)  # makes the requests
    dice = random.Random(5)
    try:
        with ServerChannel(fleet.endpoints[0], access) as channel:
            for _ in range(FRAMES):
                method, request = ground.changed(dice)
                if "Scaling/" in method or method.endswith(
                    ("/Leave", "/Join", "/Register", "/Begin", "/Take", "/Follow")
                ):
                    continue  # they would end this job, or write files; Follow is a stream
                call: Any = channel.unary_unary(method, None, None)
                ended = call.future(request, timeout=2, metadata=access.metadata)
                assert "see its log" not in (ended.details() or ""), ended.details()
    finally:
        ground.close()
    assert fleet.processes[0].poll() is None


def test_it_trains_on(fleet: LocalFleet) -> None:
    """After all that the server is as good as new."""
    with contextlib.closing(fleet.connect(0, "async")) as runtime:
        TrainingWorkload(3).run(runtime)
    assert fleet.wait() == [0]
