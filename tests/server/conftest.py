"""A server in this process, and a plain client of it."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from psfleet.core.base.settings.environment import Environment
from psfleet.core.net.connections.channel import open_channel
from psfleet.core.net.v1 import coordinator_pb2, coordinator_pb2_grpc, shard_pb2, shard_pb2_grpc
from psfleet_server.process import Server


class Peer:
    """A stock gRPC client: generated stubs, protobuf messages, nothing of psfleet's own."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        stubs: Any = (shard_pb2_grpc, coordinator_pb2_grpc)
        self.shard: Any = stubs[0].ShardStub(channel)
        self.coordinator: Any = stubs[1].CoordinatorStub(channel)

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
        table: int = self.shard.CreateTable(
            shard_pb2.CreateTableRequest(
                value=value,
                spec=(
                    shard_pb2.TableSpec(
                        name=name, kind=kind, shape=shape, rule="sgd", initializer="constant"
                    )
                ),
            )
        ).table
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
    with open_channel(server.endpoint) as channel:
        yield Peer(channel)
