"""What one process of the job can take from the others, by mistake or because its token has leaked."""

import contextlib
import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from psfleet.core.base.errors import FrameError, LimitExceeded, PsfleetError
from psfleet.core.net import frame
from psfleet.core.net.connections.access import Access
from psfleet.core.net.connections.error_statuses import error_of
from psfleet.core.net.protobuf_fields import field
from psfleet.core.net.v1.frame_pb2 import Header
from psfleet.fleet.testing.local_fleet import LocalFleet
from tests.server_channels import ServerChannel

_SOON = 60.0  # seconds


@dataclass(frozen=True)
class Stalled:
    """A call, and what its message would come from."""

    call: Any
    never: "queue.SimpleQueue[bytes]"

    def give_up(self) -> None:
        """End it."""
        self.never.put(b"")
        self.call.cancel()


class Caller:
    """A channel to server 0 whose calls carry the token."""

    def __init__(self, fleet: LocalFleet) -> None:
        self._access = Access.of(fleet.environment(0))
        self._channel = ServerChannel(fleet.endpoints[0], self._access)
        self.pid = fleet.processes[0].pid

    def call(self, method: str, message: bytes, **options: Any) -> bytes:
        """The answer to a call."""
        stub = self._channel.unary_unary(f"/psfleet.v1.{method}", None, None)
        reply: bytes = stub(message, metadata=self._access.metadata, timeout=_SOON, **options)
        return reply

    def refusal(self, method: str, message: bytes, **options: Any) -> PsfleetError:
        """The error of a call."""
        with pytest.raises(grpc.RpcError) as error:
            self.call(method, message, **options)
        return error_of(error.value, "server 0")

    def stall(self, method: str, ends: "queue.SimpleQueue[Any]") -> "Stalled":
        """A call whose message does not come; `done` gets it when it ends."""
        stub = self._channel.stream_unary(f"/psfleet.v1.{method}", None, None)
        never: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        call = stub.future(iter(never.get, b""), metadata=self._access.metadata, timeout=10 * _SOON)
        call.add_done_callback(ends.put)
        return Stalled(call, never)

    def peak(self) -> int:
        """The most memory that the server has ever had, in bytes."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    def close(self) -> None:
        """End what is under way."""
        self._channel.close()


@pytest.fixture(scope="module")
def fleet() -> Iterator[LocalFleet]:
    """One server over TLS."""
    with LocalFleet(1, 1, "tcp") as fleet:
        yield fleet


@pytest.fixture
def caller(fleet: LocalFleet) -> Iterator[Caller]:
    with contextlib.closing(Caller(fleet)) as caller:
        yield caller


def test_a_header_of_empty_segments(caller: Caller) -> None:
    """50 MB of them are refused by their length: neither time nor memory goes into reading them."""
    caller.call("Shard/Status", b"")
    before, began = caller.peak(), time.monotonic()
    segments = b"\x2a\x00" * 25_000_000  # field 5 of Header
    error = caller.refusal("Shard/Push", field(1, segments))
    assert isinstance(error, FrameError)
    assert "the frame's header has 50000000 bytes, the limit is 1048576" in str(error)
    assert time.monotonic() - began < 60
    assert caller.peak() - before < 400e6  # the message itself, and gRPC's copies of it


def test_a_frame_of_many_fields(caller: Caller) -> None:
    """A frame needs two fields, so one of millions is refused at its 65th."""
    began = time.monotonic()
    for fields in (field(1, b"") * 5_000_000, b"\x18\x00" * 5_000_000):
        error = caller.refusal("Shard/Push", fields)
        assert "more than 64 fields" in str(error)
    assert time.monotonic() - began < 60


def test_a_request_of_many_fields(caller: Caller) -> None:
    """20 million empty names of servers are refused before any of them takes memory."""
    caller.call("Shard/Status", b"")
    before = caller.peak()
    for method in ("Coordinator/Register", "Shard/Join", "Shard/CreateTable"):
        error = caller.refusal(method, field(4, b"") * 20_000_000)
        assert isinstance(error, FrameError)
        assert "has more fields than a" in str(error)
    assert caller.peak() - before < 400e6  # the message itself, and gRPC's copies of it


def test_json_that_is_deep(caller: Caller) -> None:
    """A state of 200,000 brackets is refused as such, and the server goes on."""
    deep = b"[" * 200_000 + b"]" * 200_000
    error = caller.refusal("SnapshotCoordinator/Keep", field(4, deep))
    assert isinstance(error, FrameError)
    assert "what worker 0 keeps is too deep" in str(error)
    caller.call("Shard/Status", b"")


def test_a_large_header_is_not_sent() -> None:
    """A client says so itself, before the bytes travel."""
    header = Header()
    for table in range(60_000):
        header.segments.add(table=table, count=1 << 40)
    with pytest.raises(FrameError, match="name fewer tables in one call"):
        frame.encode(header)


def test_compressed_requests_are_refused(caller: Caller) -> None:
    """100 MB of zeros, which take 100 KB on the wire, are never unpacked."""
    caller.call("Shard/Status", b"")
    before = caller.peak()
    gzip = grpc.Compression.Gzip
    message = str(caller.refusal("Shard/CreateTable", bytes(100_000_000), compression=gzip))
    assert "is disabled" in message
    assert caller.peak() - before < 50e6
    caller.call("Shard/Status", b"", compression=grpc.Compression.NoCompression)


@pytest.mark.parametrize("method", ["Shard/Push", "Coordinator/Barrier"])
def test_calls_that_stall_keep_nobody_out(fleet: LocalFleet, caller: Caller, method: str) -> None:
    """1,000 calls whose messages do not come: all but a few are refused, and others are answered."""
    ends: queue.SimpleQueue[Any] = queue.SimpleQueue()
    stalled = [caller.stall(method, ends) for _ in range(1000)]
    refused = [ends.get(timeout=_SOON) for _ in range(968)]
    error = error_of(refused[0], "server 0")
    assert isinstance(error, LimitExceeded)
    assert "32 messages are on their way over this connection, the limit is 32" in str(error)
    with contextlib.closing(Caller(fleet)) as other:
        for _ in range(20):
            other.call("Shard/Status", b"")
    for call in stalled:
        call.give_up()


def test_many_connections_share_what_is_on_its_way(fleet: LocalFleet) -> None:
    """16 connections stall as many calls as they may: another one still gets in, in place of the oldest."""
    ends: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(contextlib.closing(Caller(fleet))) for _ in range(16)]
        stalled = [one.stall("Shard/Push", ends) for one in crowd for _ in range(32)]
        ended = [ends.get(timeout=_SOON) for _ in range(16 * 32 - 256)]
        other = stack.enter_context(contextlib.closing(Caller(fleet)))
        for _ in range(20):
            other.call("Shard/Status", b"")
        codes = {call.code() for call in ended}
        assert codes <= {grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED}
        for call in stalled:
            call.give_up()
