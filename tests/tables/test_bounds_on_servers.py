"""Entries where they matter: on servers, through the log, over rounds, and by the clock."""

import contextlib
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

import psfleet
from psfleet import fleet, optimizer
from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.client import Client
from psfleet.core.engine.consistency import find_mode
from psfleet.core.engine.rules import SGD, Adam
from psfleet.core.engine.runtime_interface import Gradient, Read, Runtime
from psfleet.core.engine.schema.entry import (
    CapacityEntry,
    CountFilterEntry,
    Entry,
    ShowClickEntry,
    TTLEntry,
)
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.events import Join, Pull, Push, Shrink, Tick
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.tables.sparse import SparseTable
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.process_runtime import active, current
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_server.durability.journal import Journal
from psfleet_server.durability.log import LogHeader, ServerLog
from tests.trainings import in_threads
from tests.waiting import until

POLICY = (
    CountFilterEntry(2)
    & TTLEntry(steps=12, seconds=30.0)
    & CapacityEntry(rows=40)
    & ShowClickEntry("show", "click", delete_threshold=0.5)
)
EXACT = CountFilterEntry(2) & TTLEntry(steps=9) & ShowClickEntry("s", "c", delete_threshold=0.4)


def spec_of(entry: Entry) -> TableSpec:
    return TableSpec("rows", "sparse", (4,), Adam(), seed=7, entry=entry)


def gradient(entry: Entry, number: int, worker: int = 0) -> Gradient:
    dice = np.random.default_rng((number, worker))
    spec, ids = spec_of(entry), np.unique(dice.zipf(1.3, 30) % 60 - 5)
    values = dice.integers(-8, 8, (len(ids), spec.push_width)).astype(np.float32)
    values[:, spec.dim :] = np.abs(values[:, spec.dim :])
    return Gradient(spec.key, values, ids, 0.1)


def content(table: Any) -> list[Any]:
    assert isinstance(table, SparseTable)
    rows, waiting = table.rows(table.ids()), table.candidates()
    arrays: list[NDArray[Any]] = [rows.ids, rows.values, rows.touched, rows.scores]
    arrays += [waiting.ids, *waiting.values.values(), waiting.touched]
    return [table.clock, *map(np.ndarray.tobytes, arrays)]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_log_gives_the_same_counts_ages_and_rows(tmp_path: Path, mode: Mode) -> None:
    """After pushes, ticks, shrinks and evictions a server that starts again is bit for bit what it was."""

    def kept() -> tuple[ServerLog, Shard]:
        log, shard = ServerLog(tmp_path / "log", LogHeader(job="j")), Shard(workers=2)
        Journal(log, shard, None).start()
        return log, shard

    log, shard = kept()
    spec = spec_of(POLICY)
    for worker in range(2):
        shard.handle(Join(worker, 1 + worker, find_mode(mode)), "join")
    shard.create(spec, np.zeros(0, np.float32))
    for number in range(1, 40):
        for worker in range(2):
            push = Push(worker, 1 + worker, number, (gradient(POLICY, number, worker),))
            shard.handle(push, "push")
        for worker in range(2):
            shard.handle(Pull(worker, 1 + worker, (), number if mode == "sync" else 0), worker)
        if number % 7 == 0:
            shard.handle(Tick(4.5), "tick")
        if number % 11 == 0:
            shard.handle(Shrink(0, None, None, 0, 1, number), "shrink")
            shard.handle(Shrink(0, None, None, 0, 1, number), "repeated")
    before = content(shard.tables[spec.key])
    log.close()
    log, again = kept()
    assert content(again.tables[spec.key]) == before
    assert len(before[0].shrinks) == 3
    assert len(before[0].ticks) > 1
    log.close()


def test_a_snapshot_keeps_counts_ages_and_the_clock(tmp_path: Path) -> None:
    """A table that was saved and loaded is the same to the last bit, and stays so."""
    saved, loaded = EmbeddedRuntime(lambda: 0.0), EmbeddedRuntime(lambda: 0.0)
    key = saved.create(spec_of(POLICY))
    for number in range(30):
        saved.push([gradient(POLICY, number)])
        if number % 10 == 5:
            saved.shrink(unseen=5)
    saved.save(str(tmp_path / "model"))
    loaded.load(str(tmp_path / "model"))
    for number in range(30, 40):
        tables = [runtime._shard.tables[key] for runtime in (saved, loaded)]
        assert content(tables[0]) == content(tables[1])
        for runtime in (saved, loaded):
            runtime.push([gradient(POLICY, number)])


