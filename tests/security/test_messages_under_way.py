"""Messages that stay on their way keep nobody out of the second endpoint, over however many connections."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from psfleet.core.base.errors import LimitExceeded
from psfleet.core.net.http2 import frames
from psfleet.core.net.http2.calls import InboundMessages
from psfleet.core.net.http2.header_blocks import request_prefix, timeout_field
from tests.http2.calls import connected, opened, serving
from tests.waiting import until

_EACH = 8  # as SETTINGS.incoming says it
_BLOCK = request_prefix("/test.Echo/Echo", "test", False, ()) + timeout_field(60)
_PART = b"\0" + (1 << 20).to_bytes(4, "big") + b"some"  # of a message of 1 MiB


def stalled(path: str, calls: int) -> socket.socket:
    """A connection with so many calls whose messages stay on their way."""
    end = opened(path)
    end.settimeout(60)
    end.sendall(frames.PREFACE + frames.settings({}))
    for number in range(1, 2 * calls, 2):
        end.sendall(
            frames.frame(frames.HEADERS, frames.END_HEADERS, number, _BLOCK)
            + frames.frame(frames.DATA, 0, number, _PART)
        )
    end.sendall(frames.frame(frames.PING, 0, 0, b"all sent"))
    return end


def refusals(end: socket.socket, least: int) -> int:
    """How many of its calls the server has ended, once there are so many and the PING is answered."""
    said = b""
    while said.count(b"on their way") < least or b"all sent" not in said:
        more = end.recv(1 << 16)
        assert more, "the server has closed the connection"
        said += more
    return said.count(b"on their way")


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    """Of a server that takes 16 messages at once, 8 of each connection."""
    with serving(tmp_path, messages=InboundMessages(_EACH, 16)) as path:
        yield path


def test_all_connections_share_a_number_of_messages(path: str) -> None:
    """The third connection gets in with fewer than the others have, in place of their oldest calls."""
    with contextlib.ExitStack() as stack:
        ends = [stack.enter_context(contextlib.closing(stalled(path, _EACH))) for _ in range(2)]
        for end in ends:
            assert refusals(end, 0) == 0
        third = stack.enter_context(contextlib.closing(stalled(path, _EACH)))
        own = refusals(third, 2)  # two, when each has five or six
        for end in ends:
            end.settimeout(60)
        assert own == 2
        with connected(path) as client:
            for _ in range(20):
                assert client.call("/test.Echo/Echo", bytes(10_000), 60.0) == bytes(10_000)


def test_one_connection_has_its_own_number(path: str) -> None:
    """The ninth call of a connection is refused, and the others go on."""
    with contextlib.closing(stalled(path, _EACH + 1)) as end:
        assert refusals(end, 1) == 1


def test_a_connection_that_ends_leaves_its_places(path: str) -> None:
    """Twenty connections, one after the other, that end in the middle of their messages."""

    def is_taken() -> bool:
        with contextlib.closing(stalled(path, _EACH)) as end:
            return refusals(end, 0) == 0

    for _ in range(20):
        until(is_taken)  # the server may not yet have seen the end of the one before


class Call:
    """A call that may be cancelled."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        """It has to go."""
        self.cancelled = True


def test_whose_call_has_to_go() -> None:
    """The oldest of the connection with most; who has most is refused."""
    messages = InboundMessages(3, 5)
    calls = [Call() for _ in range(7)]
    for call, connection in zip(calls, "aaabb", strict=False):
        messages.enter(connection, call)
    with pytest.raises(LimitExceeded, match="3 messages are on their way over this connection"):
        messages.enter("a", calls[5])
    messages.enter("c", calls[5])
    assert [call.cancelled for call in calls] == [True, *[False] * 6]
    assert not messages.leave("a", calls[0])
    with pytest.raises(LimitExceeded, match="5 messages are on their way to this server"):
        messages.enter("b", calls[6])
    assert messages.leave("c", calls[5])
    messages.enter("b", calls[6])
