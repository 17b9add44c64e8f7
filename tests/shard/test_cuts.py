"""Where a snapshot cuts a shard: rules R11 and R12 of the protocol, without a network."""

import numpy as np
import pytest

from psfleet.core.base.errors import Later, PsfleetError, UsageError
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine.consistency import find_mode
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard import events
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.shard.snapshot_cuts import PendingCut
from psfleet.core.engine.tables.sparse import SparseTable
from psfleet.core.net.server_state import ServerState, write_state
from psfleet_server.durability.log_shipping import joined

pytestmark = pytest.mark.quick

DENSE = TableSpec("d", "dense", (3,), make_rule("sgd", {}))


def shard(mode: Mode, workers: int = 2) -> Shard:
    """A shard that all workers have joined, in their first incarnations."""
    shards = Shard(workers=workers)
    shards.create(DENSE, np.zeros(3, np.float32))
    for worker in range(workers):
        take(shards, events.Join(worker, 1, find_mode(mode)))
    return shards


def take(shard: Shard, event: events.Event) -> events.FrozenShard | None:
    """What an event lets the shard keep; raises what it refuses."""
    kept = None
    for instruction in shard.handle(event, "call"):
        if isinstance(instruction, events.SendError):
            raise instruction.error
        if isinstance(instruction, events.WriteSnapshot):
            kept = instruction.frozen
    return kept


def push(worker: int, number: int, cut: tuple[int, int] | None = None) -> events.Push:
    """The number-th push of a worker adds 1 to every weight."""
    values = np.full(3, -1, np.float32)
    return events.Push(worker, 1, number, (Gradient(DENSE.key, values, None, 1.0),), cut=cut)


def weight(frozen: events.FrozenShard | None) -> float:
    """What every weight was."""
    assert frozen is not None
    [table] = frozen.tables
    [page] = table.pages()
    frozen.close()
    return float(page["value"][0])


def test_a_push_that_is_refused_marks_nothing() -> None:
    """A push brings the mark of its worker, but has no room: neither it nor its mark counts. A push that
    has to wait for the cut leaves its mark, which the worker need not send again."""
    one = shard("async", workers=1)
    full = TableSpec("full", "sparse", (2,), make_rule("sgd", {}))
    one.create(full, np.zeros(0, np.float32))
    one.tables[full.key] = SparseTable(full, max_rows=1)
    take(one, events.BeginCut(PendingCut(1, members={0: 1})))
    assert one.cuts.under_way is not None
    gradient = Gradient(full.key, np.ones((2, 2), np.float32), np.arange(2), 1.0)
    for number in (1, 2):
        with pytest.raises(UsageError, match="'full' is full"):
            take(one, events.Push(0, 1, 1, (gradient,), cut=(1, number)))
    assert one.cuts.under_way.marks == {}
    with pytest.raises(Later):
        take(one, push(0, 1, cut=(1, 0)))
    assert one.cuts.under_way.marks == {0: 0}


def test_rounds_wait_until_it_is_known_where_to_cut() -> None:
    """Sync: no round closes meanwhile; the cut is after the named one, with what is held for the next."""
    one = shard("sync")
    for worker in range(2):
        take(one, push(worker, 1))
    take(one, events.BeginCut(PendingCut(1)))
    for worker in range(2):
        take(one, events.Pull(worker, 1, (), 1))
    assert one.rounds.closed == 0
    frozen = take(one, events.BeginCut(PendingCut(1, round=1)))
    assert weight(frozen) == 1
    take(one, push(0, 2))
    late = take(one, events.BeginCut(PendingCut(2, round=1)))
    assert late is not None
    again = Shard(workers=2)
    again.create(DENSE, np.zeros(3, np.float32))
    again.become(late.state)
    assert sorted(again.rounds.held) == [0]
    assert again.rounds.closed == 1
    assert joined(write_state(ServerState(again.state()))) == joined(
        write_state(ServerState(late.state))
    )
    with pytest.raises(PsfleetError, match="round 1 is closed"):
        take(one, events.BeginCut(PendingCut(3, round=0)))
    with pytest.raises(PsfleetError, match="numbers of snapshots must rise"):
        take(one, events.BeginCut(PendingCut(2)))
    late.close()


def test_a_fleet_without_rounds_is_not_cut_after_one() -> None:
    """A fleet that nobody had joined when a cut began is joined in async mode before it is said where to
    cut: every server would cut between pushes of its own choice, so it is refused."""
    one = Shard(workers=1)
    one.create(DENSE, np.zeros(3, np.float32))
    take(one, events.BeginCut(PendingCut(1)))
    take(one, events.Join(0, 1, find_mode("async")))
    take(one, push(0, 1))
    with pytest.raises(PsfleetError, match="the fleet now runs in mode 'async' on server 0"):
        take(one, events.BeginCut(PendingCut(1, round=0)))