def train(runtime: Runtime, worker: int, entry: Entry) -> list[bytes]:
    """Twenty rounds with a shrink in between; what worker 0 then sees."""
    spec = spec_of(entry)
    runtime.create(spec)
    gone = 0
    for number in range(20):
        runtime.push([gradient(entry, number, worker)])
        if number == 12:
            runtime.barrier()
            gone = runtime.shrink() if worker == 0 else 0
            runtime.barrier()
    runtime.barrier()
    figures = [runtime.pull([Read(spec.key, np.arange(-10, 60))])[0].tobytes()]
    if worker == 0:
        runtime.write_table(spec.key, runtime.read_table(spec.key))
        state = runtime.read_table(spec.key)
        assert state.ids is not None
        figures += [repr((gone, state.step)).encode(), state.ids.tobytes()]
        assert state.touched is not None
        assert state.scores is not None
        figures += [state.touched.tobytes(), state.scores.tobytes()]
        figures += [values.tobytes() for values in state.values]
    runtime.barrier()
    return figures


@pytest.mark.parametrize("servers", [1, 3])
def test_rounds_are_bit_identical_on_any_number_of_servers(servers: int) -> None:
    """Two workers in sync mode: admission, expiry and shrinks on 1 and 3 servers are those of one shard."""
    expected, actual = alone(EXACT), {}
    with LocalFleet(servers=servers, workers=2, in_process=True) as local:

        def run(worker: int) -> None:
            with contextlib.closing(local.connect(worker, "sync")) as runtime:
                actual[worker] = train(runtime, worker, EXACT)

        in_threads([partial(run, worker) for worker in range(2)])
    assert actual[0] == expected
    assert actual[0][0] == actual[1][0]


def alone(entry: Entry) -> list[bytes]:
    """The same training by a shard without servers."""
    shard, spec = Shard(workers=2), spec_of(entry)
    for worker in range(2):
        shard.handle(Join(worker, 1, find_mode("sync")), "join")
    shard.create(spec, np.zeros(0, np.float32))
    table = shard.tables[spec.key]
    assert isinstance(table, SparseTable)
    gone = 0
    for number in range(20):
        for worker in range(2):
            push = Push(worker, 1, number + 1, (gradient(entry, number, worker),))
            shard.handle(push, "push")
        for worker in range(2):
            shard.handle(Pull(worker, 1, (), number + 1), worker)
        gone += table.shrink() if number == 12 else 0
    out = np.empty((70, 4), np.float32)
    table.pull_into(np.arange(-10, 60), out)
    rows = table.rows(table.ids())
    return [
        out.tobytes(),
        repr((gone, table.step)).encode(),
        rows.ids.tobytes(),
        rows.touched.tobytes(),
        rows.scores.tobytes(),
        *(np.ascontiguousarray(rows.values[:, i : i + 4]).tobytes() for i in (0, 4, 8)),
    ]


@pytest.mark.parametrize("full", ["evict", "refuse"])
def test_a_full_table_comes_back_whole_on_other_servers(
    tmp_path: Path, full: Literal["evict", "refuse"]
) -> None:
    """All its rows, although hashing gives some server more than its part; pushes then keep the limit."""
    spec = spec_of(CapacityEntry(rows=1000, full=full))
    ids = np.arange(1000)
    with (
        LocalFleet(servers=1, workers=1, in_process=True) as local,
        contextlib.closing(local.connect(0, "async")) as saved,
    ):
        saved.create(spec)
        saved.push([Gradient(spec.key, np.ones((1000, 4), np.float32), ids, 0.1)])
        saved.save(str(tmp_path / "model"))
        before = saved.read_table(spec.key)
    with LocalFleet(servers=2, workers=1, resume=str(tmp_path / "model"), in_process=True) as local:
        runtime = local.connect(0, "async")
        try:
            runtime.create(spec)
            for _ in range(2):  # from the snapshot, then written over
                state = runtime.read_table(spec.key)
                assert state.ids is not None
                assert state.ids.tolist() == ids.tolist()
                assert [v.tobytes() for v in state.values] == [v.tobytes() for v in before.values]
                runtime.load(str(tmp_path / "model"))
            counts = [server["tables"][0]["count"] for server in runtime.stats()]
            assert max(counts) > 500
            runtime.push([Gradient(spec.key, np.ones((9, 4), np.float32), ids[:9], 0.1)]).wait()
            assert count(runtime) == 1000
            news = Gradient(spec.key, np.ones((99, 4), np.float32), np.arange(2000, 2099), 0.1)
            if full == "refuse":
                with pytest.raises(
                    UsageError, match=r"holds \d+ rows of at most 500 and was asked"
                ):
                    runtime.push([news]).wait()
            else:
                runtime.push([news]).wait()
                counts = [server["tables"][0]["count"] for server in runtime.stats()]
                assert max(counts) <= 500
        finally:
            with contextlib.suppress(UsageError):  # the refused push is told again
                runtime.close()


