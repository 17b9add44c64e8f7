"""What a server takes at most: beyond it a refusal that quotes the value, and nothing has changed."""

import contextlib
import os
import queue
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from psfleet.core.base.errors import ConfigError, LimitExceeded, PsfleetError, ShapeError
from psfleet.core.base.settings.declared_settings import ServerLimits
from psfleet.core.base.settings.environment import Environment, read_environment
from psfleet.core.base.settings.server_endpoints import addresses_of
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.schema.table import MAX_AXES, MAX_NAME, TableSpec
from psfleet.core.net.connections.access import Access
from psfleet.core.net.connections.channel import open_channel
from psfleet.core.net.connections.error_statuses import error_of
from psfleet.core.net.shared_memory import SharedMemory
from psfleet.core.net.v1 import coordinator_pb2, shard_pb2
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_server.process import Server

Pb: Any = shard_pb2
Cb: Any = coordinator_pb2


@contextlib.contextmanager
def serving(folder: Path, limits: ServerLimits) -> Iterator[grpc.Channel]:
    """A server with these limits, and a channel to it."""
    environment = Environment("server", 0, (f"unix:{folder}/socket",), 2, limits=limits)
    with Server(environment) as server, open_channel(server.endpoint) as channel:
        yield channel


def call(channel: grpc.Channel, method: str, request: Any, seconds: float = 60) -> bytes:
    """The answer of a method."""
    reply: bytes = channel.unary_unary(f"/psfleet.v1.{method}", None, None)(
        request.SerializeToString(), timeout=seconds
    )
    return reply


def refusal(channel: grpc.Channel, method: str, request: Any) -> PsfleetError:
    """The error of a method."""
    with pytest.raises(grpc.RpcError) as error:
        call(channel, method, request)
    return error_of(error.value, "server 0")


def incarnation(channel: grpc.Channel, mode: int = 2) -> int:
    """Worker 0 joins."""
    reply = call(channel, "Coordinator/Register", Cb.RegisterRequest(boot=3, workers=2))
    incarnation_number: int = Cb.RegisterReply.FromString(reply).incarnation
    call(channel, "Shard/Join", Pb.JoinRequest(incarnation=incarnation_number, mode=mode))
    return incarnation_number


def table(name: str, **fields: Any) -> Any:
    """A request for a table."""
    spec = {"kind": "sparse", "shape": [2], "rule": "sgd", "initializer": "constant"} | fields
    return Pb.CreateTableRequest(spec=Pb.TableSpec(name=name, **spec))


def test_a_message_that_is_too_long(tmp_path: Path) -> None:
    """It is refused by its length, and the connection goes on."""
    with serving(tmp_path, ServerLimits(message=10_000)) as channel:
        error = refusal(channel, "Shard/CreateTable", Pb.CreateTableRequest(value=bytes(10_001)))
        assert isinstance(error, LimitExceeded)
        assert "Received message larger than max (10004 vs. 10000)" in str(error)
        call(channel, "Shard/Status", Pb.StatusRequest())


def test_a_long_message_takes_no_memory() -> None:
    """The 100 MB of a message beyond the limit are never in the server's memory."""
    with LocalFleet(1, 1, limits="message=1000000") as fleet:
        status = Path(f"/proc/{fleet.processes[0].pid}/status")

        def most() -> int:
            return int(status.read_text().partition("VmHWM:")[2].split()[0])

        before = most()
        with open_channel(fleet.endpoints[0]) as channel:
            request = Pb.CreateTableRequest(value=bytes(100_000_000))
            assert isinstance(refusal(channel, "Shard/CreateTable", request), LimitExceeded)
        assert most() - before < 50_000


def test_too_many_tables(tmp_path: Path) -> None:
    """One more than the limit is refused; one that is there is still found."""
    with serving(tmp_path, ServerLimits(tables=2)) as channel:
        for name in ("a", "b", "a"):
            call(channel, "Shard/CreateTable", table(name))
        error = refusal(channel, "Shard/CreateTable", table("c"))
        assert isinstance(error, LimitExceeded)
        assert "table 'c' would be table 3 of server 0, its limit is 2" in str(error)
        reply = Pb.StatusReply.FromString(call(channel, "Shard/Status", Pb.StatusRequest()))
        assert [one.name for one in reply.tables] == ["a", "b"]


