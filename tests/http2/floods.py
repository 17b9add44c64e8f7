"""Bytes that a client may send without end, of little use to anybody.

python -m tests.http2.floods HOST PORT FOLDER NAME COUNT sends one of them over so many connections with the
credentials in the folder, but no token, opens each again that the server closes, and says "flooding" once all
have been open. It goes on until its standard input ends.
"""

import contextlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from psfleet.core.net.connections.access import Access
from psfleet.core.net.connections.credentials import Credentials
from psfleet.core.net.connections.tls_sockets import connects
from psfleet.core.net.http2 import frames
from psfleet.core.net.http2.frames import ConnectionBroken, DeadlinePassed
from psfleet.core.net.http2.socket_transport import Transport
from tests.http2.raw_connection import GRPC, block, headers

_BEGUN = frames.frame(frames.HEADERS, 0, 1, block(GRPC)[:20])
_LONG = (*GRPC, *((f"x-{number}", "value" * 20) for number in range(20)))


def _each_stream(*parts: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """These frames on the next stream of a client."""
    return lambda turn: b"".join(part(2 * turn + 1) for part in parts)


def _once(first: bytes, then: bytes) -> Callable[[int], bytes]:
    """One frame first, and then another one again and again, which needs no other."""
    return lambda turn: then if turn else first + then


def _frame(
    kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0
) -> Callable[[int], bytes]:
    whole = frames.frame(kind, flags, stream, payload)
    return lambda turn: whole


FLOODS: dict[str, Callable[[int], bytes]] = {
    "PING": _frame(frames.PING, bytes(8)),
    "answers to no PING": _frame(frames.PING, bytes(8), frames.ACK),
    "SETTINGS": lambda turn: frames.settings({frames.INITIAL_WINDOW: turn % 2}),
    "acknowledgements of no SETTINGS": _frame(frames.SETTINGS, b"", frames.ACK),
    "many settings": lambda turn: frames.frame(frames.SETTINGS, 0, 0, bytes(6) * 2000),
    "unknown frames": _frame(0xF0),
    "long unknown frames": _frame(0xF0, bytes(100_000)),
    "PRIORITY": _frame(frames.PRIORITY, bytes(5), 0, 1),
    "WINDOW_UPDATE": lambda turn: frames.window_update(0, 1),
    "GOAWAY": lambda turn: frames.goaway(0, 0, ""),
    "empty CONTINUATION": _once(_BEGUN, frames.frame(frames.CONTINUATION, 0, 1, b"")),
    "CONTINUATION": _once(_BEGUN, frames.frame(frames.CONTINUATION, 0, 1, b"\0\1a\1b")),
    "calls without a token": _each_stream(headers),
    "calls with many headers": _each_stream(lambda stream: headers(stream, _LONG)),
    "calls that are reset": _each_stream(headers, lambda stream: frames.reset(stream, 8)),
    "malformed calls": _each_stream(lambda stream: headers(stream, GRPC[1:], 5)),
    "calls that are none of gRPC": _each_stream(lambda stream: headers(stream, GRPC[:4], 5)),
    "DATA of a refused call": _once(headers(1), frames.frame(frames.DATA, 0, 1, bytes(16_384))),
    "empty DATA of a refused call": _once(headers(1), frames.frame(frames.DATA, 0, 1, b"")),
    "padding of a refused call": _once(
        headers(1), frames.frame(frames.DATA, frames.PADDED, 1, b"\xff" + bytes(255))
    ),
}
"""By their names: the bytes of a turn, which are numbered from 0."""


def flood(name: str, turns: int) -> bytes:
    """So many turns of a flood, from its first one."""
    return b"".join(FLOODS[name](turn) for turn in range(turns))


def _read(transport: Transport) -> None:
    """Read what the server says, so that it never waits to say it."""
    with contextlib.suppress(ConnectionBroken):
        while True:
            transport.receive(memoryview(bytearray(1 << 16)), lambda: None)


def _flood(connect: Callable[[], Transport], content: bytes, opened: threading.Semaphore) -> None:
    while True:
        with contextlib.suppress(ConnectionBroken, DeadlinePassed):
            transport = connect()
            opened.release()
            reader = threading.Thread(target=_read, args=(transport,), daemon=True)
            reader.start()
            with contextlib.suppress(ConnectionBroken):
                transport.send([frames.PREFACE + frames.settings({}), content])
                while True:
                    transport.send([content])
            transport.shut()
            reader.join()
            transport.close()


def _main(host: str, port: str, folder: str, name: str, count: str) -> None:
    access = Access(Credentials.read(Path(folder)))
    connect, content = connects(access, f"{host}:{port}"), flood(name, 5000)
    opened = threading.Semaphore(0)
    for _ in range(int(count)):
        threading.Thread(target=_flood, args=(connect, content, opened), daemon=True).start()
    for _ in range(int(count)):
        opened.acquire()
    print("flooding", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _main(*sys.argv[1:])
