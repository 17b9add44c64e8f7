"""Waiting calls hold no thread."""

import threading
from collections.abc import Iterator

import grpc
import pytest

from psfleet.core.base.errors import DeadlineExceeded, PsfleetError
from psfleet.core.net.connections.access import Access
from psfleet.core.net.connections.channel import open_channel
from psfleet.core.net.connections.connection_limits import GRACE
from psfleet.core.net.connections.error_statuses import error_of
from psfleet_server.rpc import replies
from psfleet_server.rpc.replies import Deadlines, DeferredReply, immediate, parkable
from tests.pools import grpcio_server

WAITERS = 200
POOL = 4


class Station:
    """A server whose calls wait until they are let go."""

    def __init__(self) -> None:
        self.waiting: list[DeferredReply] = []
        self.expired: list[DeferredReply] = []
        self.changed = threading.Condition()
        self.deadlines = Deadlines()
        self.may_expire = threading.Event()
        self.may_expire.set()

    def wait(self, request: bytes, reply: DeferredReply) -> None:
        """Park the call; a request `fail` fails at once."""
        if request == b"fail":
            raise PsfleetError("no")
        if request == b"crash":
            raise RuntimeError("a\nbug")
        with self.changed:
            self.waiting.append(reply)
            self.changed.notify()
        if request == b"now":
            reply.complete(b"at once")
        elif request != b"hold":
            reply.park(self.deadlines, lambda: self.expire(reply))

    def expire(self, reply: DeferredReply) -> None:
        """Answer a call whose time is over."""
        with self.changed:
            self.expired.append(reply)
            self.changed.notify()
        assert self.may_expire.wait(60)
        reply.fail(DeadlineExceeded("waits for worker 1"))

    def let_go(self) -> None:
        """Answer everybody."""
        for reply in self.waiting:
            reply.complete(b"gone")

    def until(self, waiting: int = 0, expired: int = 0) -> None:
        """Wait until so many calls are parked and expired."""
        with self.changed:
            assert self.changed.wait_for(
                lambda: len(self.waiting) >= waiting and len(self.expired) >= expired, 60
            )


@pytest.fixture
def station() -> Station:
    """What the server of the test does."""
    return Station()


@pytest.fixture
def channel(station: Station) -> Iterator[grpc.Channel]:
    """A channel to a server with POOL threads."""
    methods = {"Wait": parkable(station.wait), "Echo": immediate(lambda request: request)}
    with grpcio_server("test", methods, threads=POOL) as endpoint:
        station.deadlines.start()
        with open_channel(endpoint, Access(insecure=True)) as channel:
            yield channel
    station.deadlines.stop()


def call(channel: grpc.Channel, method: str) -> "grpc.UnaryUnaryMultiCallable[bytes, bytes]":
    """A method as an ordinary unary client sees it."""
    return channel.unary_unary(f"/test/{method}", None, None)


def test_200_waiting_calls_leave_4_threads_free(station: Station, channel: grpc.Channel) -> None:
    """While 200 calls wait, the server has at most 4 pool threads and answers others; then all
    200 get their answer as an ordinary unary call."""
    before = threading.active_count()
    waiting = [call(channel, "Wait").future(b"x", timeout=60) for _ in range(WAITERS)]
    station.until(waiting=WAITERS)
    assert threading.active_count() - before <= POOL + 1  # the client polls with one thread
    for _ in range(20):
        assert call(channel, "Echo")(b"still here", timeout=60) == b"still here"
    station.let_go()
    assert [future.result(timeout=60) for future in waiting] == [b"gone"] * WAITERS
    assert len(station.deadlines.live) == 0


def test_the_server_speaks_before_the_deadline(station: Station, channel: grpc.Channel) -> None:
    """A parked call is expired in time for its error, with its text, to reach the client."""
    with pytest.raises(grpc.RpcError) as raised:
        call(channel, "Wait")(b"x", timeout=GRACE + 0.2)
    error = error_of(raised.value, "server")
    assert isinstance(error, DeadlineExceeded)
    assert str(error) == "waits for worker 1"
    station.let_go()  # answering an expired call is harmless
    assert call(channel, "Echo")(b"fine", timeout=60) == b"fine"


def test_a_call_whose_client_is_gone_is_expired(station: Station, channel: grpc.Channel) -> None:
    """A cancelled call does not stay parked."""
    future = call(channel, "Wait").future(b"x", timeout=60)
    station.until(waiting=1)
    future.cancel()  # type: ignore[no-untyped-call]  # so in grpc-stubs
    station.until(expired=1)
    assert len(station.deadlines.live) == 0


def test_an_end_that_waits_blocks_no_other_call(station: Station, channel: grpc.Channel) -> None:
    """The end of a call whose client is gone may wait for a standby, whose messages come meanwhile."""
    station.may_expire.clear()
    future = call(channel, "Wait").future(b"x", timeout=60)
    station.until(waiting=1)
    future.cancel()  # type: ignore[no-untyped-call]  # so in grpc-stubs
    station.until(expired=1)
    try:
        assert call(channel, "Echo")(b"still here", timeout=30) == b"still here"
    finally:
        station.may_expire.set()


def test_calls_expire_in_order_of_their_deadlines(station: Station, channel: grpc.Channel) -> None:
    """A short wait that comes after a long one is not held up by it."""
    long = call(channel, "Wait").future(b"long", timeout=60)
    station.until(waiting=1)
    with pytest.raises(grpc.RpcError):
        call(channel, "Wait")(b"short", timeout=GRACE)
    assert not long.done()
    station.let_go()
    assert long.result(timeout=60) == b"gone"


@pytest.mark.parametrize(
    ("request_", "text"),
    [(b"fail", "no"), (b"crash", "the server failed: RuntimeError: a bug; see its log")],
)
def test_an_error_in_a_handler_is_the_reply(
    channel: grpc.Channel, request_: bytes, text: str
) -> None:
    """A psfleet error travels as it is; a bug becomes one sentence and leaves its trace in the log."""
    with pytest.raises(grpc.RpcError) as error:
        call(channel, "Wait")(request_, timeout=60)
    assert str(error_of(error.value, "server")) == text


@pytest.mark.parametrize(
    ("request_", "is_slow"), [(b"now", True), (b"wait", False), (b"hold", False)]
)
def test_only_work_is_slow(
    station: Station,
    channel: grpc.Channel,
    monkeypatch: pytest.MonkeyPatch,
    request_: bytes,
    is_slow: bool,
) -> None:
    """A call that waits for something is not logged as slow, with or without a deadline; one that works is,
    by the name of its method."""
    monkeypatch.setattr(replies, "SLOW", 0)
    lines: list[str] = []
    monkeypatch.setattr(replies._log, "info", lambda line, **figures: lines.append(line))
    future = call(channel, "Wait").future(request_, timeout=60)
    station.until(waiting=1)
    call(channel, "Echo")(b"the call before has returned", timeout=60)
    station.let_go()
    assert future.result(timeout=60)
    slow = [line.split(" took")[0] for line in lines if "lambda" not in line]  # not Echo
    assert slow == ["the call 'wait'"] * is_slow
