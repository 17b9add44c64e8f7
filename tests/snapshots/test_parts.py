"""One server's part of a snapshot: its thread is there before the cut, and goes with the snapshot."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from psfleet.core.base.errors import CheckpointError, NoRoom, NotReady, PsfleetError
from psfleet.core.engine.consistency import find_mode
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.events import BeginCut, Join, MakeCut, Record
from psfleet.core.engine.shard.membership_view import PrepareView
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.shard.snapshot_cuts import PendingCut
from psfleet.core.net.server_state import ServerState
from psfleet_server.durability.snapshot_writer import SnapshotShare, SnapshotWriter, Throttle
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.replies import Deadlines

DENSE = TableSpec("d", "dense", (10,), make_rule("sgd", {}))
SECONDS = 60.0


class Outcome:
    """What was told, once."""

    def __init__(self) -> None:
        self._told = threading.Event()
        self._what: bytes | PsfleetError = b""

    def __call__(self, what: bytes | PsfleetError) -> None:
        self._what = what
        self._told.set()

    def get(self) -> bytes | PsfleetError:
        """Wait for it."""
        assert self._told.wait(SECONDS)
        return self._what


@contextmanager
def parts_of(folder: Path, *numbers: int) -> Iterator[SnapshotWriter]:
    """Parts that await the cuts of these snapshots."""
    parts = SnapshotWriter(lambda: 0)
    try:
        for number in numbers:
            parts.expect(number, str(folder))
            parts.start(number)
        yield parts
    finally:
        parts.stop()


def cut(parts: SnapshotWriter, number: int) -> None:
    """Cut a shard with one table."""
    shard = Shard()
    shard.create(DENSE, np.arange(10, dtype=np.float32))
    frozen = shard.freeze(PendingCut(number))
    parts.begin(frozen, ServerState(frozen.state))


def test_no_thread_is_started_at_the_cut(tmp_path: Path) -> None:
    """It is there before, for a new one may take long to run; then it tells of the cut and of the file."""
    with parts_of(tmp_path, 1) as parts:
        made, written = Outcome(), Outcome()
        parts.await_part(1, made, cut=True)
        parts.await_part(1, written, cut=False)
        [before] = parts._threads
        cut(parts, 1)
        assert parts._threads == [before]
        assert made.get() == b""
        outcome = written.get()
        assert isinstance(outcome, bytes)
        assert (tmp_path / json.loads(outcome)["file"]["file"]).exists()


def test_a_cut_may_come_before_the_thread(tmp_path: Path) -> None:
    """An idle fleet is cut while it is being asked to be."""
    parts, written = SnapshotWriter(lambda: 0), Outcome()
    parts.expect(1, str(tmp_path))
    cut(parts, 1)
    parts.start(1)
    parts.start(1)  # the same call again
    parts.await_part(1, written, cut=False)
    assert isinstance(written.get(), bytes)
    parts.stop()


def test_a_snapshot_that_is_given_up_leaves_no_thread(tmp_path: Path) -> None:
    """Whether another one comes, it is forgotten, or the server ends; whoever waits is told."""
    with parts_of(tmp_path, 7) as parts:
        outcomes = [Outcome() for _ in range(3)]
        parts.await_part(7, outcomes[0], cut=True)
        # Numbers begin again where server 0 was started again before it could say that 7 was given up.
        parts.expect(5, str(tmp_path))
        parts.start(5)
        parts.await_part(5, outcomes[1], cut=False)
        parts.forget(5)
        cut(parts, 5)
        parts.expect(8, str(tmp_path))
        parts.start(8)
        parts.await_part(8, outcomes[2], cut=True)
    for outcome in outcomes:
        assert isinstance(outcome.get(), CheckpointError)


def test_a_cut_that_is_given_up_has_a_reason(tmp_path: Path) -> None:
    """Server 0 gets it, also if it asks only later: a full log, or a change of members."""
    full = NoRoom("the log has no room")

    def keep(record: Record) -> None:
        if isinstance(record, MakeCut):
            raise full

    host = ShardHost(Shard(), None, Deadlines())
    host.ask(Join(0, 1, find_mode("sync")))
    host.shard.journal = keep
    waiting, later, changed = Outcome(), Outcome(), Outcome()
    host.parts.expect(1, str(tmp_path))
    host.ask(BeginCut(PendingCut(1)))
    host.parts.await_part(1, waiting, cut=True)
    host.ask(BeginCut(PendingCut(1, round=0)))
    host.parts.await_part(1, later, cut=True)
    assert waiting.get() is later.get() is full
    host.parts.expect(2, str(tmp_path))
    host.ask(BeginCut(PendingCut(2)))
    host.freeze(PrepareView(1))
    host.parts.await_part(2, changed, cut=True)
    assert isinstance(changed.get(), NotReady)
    assert str(changed.get()) == "a worker or a server came or went"
    host.parts.stop()


@pytest.mark.parametrize(
    ("worked", "rest"), [(0.003, 0.009), (0.0, 0.0005), (0.0001, 0.0005)], ids=str
)
def test_a_thread_that_writes_rests_in_proportion(worked: float, rest: float) -> None:
    """Of a quarter of one processor's time three quarters are rests; each lasts a moment at least."""
    clock, rests = [1.0], list[float]()
    pace = Throttle(lambda: 0.25, lambda: clock[0], rests.append)
    for _ in range(2):
        clock[0] += worked
        pace.rest()
    assert rests == pytest.approx([rest, rest])


