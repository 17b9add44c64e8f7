"""Copies of the weights of a job, step by step: while its tables are made, and how soon they ask again."""

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from psfleet.core.engine.kernels.id_routing import owned_by
from psfleet.core.engine.runtime_interface import Read
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.shard.table_placement import dense_range
from psfleet.core.net.table_messages import read_reply
from psfleet.core.net.v1.follower_pb2 import ChangesReply, ChangesRequest, RowsReply
from psfleet.serving.follower_state_machine import AskChanges, Following, TakeCut, WeightCopy
from psfleet_server.engine.follower_requests import Followers, SendChanges
from tests.serving.test_followers import DENSE, IDS, ROWS


def changes_of(server: Followers, request: ChangesRequest) -> ChangesReply:
    """The answer to a request that waits for nothing."""
    call: Any = object()
    [reply] = server.ask(request, call)
    assert isinstance(reply, SendChanges)
    return read_reply(reply.changes)


def test_a_dense_table_is_there_when_all_servers_have_it() -> None:
    """A cut between a worker's calls that make a table on each server has none of it, and not half."""
    shards = [Shard(index=i, servers=3) for i in range(3)]
    asked = [Followers(shard, boot=1) for shard in shards]
    copy = WeightCopy("the job", "float32")
    value = np.arange(1, DENSE.size + 1, dtype=np.float32)
    for shard, instances in zip(shards, ([], [], ["dense"]), strict=True):
        low, high = dense_range(DENSE, shard.index, shard.servers)
        shard.create(DENSE, value[low:high])
        copy.apply([changes_of(own, copy.request(i)) for i, own in enumerate(asked)])
        assert [*copy.rows.specs()] == instances
    np.testing.assert_array_equal(copy.rows.dense("dense"), value)


def test_a_first_copy_while_a_table_is_made() -> None:
    """A first copy asks a server for rows of the tables that this server had; one that it makes meanwhile
    comes with its changes."""
    shards = [Shard(index=i, servers=2) for i in range(2)]
    servers = [Followers(shard, boot=1) for shard in shards]
    copy = WeightCopy("the job", "float32")

    def train(shard: Shard) -> None:
        shard.create(ROWS, np.zeros(0, np.float32))
        ids = IDS[owned_by(IDS, shard.index, 2)]
        table: Any = shard.tables[ROWS.key]
        table.push(ids, np.ones((len(ids), ROWS.dim), np.float32), 0.1)

    def changes(requests: Sequence[Any]) -> list[Any]:
        pairs = zip(servers, requests, strict=True)
        return [changes_of(each, request) for each, request in pairs]

    train(shards[0])
    filling: Any = copy.fill(changes([copy.request(i) for i in range(2)]))
    with contextlib.suppress(StopIteration):
        action = next(filling)
        while True:
            action = filling.send(RowsReply.FromString(servers[action.server].rows(action.request)))
    train(shards[1])
    copy.apply(changes([copy.request(i) for i in range(2)]))
    [expected] = zip(*(shard.tables.read([Read(ROWS.key, IDS)]) for shard in shards), strict=True)
    own = owned_by(IDS, 0, 2)[:, None]
    np.testing.assert_array_equal(copy.rows.look_up("rows", IDS), np.where(own, *expected))


@pytest.mark.parametrize(
    ("busy", "cost", "pause"), [(0, 100, 0.05), (0, 1000, 0.1), (0.5, 600, 0.05), (0.5, 0.15e6, 10)]
)
def test_replies_are_a_small_part_of_what_a_server_does(
    busy: float, cost: float, pause: float
) -> None:
    """A follower asks again when the server has done 33 times as much as the reply took, and where it does
    little when that was a hundredth of the time; not before the interval."""
    clock = [1.0]
    copy = partial(WeightCopy, "the job", "float32")
    following = Following(1, copy, lambda: None, 0.05, lambda: clock[0])
    for second in range(2):
        clock[0] += second
        step = following.next_step()
        assert isinstance(next(step), AskChanges)
        cpu = round(second * busy * 1e6)
        reply = ChangesReply(
            boot=1, servers=1, microseconds=round(cost), process_microseconds=7 + cpu
        )
        assert isinstance(step.send([reply]), TakeCut)
        rest: Any = step.send(None)
    np.testing.assert_allclose(rest.seconds, pause)
