"""Rounds and sequences: what a shard does with pushes that come late, twice, early or not at all.

tests/protocol proves it for random schedules. These are examples of the rules; where a docstring names a
line of code, tests/mutants/planted.py changes it, and the example fails.
"""

from collections.abc import Iterator

import numpy as np
import pytest

from psfleet.core.base.errors import DeadlineExceeded, Gap, ProtocolError, ShapeError
from psfleet.core.engine.consistency import find_mode
from psfleet.core.engine.rules.adam import Adam
from psfleet.core.engine.rules.momentum import SGD
from psfleet.core.engine.runtime_interface import Gradient, Read
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard import events
from psfleet.core.engine.shard.membership_view import (
    Incarnation,
    InstallView,
    PrepareView,
    SeatView,
)
from psfleet.core.engine.shard.shard import Shard

pytestmark = pytest.mark.quick

DENSE = TableSpec("w", "dense", (3,), SGD())
SPARSE = TableSpec("rows", "sparse", (2,), Adam(), seed=5)


@pytest.fixture
def shards() -> Iterator[list[Shard]]:
    """Shards made by a test; each is validated when the test ends."""
    instances: list[Shard] = []
    yield instances
    for shard in instances:
        shard.validate()


def make(shards: list[Shard], workers: int, mode: str = "sync") -> Shard:
    shard = Shard(workers=workers)
    shards.append(shard)
    shard.create(DENSE, np.zeros(3, np.float32))
    shard.create(SPARSE, np.zeros(0, np.float32))
    for worker in range(workers):
        shard.handle(events.Join(worker, 1, find_mode(mode)), "join")
    return shard


def dense_push(worker: int, sequence: int, value: float) -> events.Push:
    gradient = Gradient(DENSE.key, np.full(3, value, np.float32), None, 1.0)
    return events.Push(worker, 1, sequence, (gradient,))


def weights(shard: Shard) -> list[float]:
    return [float(x) for x in shard.tables.read([Read(DENSE.key)])[0]]


def outcome(instructions: list[events.Instruction]) -> object:
    first = instructions[0]
    return (
        type(first.error)
        if isinstance(first, events.SendError)
        else getattr(first, "outcome", type(first))
    )


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_skipped_push_is_a_gap(shards: list[Shard], mode: str) -> None:
    """A push whose predecessor never came is refused by name and changes nothing.

    `if push.sequence != self.closed + 1:`, and in async mode `if push.sequence - 1 - push.skipped > last:`.
    """
    shard = make(shards, 1, mode)
    assert outcome(shard.handle(dense_push(0, 2, 1.0), "a")) is Gap
    assert weights(shard) == [0, 0, 0]


def test_waiting_pull_expires_by_name(shards: list[Shard]) -> None:
    """A pull whose round does not close says whom it waits for; the round may still close later.

    `return pull.commit <= self.rounds.closed`.
    """
    shard = make(shards, 2)
    shard.handle(dense_push(0, 1, 1.0), "a")
    shard.handle(events.Pull(0, 1, (), commit=1), "p")
    [refused] = shard.handle(events.Expire(), "p")
    assert isinstance(refused, events.SendError)
    assert isinstance(refused.error, DeadlineExceeded)
    assert "worker 1" in str(refused.error)
    shard.handle(dense_push(1, 1, 1.0), "b")
    served = shard.handle(events.Pull(1, 1, (), commit=1), "q")
    assert [s.call for s in served if isinstance(s, events.SendValues)] == ["q"]


def test_rest_lets_others_go_on_until_all_meet(shards: list[Shard]) -> None:
    """A worker without data rests; rounds close without it; when all rest, all are members again.

    `return number > self.rests.get(worker, 0)`.
    """
    shard = make(shards, 2)
    assert shard.handle(events.Leave(1, 1, 0, rest=1), "r1")[0] == events.SendOutcome(
        "r1", number=2
    )
    shard.handle(dense_push(0, 1, 1.0), "a")
    assert shard.handle(events.Pull(0, 1, (), commit=1), "p") == [events.SendValues("p", ())]
    shard.handle(events.Leave(0, 1, 1, rest=1), "r0")
    shard.handle(events.Leave(1, 1, 0, rest=1), "repeated")
    shard.handle(dense_push(0, 2, 1.0), "a")
    assert shard.handle(events.Pull(0, 1, (), commit=2), "p") == []
    assert shard.handle(events.Leave(1, 1, 0), "gone")[1:] == [events.SendValues("p", ())]
    assert weights(shard) == [-2, -2, -2]


