"""Changed records to a standby: it takes them, or says in a sentence that it cannot, and ends.

A standby that neither takes a record nor ends would hold up its primary, which answers nobody without it.
"""

import contextlib
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import DecodeError

from psfleet.core.base.errors import ServerUnavailable
from psfleet.core.base.settings.environment import Environment
from psfleet.core.engine.consistency import find_mode
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.shard.events import Join, Push
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.net.connections.access import Access
from psfleet.core.net.v1.replica_pb2 import FollowReply, FollowRequest
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.durability.log import VERSION
from psfleet_server.durability.log_shipping import joined
from psfleet_server.durability.records import encode, encode_change
from psfleet_server.engine.row_moves import RowMoves
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.replies import Deadlines
from psfleet_server.services.standby_service import feeds_standby, replica_handler
from psfleet_server.standby import Standby
from tests.fuzz.files import SPECS
from tests.fuzz.frames import Context, Details
from tests.fuzz.mutations import mutated_bytes, mutated_message
from tests.leaks import nothing_left
from tests.pools import started_pool
from tests.server.seating import register

STREAMS = int(os.environ.get("FUZZ_FRAMES", "6000")) // 100
SEED = int(os.environ.get("FUZZ_SEED", "1"))
IDS = np.array([3, -9, 2**63 - 1])

# Rates of 1e308 in records.
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


def a_host() -> ShardHost:
    """A server without its sockets that holds nothing."""
    return ShardHost(Shard(), Coordinator(1), Deadlines())


def a_stream() -> list[bytes]:
    """All that a standby gets of a primary: a copy of two tables, then records of every common kind."""
    host = a_host()
    shard, coordinator = host.shard, host.coordinator
    assert coordinator is not None
    register(coordinator, 0, 70, 1)
    shard.handle(Join(0, 1, find_mode("async")), "join")
    shard.create(SPECS[0], np.arange(6, dtype=np.float32), 0)
    _push(shard, 1)
    feeds_standby(host)
    details: Any = Details("/psfleet.v1.Replica/Follow")
    follow: Any = replica_handler(host, RowMoves(host, Access())).service(details)
    request = FollowRequest(attach=1, version=VERSION, servers=1).SerializeToString()
    copy = list(follow.stream_stream(iter([request]), Context()))[:-1]  # the last says it is over
    records: list[tuple[int, bytes]] = []

    def keep(kind: int, parts: Any) -> None:
        records.append((kind, joined(parts)))

    shard.journal = lambda record: keep(*encode(record))
    coordinator.journal = lambda decision: keep(*encode_change(decision))
    shard.create(SPECS[1], np.empty(0, np.float32), 0)
    _push(shard, 2)
    coordinator.leave(0, 1)
    first = FollowReply.FromString(copy[-1]).number + 1
    return copy + [
        FollowReply(number=number, kind=kind, body=body).SerializeToString()
        for number, (kind, body) in enumerate(records, first)
    ]


def _push(shard: Shard, number: int) -> None:
    gradients = [Gradient(SPECS[0].key, np.ones(6, np.float32), None, 0.1)]
    if SPECS[1].key in shard.tables:
        gradients.append(Gradient(SPECS[1].key, np.ones((3, 2), np.float32), IDS, 0.1))
    shard.handle(Push(0, 1, number, tuple(gradients), 1, 0.5), "push")


class Primary:
    """What a standby connects to; it sends what it is told to, by number of the attachment."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"unix:{folder}/primary"
        self.streams: dict[int, list[bytes]] = {}

    def follow(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        """The stream, whatever the standby says after its first words."""
        yield from self.streams[FollowRequest.FromString(next(requests)).attach]


@pytest.fixture(scope="module")
def primary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Primary]:
    """One for all streams."""
    primary = Primary(tmp_path_factory.mktemp("primary"))
    with nothing_left(), started_pool(2) as pool:
        server = grpc.server(pool)
        method = grpc.stream_stream_rpc_method_handler(primary.follow)
        handler = grpc.method_handlers_generic_handler("psfleet.v1.Replica", {"Follow": method})
        server.add_generic_rpc_handlers((handler,))
        Access().listen(server, primary.endpoint)
        server.start()
        yield primary
        server.stop(None).wait()


def followed(primary: Primary, number: int, stream: list[bytes]) -> tuple[str, Standby, ShardHost]:
    """How a standby ends that is sent these messages, and what it is then."""
    primary.streams[number] = stream
    host = a_host()
    host.lanes.start()
    environment = Environment("server", servers=(primary.endpoint,), replicas=1, standby=number)
    standby = Standby(host, environment, Access())
    standby.start()
    try:
        return standby.wait(), standby, host
    except ServerUnavailable as error:
        return str(error), standby, host
    finally:
        standby.close()
        host.lanes.stop()
        for thread in threading.enumerate():
            if thread.name == "following":
                thread.join(60)


def changed(dice: random.Random, good: bytes, others: list[bytes]) -> bytes:
    """A message that differs from a good one, and does not end the stream in order."""
    message = FollowReply.FromString(good)
    if dice.randrange(2):
        mutated_message(dice, message)
    elif dice.randrange(3):
        message.body = mutated_bytes(dice, message.body, others)
    else:
        return mutated_bytes(dice, good, others)
    with contextlib.suppress(DecodeError):
        message.ClearField("required")
        message.ClearField("over")
    return message.SerializeToString()


def test_the_stream_is_right(primary: Primary) -> None:
    """What the changes start from is taken to its end."""
    stream = a_stream()
    said, standby, host = followed(primary, 1, stream)
    assert "has let go of its standby" in said
    assert standby.taken == FollowReply.FromString(stream[-1]).number
    assert host.shard.workers.sequences == {0: 2}


@pytest.mark.timeout(24 * 3600 if STREAMS > 1000 else 180)
def test_no_record_leaves_a_standby_hanging(primary: Primary) -> None:
    """Each stream has one changed message; the standby comes to its end, or names what it cannot take."""
    stream, dice, lost = a_stream(), random.Random(SEED), 0
    for number in range(2, STREAMS + 2):
        place = dice.randrange(len(stream))
        hostile = changed(dice, stream[place], stream)
        said, _, _ = followed(primary, number, [*stream[:place], hostile, *stream[place + 1 :]])
        assert said in ("over", "required") or "\n" not in said, f"{hostile!r}: {said}"
        lost += "is lost" in said and "has let go" not in said
        del primary.streams[number]
    print(f"{STREAMS} streams, {lost} with what a standby cannot take")
    assert lost > STREAMS / 5