def count(runtime: Runtime) -> int:
    return sum(int(table["count"]) for server in runtime.stats() for table in server["tables"])


def test_rows_expire_by_the_servers_clock() -> None:
    """Rows that nobody pushes are gone after their seconds; rows that are pushed stay."""
    entry = TTLEntry(seconds=0.5)
    with (
        LocalFleet(servers=1, workers=1, in_process=True) as local,
        contextlib.closing(local.connect(0, "async")) as runtime,
    ):
        key = runtime.create(spec_of(entry))
        runtime.push([Gradient(key, np.ones((50, 4), np.float32), np.arange(50), 0.1)]).wait()
        assert count(runtime) == 50
        one = Gradient(key, np.ones((1, 4), np.float32), np.array([7]), 0.1)

        def is_alone() -> bool:
            runtime.push([one]).wait()
            return count(runtime) == 1

        until(is_alone, "end of the other rows", every=0.05)
        assert runtime.read_table(key).ids == np.array([7])


def test_an_embedded_table_expires_by_the_clock_it_is_given() -> None:
    """Without servers time passes with pushes: a row counts as used until the next one after it."""
    now = [0.0]
    runtime = EmbeddedRuntime(lambda: now[0])
    key = runtime.create(spec_of(TTLEntry(seconds=10.0)))
    counts: list[int] = []
    for seconds in (0, 1, 5, 5, 1, 20):
        now[0] += seconds
        ids = np.array([len(counts)])
        runtime.push([Gradient(key, np.ones((1, 4), np.float32), ids, 0.1)])
        counts.append(count(runtime))
    assert counts == [1, 2, 3, 3, 4, 2]


def test_shows_and_clicks_of_a_client() -> None:
    """Repeated ids add theirs up; left out they are one show and no click; shrink goes by the score."""
    entry = ShowClickEntry("show", "click", decay_rate=1.0)
    with Client(EmbeddedRuntime()) as ps:
        table = ps.sparse_table("t", 2, optimizer.SGD(0.1), entry=entry)
        plain = ps.sparse_table("p", 2, optimizer.SGD(0.1))
        ids = [1, 2, 1, 3]
        table.push(ids, np.ones((4, 2)), shows=[5, 8, 4, 1], clicks=[0, 0, 0, 1])
        table.push([4], np.ones((1, 2)))
        assert ps.runtime.shrink(table.spec.key, 0.81) == 2  # 2 is worth 0.8, 4 is worth 0.1
        ids_held = ps.runtime.read_table(table.spec.key).ids
        assert ids_held is not None
        assert ids_held.tolist() == [1, 3]
        with pytest.raises(UsageError, match="'p' counts no shows and clicks"):
            plain.push(ids, np.ones((4, 2)), shows=1)


def test_fleet_shrink() -> None:
    """The reference's name: rows unseen between two calls go; wrong numbers are refused."""
    current().use(None)
    runtime = active()
    try:
        key = runtime.create(TableSpec("t", "sparse", (1,), SGD()))
        one = np.ones((1, 1), np.float32)
        for id_ in (1, 2):
            runtime.push([Gradient(key, one, np.array([id_]), 0.1)])
        assert fleet.shrink(1) == 0
        runtime.push([Gradient(key, one, np.array([2]), 0.1)])
        assert fleet.shrink(1, table="t") == 1
        assert count(runtime) == 1
        with pytest.raises(ConfigError, match="is nan"):
            psfleet.fleet.shrink(float("nan"))
        with pytest.raises(ConfigError, match="is 0"):
            fleet.shrink(unseen=0)
    finally:
        current().use(None)
