"""The address for tensors over TLS: what those without certificate or token may take."""

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from psfleet.core.base.settings.server_endpoints import addresses_of
from psfleet.core.net.connections.access import Access
from psfleet.core.net.connections.certificates import make_credentials
from psfleet.core.net.connections.credentials import SERVER_NAME, Credentials
from psfleet.core.net.connections.tls_sockets import accepts, connects
from psfleet.core.net.http2 import frames
from psfleet.core.net.http2.connection_admission import ConnectionAdmission
from psfleet.core.net.http2.http2_client import Http2Client
from psfleet.core.net.http2.http2_server import Http2Server
from psfleet.core.net.http2.socket_transport import Transport
from psfleet.fleet.testing.local_fleet import LocalFleet
from tests.http2.calls import METHODS, SETTINGS, only
from tests.security.attacks import hold
from tests.security.test_strangers import MANY, joined, step, strangers
from tests.waiting import until

_MANY = MANY if "PSFLEET_TORTURE" in os.environ else 600
_HELLO = bytes.fromhex("1603010200010001fc0303")  # how a ClientHello of TLS begins
_PING = frames.frame(frames.PING, 0, 0, bytes(8))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Credentials of a job."""
    return make_credentials(tmp_path_factory.mktemp("tls"))


@contextlib.contextmanager
def serving(folder: Path, token: str | None, handshake: float = 1.0) -> Iterator[tuple[str, int]]:
    """The address of a server that waits so long for a call, and without end for bytes."""
    access = Access(Credentials.read(str(folder)))
    listener = socket.create_server(("127.0.0.1", 0))
    settings = replace(SETTINGS, handshake=handshake)
    if token is not None:
        settings = replace(settings, refuse=only(token))
    server = Http2Server(listener, accepts(access, "127.0.0.1:0"), METHODS, settings)
    server.start()
    try:
        yield listener.getsockname()
    finally:
        server.stop(5.0)


def proved(folder: Path, address: tuple[str, int]) -> ssl.SSLSocket:
    """A connection with the job's certificate."""
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    context.set_alpn_protocols(["h2"])
    return context.wrap_socket(socket.create_connection(address, 60), server_hostname=SERVER_NAME)


def await_end(end: socket.socket, sends: Callable[[int], bytes]) -> None:
    """Return when the server closes a connection on which this comes, once each tenth of a second."""
    over = threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError):
            for number in range(600):
                end.sendall(sends(number))
                if over.wait(0.1):
                    return

    thread = threading.Thread(target=drip)
    thread.start()
    end.settimeout(50)
    try:
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while end.recv(1 << 16):
                pass
    finally:
        over.set()
        thread.join()


def test_a_slow_hello_has_one_deadline(folders: dict[str, Path]) -> None:
    """A ClientHello that comes byte by byte does not begin the time for the handshake again."""
    with serving(folders["server"], None) as address, socket.create_connection(address, 60) as end:
        await_end(end, lambda number: _HELLO[number : number + 1] or b"\0")


def test_pings_do_not_replace_a_call(folders: dict[str, Path]) -> None:
    """With the job's certificate and no call, a connection ends at the deadline, whatever it sends."""
    with serving(folders["server"], None) as address, proved(folders["worker"], address) as end:
        end.sendall(frames.PREFACE + frames.settings({}))
        await_end(end, lambda _: _PING)


def test_a_silent_connection_has_the_same_deadline(folders: dict[str, Path]) -> None:
    """One that sends nothing at all, with and without a certificate."""
    with serving(folders["server"], None) as address:
        with socket.create_connection(address, 50) as end:
            assert end.recv(1) == b""
        with proved(folders["worker"], address) as end:
            end.settimeout(50)
            with contextlib.suppress(ssl.SSLError):
                while end.recv(1000):
                    pass


@pytest.mark.parametrize("word", [b"", b"\x16"], ids=["silent", "one byte"])
def test_a_newcomer_is_never_the_one_that_goes(folders: dict[str, Path], word: bytes) -> None:
    """Strangers hold as many connections as there may be: each of 20 members that come then is answered."""
    access = Access(Credentials.read(str(folders["worker"])))
    metadata = (("authorization", "Bearer right"),)
    with (
        serving(folders["server"], "Bearer right", handshake=60.0) as address,
        contextlib.ExitStack() as stack,
    ):
        hold(stack, address, word, SETTINGS.handshakes)
        for _ in range(20):
            connect = connects(access, f"127.0.0.1:{address[1]}")
            with contextlib.closing(
                Http2Client(connect, "test", True, 1 << 20, metadata)
            ) as member:
                assert member.call("/test.Echo/Echo", b"in", 30) == b"in"


def test_an_event_of_a_closed_connection(folders: dict[str, Path]) -> None:
    """A duplicate of a socket, as a forked child has one, outlives its close; the bytes that come then
    do not end the thread that accepts, and the next connection is served."""
    copies: list[socket.socket] = []
    access = Access(Credentials.read(str(folders["server"])))
    accept = accepts(access, "127.0.0.1:0")

    def wrap(end: socket.socket) -> Transport:
        copies.append(end.dup())
        return accept(end)

    listener = socket.create_server(("127.0.0.1", 0))
    lines: list[str] = []
    admission = ConnectionAdmission(listener, wrap, SETTINGS, list, lambda one: None, lines.append)
    thread = threading.Thread(target=admission.run)

    def seen(number: int) -> bool:
        return len(copies) == number or not thread.is_alive()

    thread.start()
    try:
        for number in range(1, 4):
            with socket.create_connection(listener.getsockname(), 50) as end:
                end.sendall(b"no TLS, and more bytes")
            until(partial(seen, number))
        assert thread.is_alive()
    finally:
        admission.stop()
        thread.join()
        for copy in copies:
            copy.close()


@contextlib.contextmanager
def fleet_and_tensor_address(workers: int) -> Iterator[tuple[LocalFleet, str]]:
    """A server, and its address for tensors."""
    with LocalFleet(1, workers, "tcp") as fleet:
        yield fleet, addresses_of(fleet.endpoints[0]).tensors


@pytest.mark.long
def test_strangers_take_no_threads() -> None:
    """Beside a flood from 200 addresses a new worker comes in, all train, and the server has as many threads
    as before."""
    sources = ",".join(f"127.0.1.{n}" for n in range(1, 201))
    with fleet_and_tensor_address(3) as (fleet, tensors):
        process = Path(f"/proc/{fleet.processes[0].pid}")
        workers = [joined(fleet.environment(0))]
        step(workers[0])
        before = len(os.listdir(process / "task"))
        with strangers(tensors, sources, _HELLO.hex(), _MANY):
            for seat in (1, 2):
                workers.append(joined(fleet.environment(seat)))
                for worker in workers:
                    step(worker)
            assert len(os.listdir(process / "task")) < before + 64
            assert len(os.listdir(process / "fd")) < 4 * 128 + 2 * 128 + 256
            until(lambda: "unauthenticated connections" in fleet.log(0))
        for worker in workers:
            worker.close()
