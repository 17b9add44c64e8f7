"""Whether the machines of a job reach each other, in both directions, and how long a message takes.

The same check runs on all of them at once. Each listens on the same port, connects to every other one and
sends bytes that come back. Nothing else is answered on that port, and it is closed at the end.
"""

import contextlib
import errno
import secrets
import socket
import socketserver
import statistics
import time
from collections.abc import Iterator, Sequence

from psfleet.errors import ConfigError
from psfleet.platform.service_thread import ServiceThread
from psfleet_launch.agent.machine_checks import Finding

__all__ = ["PeerCheck"]

_NAME = 16  # bytes by which a check knows another one
_ROUNDS = 20  # bytes there and back; the median counts
_CONNECT = 2.0  # seconds for one try
_PAUSE = 0.1  # seconds between looks and tries
_SLOW = 0.005  # seconds; a step of training has several messages one after the other


class PeerCheck:
    """The check on this machine. `with PeerCheck(hosts, port, seconds) as check: check.findings()`.

    Args:
        hosts: All machines, this one too; the same on each.
        port: Where every machine listens.
        seconds: How long to wait for the others.

    Raises:
        ConfigError: A host has no address, none of them is this machine, or the port is taken.
    """

    def __init__(self, hosts: Sequence[str], port: int, seconds: float) -> None:
        self._addresses = {host: _address(host) for host in hosts}
        self._port = port
        self._seconds = seconds
        self._name = secrets.token_bytes(_NAME)
        self._came: set[bytes] = set()
        self._host, self._server = self._listen()
        self._thread = ServiceThread(self._server.serve_forever, "peers", (_PAUSE,))

    def __enter__(self) -> "PeerCheck":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def findings(self) -> Iterator[Finding]:
        """What is found of each other machine, once it is known or time is over."""
        deadline = time.monotonic() + self._seconds
        names: dict[str, bytes] = {}
        found: dict[str, Finding] = {}
        others = [host for host in self._addresses if host != self._host]
        while len(names) < len(others) or not self._came >= set(names.values()):
            for host in [one for one in others if one not in names]:
                found[host], name = self._measure(host)
                if name:
                    names[host] = name
            if time.monotonic() > deadline:
                break
            time.sleep(_PAUSE)
        for host in others:
            yield found[host]
            if host in names and names[host] not in self._came:
                advice = (
                    f"let {host} open connections to {self._host}, port {self._port} and others"
                )
                yield Finding(host, f"has not reached {self._host}", advice, is_fatal=True)

    def _listen(self) -> tuple[str, "_EchoServer"]:
        """The host that is this machine, and the server there."""
        why = "none of them is this machine"
        for host, address in self._addresses.items():
            try:
                return host, _EchoServer((address, self._port), self._name, self._came)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    why = f"port {self._port} of {host} cannot be used ({error.strerror})"
        raise ConfigError(f"--peers is {','.join(self._addresses)!r}; {why}")

    def _measure(self, host: str) -> tuple[Finding, bytes]:
        """What is found of a host, and the name of the check there; empty: it was not reached."""
        try:
            with socket.create_connection((self._addresses[host], self._port), _CONNECT) as line:
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                line.sendall(self._name)
                name = _read(line, _NAME)
                seconds = statistics.median(_echo(line) for _ in range(_ROUNDS))
        except OSError as error:
            said = error.strerror or str(error) or "it does not answer"
            advice = (
                f"run this check there at the same time, and let this machine open connections to {host}, "
                f"port {self._port} and others"
            )
            return Finding(host, f"cannot be reached: {said}", advice, is_fatal=True), b""
        advice = "every step waits for several such messages: use machines that are nearer"
        value = f"{seconds * 1e3:.2f} ms there and back"
        return Finding(host, value, advice if seconds > _SLOW else ""), name


class _EchoServer(socketserver.ThreadingTCPServer):
    """Gives back what comes, and notes who came."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, where: tuple[str, int], name: bytes, came: set[bytes]) -> None:
        self.name = name
        self.came = came
        super().__init__(where, _EchoHandler)


class _EchoHandler(socketserver.BaseRequestHandler):
    """One connection: names both ways, then bytes."""

    server: _EchoServer

    def handle(self) -> None:
        self.request.settimeout(_CONNECT)
        with contextlib.suppress(OSError):
            other = _read(self.request, _NAME)
            self.request.sendall(self.server.name)
            for _ in range(_ROUNDS):
                self.request.sendall(_read(self.request, 1))
            self.server.came.add(other)


def _read(line: socket.socket, size: int) -> bytes:
    """Exactly so many bytes.

    Raises:
        OSError: The connection has ended.
    """
    data = b""
    while len(data) < size:
        more = line.recv(size - len(data))
        if not more:
            raise ConnectionResetError("the connection has ended")
        data += more
    return data


def _echo(line: socket.socket) -> float:
    """Seconds that a byte takes there and back."""
    began = time.perf_counter()
    line.sendall(b"?")
    _read(line, 1)
    return time.perf_counter() - began


def _address(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"--peers names {host!r}, which has no address: {error.strerror}"
        ) from None
