"""An error behind a record tears the shard: the log would have a change that the shard lacks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from psfleet.core.base.errors import LogError, NoRoom, PsfleetError, UsageError
from psfleet.core.engine.consistency import find_mode
from psfleet.core.engine.rules import SGD
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.entry import TTLEntry
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard import shard as shard_module
from psfleet.core.engine.shard.event_shortcuts import apply_plain_call
from psfleet.core.engine.shard.events import (
    BeginCut,
    Event,
    Instruction,
    Join,
    Leave,
    PartState,
    Pull,
    Push,
    Record,
    RestorePart,
    SendError,
    SendOutcome,
    Shrink,
    Tick,
    WriteState,
)
from psfleet.core.engine.shard.membership_view import (
    Incarnation,
    InstallView,
    PrepareView,
    SeatView,
)
from psfleet.core.engine.shard.rounds import Rounds
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.shard.shard_state import ConsistencyState, PullGate
from psfleet.core.engine.shard.shard_tables import ShardTables
from psfleet.core.engine.shard.snapshot_cuts import CutState, PendingCut
from psfleet.core.engine.shard.workers import Workers
from psfleet.core.engine.tables.row_data import TableClock
from psfleet.core.engine.tables.sparse import SparseTable

pytestmark = pytest.mark.quick

DENSE = TableSpec("weights", "dense", (2,), SGD())
ROWS = TableSpec("rows", "sparse", (2,), SGD(), entry=TTLEntry(seconds=86400))


def trained(mode: str) -> tuple[Shard, list[Record]]:
    """A shard of two workers with two tables, and the list of its records from now on."""
    shard, records = Shard(workers=2), list[Record]()
    shard.create(DENSE, np.zeros(2, np.float32))
    shard.create(ROWS, np.zeros(0, np.float32))
    for worker in range(2):
        shard.handle(Join(worker, 1, find_mode(mode)), "join")
    shard.journal = records.append
    return shard, records


def push(worker: int, number: int = 1) -> Push:
    values = np.ones((1, 2), np.float32)
    rows = Gradient(ROWS.key, values, np.array([7]), 0.1)
    return Push(worker, 1, number, (Gradient(DENSE.key, values[0], None, 0.1), rows))


def refused(*arguments: object, **named: object) -> None:
    raise UsageError("the table cannot")


def assert_torn(shard: Shard, instructions: list[Instruction], waiting: tuple[str, ...]) -> None:
    """The first instruction refuses the call; pulls that wait are refused too, as is all that follows."""
    half = "have half of a change, which was stopped by UsageError: the table cannot"
    errors = {i.call: str(i.error) for i in instructions if isinstance(i, SendError)}
    assert errors.pop("call") == "the table cannot"
    assert errors.keys() == {*waiting}
    assert all(half in error for error in errors.values())
    [later] = shard.handle(Tick(1.0), "later")
    assert isinstance(later, SendError)
    assert half in str(later.error)
    assert not shard.is_quiet


STATE = PartState(DENSE.key, 1, np.ones((1, 2), np.float32))
VIEW = InstallView(1, {0: SeatView((Incarnation(1, 1),)), 1: SeatView((Incarnation(1, 1),))})
ROW = {"ids": np.array([7]), "rows": np.ones((1, 2), np.float32), "touched": np.ones(1, np.int64)}


@pytest.mark.parametrize(
    ("mode", "event", "owner", "name"),
    [
        ("async", push(0), SparseTable, "push"),
        ("async", push(0), Workers, "pushed"),
        ("sync", push(0), Rounds, "hold"),
        ("async", Join(0, 2, find_mode("async")), Workers, "begin_incarnation"),
        ("async", Join(0, 1, find_mode("sync"), 1, 0), ConsistencyState, "switch"),
        ("async", Leave(0, 1, 0), ConsistencyState, "leave"),
        ("async", Leave(0, 1, 0, 1), ConsistencyState, "rest_worker"),
        ("async", WriteState((STATE,), 0, 1, 1), ShardTables, "restore"),
        ("async", Shrink(0, 0.5, None, 0, 1, 1), ShardTables, "shrink"),
        ("async", Tick(1.0), ShardTables, "tick"),
        ("async", RestorePart(ROWS.key, TableClock(1), ROW), shard_module, "refill"),
    ],
)
def test_an_event(
    mode: str, event: Event, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever class the error has: one of psfleet's own was taken for a refusal that changes nothing."""
    shard, records = trained(mode)
    waiting = ("pull",) if mode == "sync" else ()
    for call in waiting:
        shard.handle(push(1), "push")
        shard.handle(Pull(1, 1, (), 1), call)
    records.clear()
    monkeypatch.setattr(owner, name, refused)
    instructions = shard.handle(event, "call")
    assert [type(record) for record in records] == [type(event)]
    assert_torn(shard, instructions, waiting)


