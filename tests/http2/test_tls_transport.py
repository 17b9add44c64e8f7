"""Bytes over TLS: few records, few calls of OpenSSL for many bytes, and all bytes in their order."""

import fcntl
import random
import socket
import struct
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from psfleet.core.net.connections.access import Access
from psfleet.core.net.connections.certificates import make_credentials
from psfleet.core.net.connections.credentials import Credentials
from psfleet.core.net.connections.tls_sockets import accepts, connects
from psfleet.core.net.http2.frames import ConnectionBroken
from psfleet.core.net.http2.socket_transport import Part, Transport, _records
from tests.waiting import until

RECORD = 16 << 10
SIZES = (0, 1, 40, RECORD - 40, RECORD - 1, RECORD, RECORD + 1, 3 * RECORD, 100_000)


def never() -> None:
    """Nothing to do while nothing arrives."""


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Transport, Transport]]:
    """Both ends of a connection: the client's and the server's."""
    roles = make_credentials(tmp_path / "tls")
    client, server = (Access(Credentials.read(roles[role])) for role in ("worker", "server"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
        made: list[Transport] = []
        thread = threading.Thread(target=lambda: made.append(connects(client, endpoint)()))
        thread.start()
        accepted = accepts(server, endpoint)(listener.accept()[0])
        accepted.handshake(never)
        thread.join()
    yield made[0], accepted
    made[0].close()
    accepted.close()


def received(transport: Transport, size: int, dice: random.Random) -> bytes:
    """The next `size` bytes, read in portions of any length."""
    target, at = memoryview(bytearray(size)), 0
    while at < size:
        at += transport.receive(target[at : at + dice.choice((1, 500, RECORD, 1 << 20))], never)
    return bytes(target)


@pytest.mark.quick
@pytest.mark.parametrize("seed", range(20))
def test_records_are_full(seed: int) -> None:
    """All records but the last are full, and long parts are not copied."""
    dice = random.Random(seed)
    parts = [dice.randbytes(dice.choice(SIZES)) for _ in range(dice.randrange(8))]
    records = _records(parts)
    assert b"".join(records) == b"".join(parts)
    assert all(len(record) % RECORD == 0 and record for record in records[:-1])
    assert len(records[-1]) < RECORD
    copied = sum(len(record) for record in records if isinstance(record, bytes))
    assert copied <= RECORD * (len(parts) + 1)


@pytest.mark.parametrize("seed", range(4))
def test_bytes_arrive_in_order_although_the_socket_is_full(
    ends: tuple[Transport, Transport], seed: int
) -> None:
    """Parts that the socket did not take at once are sent later, together with further parts."""
    dice, whole = random.Random(seed), b""
    client, server = ends
    unsent: list[Part] = []
    for _ in range(60):
        parts = [dice.randbytes(dice.choice(SIZES) * dice.choice((1, 9))) for _ in range(3)]
        whole += b"".join(parts)
        # As `DeferredSending` does: what comes after unsent parts queues behind them.
        unsent += parts if unsent else client.send_some(parts)
    assert unsent
    sending = threading.Thread(target=client.send, args=(unsent,))
    sending.start()
    assert received(server, len(whole), dice) == whole
    sending.join()


def test_one_call_reads_all_records_that_have_arrived(ends: tuple[Transport, Transport]) -> None:
    """Three records that lie in the socket need one call. The last one is read before the end behind it."""
    client, server = ends
    content = random.Random(1).randbytes(2 * RECORD + 9)
    client.send([content[:5], content[5:]])

    def arrived() -> bool:
        raw = fcntl.ioctl(server.fileno(), termios.FIONREAD, bytes(4))
        waiting: int = struct.unpack("i", raw)[0]
        return waiting > len(content)

    until(arrived)
    target = memoryview(bytearray(1 << 20))
    assert server.receive(target, never) == len(content)
    client.send([b"bye"])
    client.shut()
    assert server.receive(target[len(content) :], never) == 3
    assert target[: len(content) + 3] == content + b"bye"
    with pytest.raises(ConnectionBroken, match="the other end has closed the connection"):
        server.receive(target, never)
