"""A server in this process, and a plain client of it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf.message_factory import GetMessageClass

from psfleet.core.base.settings.environment import Environment
from psfleet.core.net.v1 import coordinator_pb2, shard_pb2
from psfleet_server.process import Server
from tests.server_channels import ServerChannel


def _stub(channel: ServerChannel, service: Any) -> Any:
    """The methods of a service by name, as its descriptor says."""
    methods = {}
    for method in service.methods:
        write = GetMessageClass(method.input_type).SerializeToString
        read = GetMessageClass(method.output_type).FromString
        path = f"/{service.full_name}/{method.name}"
        methods[method.name] = channel.unary_unary(path, write, read)
    return SimpleNamespace(**methods)


class Peer:
    """A stock gRPC client: generated stubs, protobuf messages, nothing of psfleet's own."""

    def __init__(self, channel: ServerChannel) -> None:
        self.channel = channel
        self.shard = _stub(channel, shard_pb2.DESCRIPTOR.services_by_name["Shard"])
        services = coordinator_pb2.DESCRIPTOR.services_by_name
        self.coordinator = _stub(channel, services["Coordinator"])

    def join(
        self, worker: int, mode: shard_pb2.Mode = shard_pb2.MODE_ASYNC, workers: int = 1
    ) -> int:
        """Begin an incarnation."""
        incarnation: int = self.coordinator.Register(
            coordinator_pb2.RegisterRequest(worker=worker, boot=worker + 7, workers=workers)
        ).incarnation
        self.shard.Join(shard_pb2.JoinRequest(worker=worker, incarnation=incarnation, mode=mode))
        return incarnation

    def create(self, name: str, kind: str, shape: tuple[int, ...], value: bytes = b"") -> int:
        """Make a table under SGD whose rows start at zero."""
        spec = shard_pb2.TableSpec(
            name=name, kind=kind, shape=shape, rule="sgd", initializer="constant"
        )
        request = shard_pb2.CreateTableRequest(value=value, spec=spec)
        table: int = self.shard.CreateTable(request).table
        return table


@contextlib.contextmanager
def serving(folder: Path, workers: int) -> Iterator[Server]:
    """A server in this process."""
    environment = Environment("server", 0, (f"unix:{folder}/socket",), workers)
    with Server(environment) as server:
        yield server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Server 0 of 1, for 1 worker."""
    with serving(tmp_path, 1) as server:
        yield server


@pytest.fixture
def peer(server: Server) -> Iterator[Peer]:
    """A stock client of `server`."""
    with ServerChannel(server.endpoint) as channel:
        yield Peer(channel)
