"""An error that a server does not expect, such as a bug, reaches every caller at once, in a sentence."""

import contextlib
import re
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from psfleet.core.base.errors import PsfleetError
from psfleet.core.engine.rules import SGD
from psfleet.core.engine.runtime_interface import Gradient, Read, Runtime
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.events import SendError
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.shard.shard_tables import ShardTables
from psfleet.core.engine.tables.sparse import SparseTable
from psfleet.core.net.v1.follower_pb2 import ChangesRequest
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.engine import coordinator_replies
from psfleet_server.engine.follower_requests import Followers
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.call_layout import CallPlan
from tests.trainings import in_threads

SPEC = TableSpec("rows", "sparse", (4,), SGD())
FAILED = r"the server failed: MemoryError: no bytes are left; see its log"


def broken(*arguments: object, **named: object) -> None:
    raise MemoryError("no bytes\nare left")


@contextlib.contextmanager
def breaking(owner: object, name: str) -> Iterator[None]:
    """Within, a function of servers raises the error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, broken)
        yield


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """The block raises the server's sentence long before any deadline: the shortest has ten seconds."""
    began = time.monotonic()
    with pytest.raises(PsfleetError, match=FAILED):
        yield
    assert time.monotonic() - began < 5


def step(runtime: Runtime, count: int) -> None:
    """A push with a pull behind it, mostly in one call."""
    ids = np.arange(count)
    runtime.push([Gradient(SPEC.key, np.ones((count, 4), np.float32), ids, 0.1)])
    runtime.pull([Read(SPEC.key, ids)])


@pytest.mark.parametrize(
    ("lane", "count", "owner", "name"),
    [
        ("auto", 4, CallPlan, "apply"),
        ("auto", 4, CallPlan, "fit"),
        ("inline", 4, CallPlan, "apply"),
        ("inline", 4, Shard, "note"),
        ("inline", 4000, Shard, "note"),
    ],
)
def test_a_push(
    lane: str,
    count: int,
    owner: type,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In plain calls and others, with tensors in the message or in shared memory."""
    monkeypatch.setenv("PSFLEET_LANE", lane)
    with LocalFleet(servers=1, workers=1, in_process=True) as fleet:
        runtime = fleet.connect(0, "async")
        runtime.create(SPEC)
        for _ in range(4):  # the server learns the layout of the call
            step(runtime, count)
        with breaking(owner, name), at_once():
            step(runtime, count)
        with contextlib.suppress(PsfleetError):
            runtime.close()
    assert re.search(r"Traceback(.|\n)*MemoryError: no bytes", capsys.readouterr().err)


def in_round(worker: Runtime, *more: Gradient) -> None:
    """A push, and the pull that commits it."""
    worker.push([*more, Gradient(SPEC.key, np.ones((2, 4), np.float32), np.arange(2), 0.1)])
    worker.pull([Read(SPEC.key, np.arange(2))])


def test_all_pulls_of_a_round() -> None:
    """The call of one worker answers those of others: all of them get an end."""

    def train(worker: Runtime) -> None:
        with at_once():
            in_round(worker)

    with LocalFleet(servers=1, workers=3, in_process=True) as fleet:
        workers = [fleet.connect(worker, "sync") for worker in range(3)]
        for worker in workers:
            worker.create(SPEC)
        with breaking(ShardTables, "read_into"):
            in_threads([partial(train, worker) for worker in workers])
        for worker in workers:
            with contextlib.suppress(PsfleetError):
                worker.close()


def test_half_of_a_round() -> None:
    """An error in the middle of a change ends all waits, and nobody gets what is not whole."""
    half = (
        r"the tables of server 0 have half of a change, which was stopped by MemoryError: no bytes"
    )
    other = TableSpec("other", "dense", (3,), SGD())
    said = []

    def train(worker: Runtime) -> None:
        began = time.monotonic()
        with pytest.raises(PsfleetError) as raised:
            in_round(worker, Gradient(other.key, np.ones(3, np.float32), None, 0.1))
        said.append(str(raised.value))
        with pytest.raises(PsfleetError, match=f"{half}|{FAILED}"):
            worker.pull([Read(SPEC.key, np.arange(2))])
        assert time.monotonic() - began < 10

    with LocalFleet(servers=1, workers=3, in_process=True) as fleet:
        workers = [fleet.connect(worker, "sync") for worker in range(3)]
        for worker in workers:
            worker.create(other, np.zeros(3, np.float32))
            worker.create(SPEC)
        with breaking(SparseTable, "push_mean"):
            in_threads([partial(train, worker) for worker in workers])
        for worker in workers:
            with pytest.raises(PsfleetError, match=f"{half}|{FAILED}"):
                worker.close()
    assert sum(bool(re.fullmatch(FAILED, one)) for one in said) == 1
    assert sum(bool(re.match(half, one)) for one in said) == 2


@pytest.mark.parametrize(
    ("owner", "name"),
    [(Coordinator, "arrive"), (ShardHost, "meet"), (coordinator_replies, "_collective_reply")],
)
def test_a_barrier(owner: object, name: str) -> None:
    """Over gRPC, for the caller and for all who wait."""

    def meet(worker: Runtime) -> None:
        with at_once():
            worker.barrier()

    with LocalFleet(servers=1, workers=2, in_process=True) as fleet:
        workers = [fleet.connect(worker, "async") for worker in range(2)]
        with breaking(owner, name):
            in_threads([partial(meet, worker) for worker in workers])
        in_threads([worker.close for worker in workers])


def test_a_follower(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the error itself, and not the worker whose push closes the round that it waits for."""
    followers = Followers(Shard(), boot=1)
    monkeypatch.setattr(Followers, "_changes", broken)
    call: Any = object()
    [reply] = followers.ask(ChangesRequest(), call)
    assert isinstance(reply, SendError)
    assert (reply.call, str(reply.error)) == (call, FAILED)
    assert followers.due() == []