def test_a_long_rest_ends_when_nothing_trains_any_more() -> None:
    """The share is asked for again and again: a large dense table is one long piece of work."""
    clock, shares, rests = [0.0], iter([0.1, 0.1, 0.1, 1.0]), list[float]()
    pace = Throttle(lambda: next(shares), lambda: clock[0], rests.append)
    clock[0] += 2.0
    pace.rest()
    assert rests == [0.1, 0.1, 0.1]


class Machine:
    """A clock, a counter of calls and the idle time of processors, which tests set."""

    def __init__(self) -> None:
        self.now, self.calls, self.idle = 100.0, 7, 50.0
        self.share = SnapshotShare(lambda: self.calls, lambda: self.idle, lambda: self.now)

    def train(self, seconds: float, idle: float = 0.0) -> float:
        """Let a call arrive every 10 ms while so many processors are idle; return the share at the end."""
        share = 0.0
        for _ in range(round(seconds * 100)):
            self.now, self.idle, self.calls = (
                self.now + 0.01,
                self.idle + idle / 100,
                self.calls + 1,
            )
            share = self.share()
        return share


def test_a_snapshot_takes_a_whole_processor_while_no_call_arrives() -> None:
    """From its first page on, and again soon after the last push or pull."""
    machine = Machine()
    assert machine.share() == 1.0
    assert machine.train(0.5) < 0.26
    machine.now += 0.2
    assert machine.share() < 0.26
    machine.now += 0.2
    assert machine.share() == 1.0


@pytest.mark.parametrize(
    ("idle", "share"), [(0.0, 0.25), (0.2, 0.35), (0.5, 0.5), (60.0, 0.5)], ids=str
)
def test_beside_training_a_snapshot_takes_half_of_what_is_idle(idle: float, share: float) -> None:
    """A quarter at least, and never more than half, for calls need the interpreter as well."""
    assert Machine().train(1.0, idle) == pytest.approx(share, abs=0.02)


def test_a_snapshot_that_is_old_takes_more() -> None:
    """It ends before server 0 gives it up, whatever trains."""
    machine = Machine()
    shares = [machine.train(seconds) for seconds in (30.0, 60.0, 60.0)]
    assert shares == pytest.approx([0.31, 0.81, 1.0], abs=0.02)