def test_the_close_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pull that closes the round gets the error, and the pull that has waited for it an end."""
    shard, records = trained("sync")
    for worker in range(2):
        shard.handle(push(worker), "push")
    shard.handle(Pull(0, 1, (), 1), "waiting")
    records.clear()
    monkeypatch.setattr(SparseTable, "push_mean", refused)
    instructions = shard.handle(Pull(1, 1, (), 1), "call")
    assert [type(record).__name__ for record in records] == ["CloseRound"]
    assert_torn(shard, instructions, ("waiting",))


def test_a_membership_and_a_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A view is installed, and a cut is made, by calls that concern no table."""
    shard, records = trained("async")
    shard.handle(PrepareView(1, {}), "freeze")
    monkeypatch.setattr(Workers, "install", refused)
    assert_torn(shard, shard.handle(VIEW, "call"), ())
    assert [type(record).__name__ for record in records] == ["InstallView"]

    shard, records = trained("sync")
    monkeypatch.setattr(CutState, "complete_cut", refused)
    event = BeginCut(PendingCut(1, round=0))
    assert_torn(shard, shard.handle(event, "call"), ())
    assert [type(record).__name__ for record in records] == ["MakeCut"]


def test_a_plain_call() -> None:
    """Plain calls have no record, but the push counts as applied."""

    class Updates:
        def fit(self, base: int) -> bool:
            return True

        def apply(self, base: int) -> None:
            refused()

    shard, _ = trained("async")
    shard.journal = None
    with pytest.raises(UsageError):
        apply_plain_call(shard, push(0), Updates(), None)
    assert shard.torn is not None


def test_a_gate_of_a_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode's own rule runs behind the record too."""
    shard, _ = trained("ssp")
    monkeypatch.setattr(PullGate, "advance", refused)
    assert_torn(shard, shard.handle(push(0), "call"), ())


@pytest.mark.parametrize("error", [NoRoom("full"), LogError("broken")])
def test_a_refused_record_tears_nothing(error: PsfleetError) -> None:
    """The journal has no record then, and the next push counts."""
    shard, records = trained("async")

    def fails(record: Record) -> None:
        raise error

    shard.journal = fails
    assert shard.handle(push(0), "call") == [SendError("call", error)]
    shard.journal = records.append
    assert shard.handle(push(0), "call") == [SendOutcome("call", "applied")]


@pytest.mark.parametrize("creates", [False, True])
def test_a_record_that_only_the_log_has(creates: bool) -> None:
    """An unexpected error of the journal may come when the log has the record, and its standby has not."""
    shard, records = trained("async")

    def keep(record: Record) -> None:
        records.append(record)
        raise MemoryError("no bytes for the standby")

    shard.journal = keep
    step: Callable[[], object] = lambda: shard.handle(push(0), "call")  # noqa: E731
    if creates:
        step = lambda: shard.create(TableSpec("new", "dense", (1,), SGD()), np.zeros(1, np.float32))  # noqa: E731
    with pytest.raises(MemoryError):
        step()
    assert shard.torn is not None
    assert len(records) == 1
