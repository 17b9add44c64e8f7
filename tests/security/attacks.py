"""What anyone can do to a port who has neither certificate nor token."""

import contextlib
import os
import socket
import ssl
from collections import deque
from collections.abc import Callable

Address = tuple[str, int]

HELLO = bytes.fromhex("1603010200010001fc0303")  # how a ClientHello of TLS begins
_TIMEOUT = 20.0  # seconds; a port that does not answer fails the attack, not the test
_CONTEXT = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_CONTEXT.check_hostname, _CONTEXT.verify_mode = False, ssl.CERT_NONE


def _says(words: Callable[[], bytes]) -> Callable[[socket.socket], socket.socket]:
    def say(end: socket.socket) -> socket.socket:
        end.sendall(words())
        return end

    return say


def _shake_hands(end: socket.socket) -> socket.socket:
    """A handshake without a certificate, which the server refuses after it."""
    return _CONTEXT.wrap_socket(end)


# By name: what each connection does, and how many of them stay open.
ATTACKS: dict[str, tuple[Callable[[socket.socket], socket.socket], int]] = {
    "connect and close": (lambda end: end, 0),
    "silence": (lambda end: end, 300),
    "one byte": (_says(lambda: b"\x16"), 300),
    "garbage": (_says(lambda: os.urandom(200)), 10),
    "a request": (_says(lambda: b"GET / HTTP/1.1\r\nhost: [\r\nhost: b\r\n\r\n"), 10),
    "half a handshake": (_says(lambda: HELLO), 300),
    "no certificate": (_shake_hands, 0),
}


def attack(address: Address, name: str, count: int) -> None:
    """Open this many connections, one after the other; the oldest are closed."""
    act, most = ATTACKS[name]
    open_ends: deque[socket.socket] = deque()
    for number in range(count):
        end = socket.socket()
        end.settimeout(_TIMEOUT)
        if number % 2:  # every second one ends with RST in place of FIN
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        open_ends.append(end)
        with contextlib.suppress(OSError):  # it has refused or closed the connection
            end.connect(address)
            open_ends[-1] = act(end)
        while len(open_ends) > most:
            open_ends.popleft().close()
    while open_ends:
        open_ends.popleft().close()


def hold(stack: contextlib.ExitStack, address: Address, word: bytes, count: int) -> None:
    """Open connections that send this and nothing more, and stay open as long as the port lets them."""
    for _ in range(count):
        end = stack.enter_context(socket.create_connection(address, _TIMEOUT))
        with contextlib.suppress(ConnectionError):  # it is closed for a newer one
            end.send(word)


def address_of(endpoint: str) -> Address:
    """Host and port."""
    host, _, port = endpoint.rpartition(":")
    return host, int(port)