def test_names_and_axes(tmp_path: Path) -> None:
    """Of tables and of reductions; the product of many large extents is not even computed."""
    with serving(tmp_path, ServerLimits()) as channel:
        call(channel, "Shard/CreateTable", table("n" * MAX_NAME))
        error = refusal(channel, "Shard/CreateTable", table("é" * (MAX_NAME // 2 + 1)))
        assert f"has a name of {MAX_NAME + 2} bytes; the limit is {MAX_NAME}" in str(error)
        many = table("t", kind="dense", shape=[2**40] * (MAX_AXES + 1))
        assert "has 33 axes; the limit is 32" in str(refusal(channel, "Shard/CreateTable", many))
        reduction = Cb.AllReduceRequest(
            incarnation=incarnation(channel),
            number=1,
            mode="sum",
            dtype="int32",
            shape=[2**62] * 100_000,
        )
        began = time.thread_time()
        error = refusal(channel, "Coordinator/AllReduce", reduction)
        assert "an all_reduce of 100000 axes; the limit is 32" in str(error)
        assert time.thread_time() - began < 5
    with pytest.raises(ShapeError, match="33 axes"):
        TableSpec("t", "dense", (1,) * 33, make_rule("sgd", {}))


def test_shared_memory_that_is_too_large(tmp_path: Path) -> None:
    """An offer beyond the limit is refused; a worker then sends its tensors in messages."""
    memory = SharedMemory.make(1 << 16)
    assert memory is not None
    _, offer = memory
    with serving(tmp_path, ServerLimits(lane=1 << 15)) as channel:
        request = Pb.AttachRequest(
            incarnation=incarnation(channel),
            generation=1,
            boot=offer.boot,
            pid=offer.pid,
            descriptor=offer.descriptor,
            bytes=offer.size,
            token=offer.token,
        )
        error = refusal(channel, "Shard/Attach", request)
        assert isinstance(error, LimitExceeded)
        assert "offers 65536 bytes of shared memory, the limit is 32768" in str(error)
    os.close(offer.descriptor)


def test_too_many_calls_that_wait(tmp_path: Path) -> None:
    """One more is refused at once; those that wait go on waiting, and are answered."""
    with serving(tmp_path, ServerLimits(waiting_calls=3)) as channel:
        own = incarnation(channel, mode=1)
        reply = call(
            channel, "Coordinator/Register", Cb.RegisterRequest(worker=1, boot=4, workers=2)
        )
        other = Cb.RegisterReply.FromString(reply).incarnation
        request = Cb.BarrierRequest(incarnation=own, number=1).SerializeToString()
        barrier: Any = channel.unary_unary("/psfleet.v1.Coordinator/Barrier", None, None)
        ends: Any = queue.SimpleQueue()
        waiting = [barrier.future(request, timeout=60) for _ in range(4)]
        for future in waiting:
            future.add_done_callback(ends.put)
        refused = ends.get(timeout=60)  # whichever came last: calls may overtake each other
        assert "3 calls wait at server 0, its limit is 3" in refused.details()
        waiting.remove(refused)
        assert ends.empty()
        leaves = Pb.LeaveRequest(worker=1, incarnation=other)
        call(channel, "Shard/Join", Pb.JoinRequest(worker=1, incarnation=other, mode=1))
        call(channel, "Shard/Leave", leaves)
        assert [future.result() for future in waiting] == [b""] * 3


def test_too_many_connections() -> None:
    """One more is closed at once; those that are there go on, and a place that is left is free."""
    with LocalFleet(1, 1, "plain tcp", limits="connections=2", in_process=True) as fleet:
        access = Access(insecure=True)
        host, _, port = addresses_of(fleet.endpoints[0]).control.rpartition(":")
        with contextlib.ExitStack() as stack:
            channels = [
                stack.enter_context(open_channel(fleet.endpoints[0], access)) for _ in range(2)
            ]
            for channel in channels:
                call(channel, "Shard/Status", Pb.StatusRequest())
            with socket.create_connection((host, int(port)), 60) as third:
                third.settimeout(60)
                assert third.recv(100) == b""
            for channel in channels:
                call(channel, "Shard/Status", Pb.StatusRequest())
        with open_channel(fleet.endpoints[0], access) as channel:
            stub: Any = channel.unary_unary("/psfleet.v1.Shard/Status", None, None)
            assert stub(b"", timeout=60, wait_for_ready=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tables", "PSFLEET_LIMITS says 'tables'"),
        ("tables=many", "limit tables is 'many'; it must be a whole number"),
        ("tabels=3", "it must be name=number with a name among message, tables"),
        ("tables=0", "limit tables is 0"),
        ("message=2147483648", "gRPC carries up to 2147483647 bytes"),
    ],
)
def test_limits_that_cannot_be(text: str, message: str) -> None:
    """One sentence that names the setting."""
    variables = {"PSFLEET_ROLE": "server", "PSFLEET_SERVERS": "unix:/x", "PSFLEET_LIMITS": text}
    with pytest.raises(ConfigError, match=message):
        read_environment(variables)


def test_the_environment_says_limits() -> None:
    """What it does not name is as usual."""
    variables = {"PSFLEET_ROLE": "server", "PSFLEET_SERVERS": "unix:/x"}
    settings = read_environment(variables | {"PSFLEET_LIMITS": "tables=7, lane=4096"}).limits
    assert settings == ServerLimits(tables=7, lane=4096)