def test_commit_without_its_push_is_refused(shards: list[Shard]) -> None:
    """A commit of a push that this server never held is an error, not a wait without end.

    `if number < self.first.get(worker, 1):`.
    """
    shard = make(shards, 1)
    assert outcome(shard.handle(events.Pull(0, 1, (), commit=1), "p")) is ProtocolError


def test_bad_gradient_changes_nothing(shards: list[Shard]) -> None:
    """A push with one wrong shape is refused whole, also what came before the wrong part."""
    shard = make(shards, 1, "async")
    good = dense_push(0, 1, 1.0).gradients[0]
    bad = Gradient(SPARSE.key, np.zeros((2, 3), np.float32), np.arange(2), 0.1)
    assert outcome(shard.handle(events.Push(0, 1, 1, (good, bad)), "a")) is ShapeError
    assert weights(shard) == [0, 0, 0]
    assert outcome(shard.handle(events.Push(0, 1, 1, (good,)), "a")) == "applied"


def test_a_push_of_the_next_round_is_no_repeat_of_one_that_is_held(shards: list[Shard]) -> None:
    """A server that others have left behind does not say that it holds a push that it does not take."""
    shard = make(shards, 2)
    assert outcome(shard.handle(dense_push(0, 1, 1.0), "a")) == "held"
    assert outcome(shard.handle(dense_push(0, 1, 1.0), "again")) == "held"
    assert outcome(shard.handle(dense_push(0, 2, 1.0), "next")) is Gap


def test_views_do_not_go_back(shards: list[Shard]) -> None:
    """Late messages about a view are refused: a later one is promised, or it is installed already.

    `if event.view < self.promised or event.view <= self.view:`.
    """
    shard = make(shards, 1)
    seats = {0: SeatView((Incarnation(1),))}
    assert outcome(shard.handle(PrepareView(3), "freeze")) is events.SendReport
    assert outcome(shard.handle(PrepareView(2), "late")) is ProtocolError
    assert outcome(shard.handle(InstallView(2, seats), "late")) is ProtocolError
    assert outcome(shard.handle(InstallView(3, seats), "install")) is None
    assert outcome(shard.handle(PrepareView(3), "again")) is ProtocolError


def test_a_server_that_is_behind_closes_the_rounds_that_were_empty_elsewhere(
    shards: list[Shard],
) -> None:
    """Who was to count later is removed; its view says how far another server is, and this one follows.

    `self.committed[seat] = push.sequence` and `self.committed.get(seat, 0) <= self.closed`.
    """
    shard = make(shards, 2)
    for worker in (0, 1):
        shard.handle(dense_push(worker, 1, 1.0), "push")
    incarnations = {0: SeatView((Incarnation(1),)), 1: SeatView((Incarnation(1, 1, 1),))}
    shard.handle(PrepareView(1, {1: 1}), "freeze")
    installed = shard.handle(InstallView(1, incarnations, closed=3), "install")
    assert outcome(installed) is None
    assert shard.rounds.closed == 0  # the pushes of the first round are to be committed
    shard.handle(events.Pull(0, 1, (), commit=1), "commit")
    assert shard.rounds.closed == 3
    assert weights(shard) == [-1, -1, -1]
    assert outcome(shard.handle(dense_push(0, 4, 1.0), "push")) == "held"


def test_repeated_push_of_a_closed_round_is_held(shards: list[Shard]) -> None:
    """Sync: the late copy of a push whose round is closed changes nothing.

    `if push.sequence <= self.closed:`.
    """
    shard = make(shards, 1)
    shard.handle(dense_push(0, 1, 1.0), "a")
    shard.handle(events.Pull(0, 1, (), commit=1), "p")
    assert outcome(shard.handle(dense_push(0, 1, 1.0), "again")) == "held"
    assert weights(shard) == [-1, -1, -1]
