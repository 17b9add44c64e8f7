"""A client that reads nothing holds up nobody but itself."""

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from psfleet.core.net.connections.access import Access
from psfleet.core.net.connections.certificates import make_credentials
from psfleet.core.net.connections.credentials import Credentials
from psfleet.core.net.connections.tls_sockets import accepts, connects
from psfleet.core.net.http2.calls import IncomingCall
from psfleet.core.net.http2.http2_client import Http2Client
from psfleet.core.net.http2.http2_server import Http2Server
from tests.http2.calls import SETTINGS
from tests.programs import ended
from tests.waiting import until

LARGE = bytes(range(256)) * (1 << 15)  # 8 MiB, more than any socket takes


@dataclass
class _Round:
    """Answers no call until as many as it has members have come: then all.

    `answered`: How many are. `first`: Which one is answered before the others.
    """

    members: int
    first: int = 0
    waiting: list[IncomingCall] = field(default_factory=list)
    answered: int = 0

    def join(self, request: bytes, call: IncomingCall) -> None:
        """Take a call."""
        self.waiting.append(call)
        if len(self.waiting) == self.members:
            self.waiting.insert(0, self.waiting.pop(self.first))
            for one in self.waiting:
                one.end(LARGE)
                self.answered += 1


@contextlib.contextmanager
def served(folder: Path, network: str, method: _Round) -> Iterator[tuple[Http2Server, Http2Client]]:
    """A server with this method, and a client of it."""
    listener, accesses = socket.create_server(("127.0.0.1", 0)), [Access(insecure=True)] * 2
    endpoint = f"127.0.0.1:{listener.getsockname()[1]}"
    if network == "tls":
        credentials = make_credentials(folder / "tls")
        accesses = [Access(Credentials.read(credentials[role])) for role in ("server", "worker")]
    wrap = accepts(accesses[0], endpoint)
    server = Http2Server(listener, wrap, {"/test.Round/Join": method.join}, SETTINGS)
    client = Http2Client(connects(accesses[1], endpoint), "test", False, 1 << 28)
    server.start()
    try:
        yield server, client
    finally:
        client.close()
        server.stop(5.0)


@pytest.mark.parametrize("network", ["plain", "tls"])
@pytest.mark.parametrize("stopped", [0, 1])
def test_no_reply_waits_for_the_socket_of_another_client(
    tmp_path: Path, network: str, stopped: int
) -> None:
    """The thread that ends a round answers all. Who reads gets its answer although another one does not read,
    be it the one whose call has ended the round; that one finds all of its own when it reads on."""
    both = _Round(2, first=stopped)
    with served(tmp_path, network, both) as (_, client):
        calls = [client.begin("/test.Round/Join", b"", 600.0)]
        until(lambda: both.waiting)
        calls.append(client.begin("/test.Round/Join", b"", 600.0))
        assert calls[1 - stopped].finish() == LARGE
        assert calls[stopped].finish() == LARGE


@pytest.mark.parametrize("network", ["plain", "tls"])
def test_a_server_that_stops_sends_its_replies_first(tmp_path: Path, network: str) -> None:
    """What a client has not read yet when all calls are answered."""
    alone = _Round(1)
    with served(tmp_path, network, alone) as (server, client):
        call = client.begin("/test.Round/Join", b"", 600.0)
        until(lambda: alone.answered)
        stopping = threading.Thread(target=server.stop, args=(600.0,))
        stopping.start()
        assert call.finish() == LARGE
        client.close()
        stopping.join()


def test_the_thread_that_sends_for_others_ends_its_process() -> None:
    """As any thread of a server that fails (tests/server/test_threads.py)."""
    script = (
        "import socket, time\n"
        "from psfleet.core.net.http2.http2_server import DeferredSending\n"
        "from psfleet.core.net.http2.socket_transport import PlainTransport\n"
        "ends = socket.socketpair()\n"
        "DeferredSending(PlainTransport(ends[0])).send([bytes(1 << 23)])\n"
        "time.sleep(100)\n"
    )
    process = ended(
        [sys.executable, "-c", script], env={"PSFLEET_CRASH": "thread http2 sending:1:raise"}
    )
    assert process.returncode == 1
    assert "psfleet: thread 'http2 sending' has failed" in process.stderr
