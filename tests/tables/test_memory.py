"""Tables within a memory budget: what does not fit is refused whole, or rows go; the process stays small."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.memory import resident
from psfleet.core.base.settings.declaration import from_variable
from psfleet.core.base.settings.declared_settings import JobSettings
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine.consistency import find_mode
from psfleet.core.engine.eviction_records import EvictionCause
from psfleet.core.engine.rules import Adam
from psfleet.core.engine.runtime_interface import Gradient, Read, Runtime
from psfleet.core.engine.schema.entry import (
    CapacityEntry,
    CountFilterEntry,
    Entry,
    EvictionStreamEntry,
)
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.events import (
    Evict,
    Join,
    PartState,
    Pull,
    Push,
    Record,
    SendError,
    SendOutcome,
    WriteState,
)
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.tables.budget import MemoryBudget
from psfleet.core.engine.tables.sparse import SparseTable
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime, FrozenRuntime
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_launch.job.job_plan import Job, Member, Told, child_environment
from psfleet_launch.job.job_request import JobRequest
from psfleet_server.durability.journal import Journal
from psfleet_server.durability.log import LogHeader, ServerLog
from psfleet_server.engine.memory_limit import table_limit

MIB = 1 << 20
BATCH = 8192
WIDE, FEW = 300, 1024  # of what fills a server: it is about bytes, and few rows are soon pushed


def spec_of(dim: int, entry: Entry | None = None, name: str = "rows") -> TableSpec:
    return TableSpec(name, "sparse", (dim,), Adam(), seed=1, entry=entry)


def push(table: SparseTable, ids: Any) -> None:
    table.push(ids, np.ones((len(ids), table.spec.dim), np.float32), 0.1)


def fill(table: SparseTable, count: int, times: int) -> None:
    for number in range(10_000):
        for _ in range(times):
            push(table, np.arange(number * count, (number + 1) * count, dtype=np.int64))


@pytest.mark.parametrize(("dim", "entry"), [(16, None), (300, CountFilterEntry(2))])
def test_a_table_takes_what_it_says_and_no_more(dim: int, entry: Entry | None) -> None:
    """Pushes of new rows go on until one is refused; the process has then grown by less than the budget."""
    push(SparseTable(spec_of(dim, entry)), np.arange(10))  # compiled
    before, budget = resident(), MemoryBudget(limit=40 * MIB)
    table = SparseTable(spec_of(dim, entry), budget=budget)
    count, times = BATCH if dim < 100 else 256, 1 if entry is None else 2
    with pytest.raises(UsageError, match=r"was asked to add .* may give it 40\.0 MiB"):
        fill(table, count, times)
    assert len(table) == table.step * count // times
    assert 12 * MIB < table.bytes <= 40 * MIB
    assert resident() - before < 52 * MIB  # a batch, and what the allocator keeps
    with pytest.raises(UsageError, match="was asked to reserve 9999999 rows"):
        table.reserve(9_999_999)
    push(table, np.arange(count))  # rows that are there are still served
    out = np.empty((count, dim), np.float32)
    table.pull_into(np.arange(10**9, 10**9 + count), out)


def test_small_tables_take_little() -> None:
    """A hundred tables of a hundred rows take a few pages each; what each says is what it takes."""
    tables = [
        SparseTable(spec_of(16, name=f"t{number}"), budget=MemoryBudget()) for number in range(101)
    ]
    push(tables[0], np.arange(100))  # compiled
    before, budget = resident(), MemoryBudget(limit=40 * MIB)
    tables = [SparseTable(spec_of(16, name=f"u{n}"), budget=budget) for n in range(100)]
    for table in tables:
        push(table, np.arange(100))
    assert resident() - before < 100 * (160 << 10)
    assert budget.available_for() > 40 * MIB - 100 * (160 << 10)


def test_a_table_that_outgrows_a_huge_page_uses_huge_pages() -> None:
    """Rows pushed one by one, or all at once into an empty table, lie in huge pages beyond the first."""
    assert "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    tables = []
    for batch in (BATCH, 25 * BATCH):
        before = huge()
        tables.append(SparseTable(spec_of(16)))
        for first in range(0, 25 * BATCH, batch):
            push(tables[-1], np.arange(first, first + batch))
        assert huge() - before > 25 * BATCH * 192 * 3 // 4


def huge() -> int:
    """Bytes of huge pages that this process has."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages"))


def test_tables_share_what_there_is() -> None:
    """Dense and sparse tables of one shard together stay below the limit; each refusal names its table."""
    shard = Shard()
    shard.tables.budget.limit = 32 * MIB
    shard.handle(Join(0, 1, find_mode("async")), "join")
    shard.create(TableSpec("w", "dense", (2 << 20,), Adam()), np.zeros(2 << 20, np.float32))
    with pytest.raises(UsageError, match=r"'v' was asked to be made, for which it needs 24\.0 MiB"):
        shard.create(TableSpec("v", "dense", (2 << 20,), Adam()), np.zeros(2 << 20, np.float32))
    shard.create(spec_of(8), np.zeros(0, np.float32))
    table = shard.tables[spec_of(8).key]
    assert isinstance(table, SparseTable)
    with pytest.raises(UsageError, match="'rows' was asked to add"):
        fill(table, BATCH, 1)
    assert shard.tables.budget.available_for() >= 0


def a_push(spec: TableSpec, number: int, worker: int = 0) -> Push:
    dice = np.random.default_rng((number, worker))
    ids = np.unique(np.append(dice.integers(0, 200_000, 3000), np.arange(100)))
    values = dice.standard_normal((len(ids), spec.dim), np.float32)
    return Push(worker, 1, number, (Gradient(spec.key, values, ids, 0.1),))


@pytest.mark.long
@pytest.mark.parametrize(("mode", "policy"), [("sync", "lru"), ("async", "lfu")])
def test_evictions_for_want_of_memory_are_in_the_log(
    tmp_path: Path, mode: Mode, policy: str
) -> None:
    """A table that may lets its first rows go; a server with more memory replays just that."""
    spec = spec_of(16, CapacityEntry(policy=policy) & EvictionStreamEntry(keep=1000))
    memory = 20 * MIB

    def kept(limit: int) -> tuple[ServerLog, Shard]:
        log, shard = ServerLog(tmp_path / "log", LogHeader(job="j")), Shard()
        shard.tables.budget.limit = limit
        Journal(log, shard, None).start()
        return log, shard

    log, shard = kept(memory)
    shard.handle(Join(0, 1, find_mode(mode)), "join")
    shard.create(spec, np.zeros(0, np.float32))
    table = shard.tables[spec.key]
    assert isinstance(table, SparseTable)
    for number in range(1, 60):
        [reply] = shard.handle(a_push(spec, number), "push")
        assert isinstance(reply, SendOutcome)
        if mode == "sync":
            shard.handle(Pull(0, 1, (), number), "pull")
        assert shard.tables.budget.available_for() >= 0
        assert set(range(100)) <= set(table.ids().tolist())  # in use, so they never go
    assert len(table) < 59 * 2900 // 2
    assert (table.rows(np.arange(100)).touched == 59).all()
    before = [array.tobytes() for array in table.state(0, len(table))]
    assert table.evictions is not None
    gone = table.evictions.columns()
    assert set(gone["evicted_causes"].tolist()) == {EvictionCause.MEMORY}
    assert gone["evicted_next"] > len(gone["evicted"]) == 1000
    log.close()
    log, again = kept(10 * memory)
    actual = again.tables[spec.key]
    assert isinstance(actual, SparseTable)
    assert [array.tobytes() for array in actual.state(0, len(actual))] == before
    assert actual.evictions is not None
    np.testing.assert_equal(actual.evictions.columns(), gone)
    log.close()


def test_ids_of_a_push_do_not_go_for_it() -> None:
    """Rows that a push names stay, be they the ones longest out of use."""
    spec, old = spec_of(16, CapacityEntry(policy="lru")), np.arange(100)
    table, first = SparseTable(spec, budget=MemoryBudget(limit=20 * MIB)), 100
    push(table, old)
    while not len(gone := table.surplus([old, new := np.arange(first, first + BATCH)])):
        push(table, new)
        first += BATCH
    assert not np.isin(gone, old).any()


def test_a_refused_push_lets_no_rows_go() -> None:
    """Rows of one table stay if another table, or this one with all others gone, has no room for the push."""
    spills, fills = spec_of(16, CapacityEntry(), "spills"), spec_of(16, None, "fills")
    shard = Shard()
    shard.tables.budget.limit = 24 * MIB
    shard.handle(Join(0, 1, find_mode("async")), "join")
    for spec in (spills, fills):
        shard.create(spec, np.zeros(0, np.float32))
    values = np.ones((100_000, 16), np.float32)

    def gradient(spec: TableSpec, start: int, count: int) -> Gradient:
        return Gradient(spec.key, values[:count], np.arange(start, start + count), 0.1)

    def reply(number: int, *gradients: Gradient) -> Any:
        return shard.handle(Push(0, 1, number, gradients), "push")[0]

    number = 0
    while number < 30:  # until rows go
        number += 1
        assert isinstance(reply(number, gradient(spills, number * 4000, 4000)), SendOutcome)
    before = len(shard.tables[spills.key])  # type: ignore[arg-type]
    assert before < 30 * 4000
    both = reply(31, gradient(spills, 0, 4000), gradient(fills, 0, 50_000))
    assert "'fills' was asked to add 50000 rows" in str(both.error)
    alone = reply(31, gradient(spills, 10**6, 100_000))
    assert "'spills' was asked to add 100000 rows" in str(alone.error)
    assert len(shard.tables[spills.key]) == before  # type: ignore[arg-type]
    assert isinstance(reply(31, gradient(spills, 0, 4000)), SendOutcome)


def grown(spec: TableSpec, start: int, count: int) -> Gradient:
    """A gradient of 1 for `count` ids."""
    return Gradient(
        spec.key, np.ones((count, spec.dim), np.float32), np.arange(start, start + count), 0.1
    )


def filled(mode: Mode, *specs: TableSpec, workers: int = 1) -> tuple[Shard, list[Record]]:
    """A shard with 24 MiB for these tables, which all workers have joined, and what its log gets."""
    shard, records = Shard(workers=workers), list[Record]()
    shard.tables.budget.limit = 24 * MIB
    for worker in range(workers):
        shard.handle(Join(worker, 1, find_mode(mode)), "join")
    for spec in specs:
        shard.create(spec, np.zeros(0, np.float32))
    shard.journal = records.append
    return shard, records


def state_of(shard: Shard) -> object:
    """What a refused push must leave as it was."""
    tables = {key: (len(table), table.step) for key, table in shard.tables.sparse()}
    sequences, held = dict(shard.workers.sequences), dict(shard.rounds.held)
    return tables, sequences, held, shard.tables.budget.held, shard.tables.budget.available_for()


@pytest.mark.parametrize("fits", [False, True])
def test_tables_have_room_for_a_push_together(fits: bool) -> None:
    """A push is refused whole if each of its tables has room for it, but not both."""
    one, other = spec_of(16, name="one"), spec_of(16, name="other")
    shard, records = filled("async", one, other)
    before, count = state_of(shard), 50_000 if fits else 60_000
    [reply] = shard.handle(Push(0, 1, 1, (grown(one, 0, count), grown(other, 0, count))), "push")
    assert isinstance(reply, SendOutcome) == fits == (state_of(shard) != before)
    assert len(records) == fits
    if isinstance(reply, SendError):
        assert "'other' was asked to add 60000 rows" in str(reply.error)
        [again] = shard.handle(Push(0, 1, 1, (grown(one, 0, 60_000),)), "push")
        assert isinstance(again, SendOutcome)


def test_tables_have_room_for_a_write_together() -> None:
    """A write is refused whole if each of its tables has room for it, but not both."""
    specs = [spec_of(16, name=name) for name in ("one", "other")]
    shard, records = filled("async", *specs)
    before, ids = state_of(shard), np.arange(60_000)
    parts = [PartState(spec.key, 3, np.zeros((60_000, 48), np.float32), ids) for spec in specs]
    [reply] = shard.handle(WriteState(tuple(parts), 0, 1, 1), "write")
    assert isinstance(reply, SendError)
    assert "'other' was asked to add 60000 rows" in str(reply.error)
    assert state_of(shard) == before
    assert not records
    assert shard.handle(WriteState((parts[0],), 0, 1, 1), "write") == [SendOutcome("write")]


def test_a_round_has_room_in_all_its_tables() -> None:
    """A push is refused if the round could not close with it, as another worker's push needs the memory for
    another table. The round then closes whole, with a smaller push."""
    one, other = spec_of(16, name="one"), spec_of(16, name="other")
    shard, records = filled("sync", one, other, workers=2)
    shard.handle(Push(0, 1, 1, (grown(one, 0, 30_000),)), "push")
    before = state_of(shard)
    [refusal] = shard.handle(Push(1, 1, 1, (grown(other, 0, 60_000),)), "push")
    assert isinstance(refusal, SendError)
    assert "'other' was asked to add 60000 rows" in str(refusal.error)
    assert state_of(shard) == before
    assert len(records) == 1
    shard.handle(Push(1, 1, 1, (grown(other, 0, 10_000),)), "push")
    for worker in range(2):
        shard.handle(Pull(worker, 1, (), 1), f"pull {worker}")
    assert shard.rounds.closed == 1
    assert [len(table) for _, table in shard.tables.sparse()] == [30_000, 10_000]


def test_tables_that_evict_refuse_no_push() -> None:
    """Eight tables share too little memory for all their ids, and each push names all of them. Rows go, and
    no push is refused after some of the tables have changed."""
    specs = [spec_of(16, CapacityEntry(), f"t{number}") for number in range(8)]
    shard, _ = filled("async", *specs)
    dice = np.random.default_rng(0)
    for number in range(1, 120):
        gradients = []
        for spec in specs:
            ids = np.unique(dice.integers(0, 100_000, 512))[:256]
            gradients.append(Gradient(spec.key, np.ones((256, 16), np.float32), ids, 0.1))
        [reply] = shard.handle(Push(0, 1, number, tuple(gradients)), "push")
        assert isinstance(reply, SendOutcome), (number, reply)
    assert {table.step for _, table in shard.tables.sparse()} == {119}
    assert sum(len(table) for _, table in shard.tables.sparse()) < 119 * 8 * 200
    assert shard.tables.budget.available_for() > -MIB


def test_rows_stay_if_the_ids_that_wait_have_no_room() -> None:
    """Rows would go for new ones, but the push also names ids that wait for a row, and there is no memory
    for those: it is refused, and no row goes. With fewer ids the rows go."""
    counted = spec_of(16, CapacityEntry() & CountFilterEntry(2), name="counted")
    fills, number = spec_of(16, name="fills"), 0
    shard, records = filled("async", counted, fills)

    def reply(*gradients: Gradient) -> Any:
        return shard.handle(Push(0, 1, number, gradients), "push")[0]

    while shard.tables.budget.available_for() > 7 * MIB:
        number += 1
        assert isinstance(reply(grown(counted, number // 2 * 4000, 4000)), SendOutcome)
    for gradient in (grown(counted, 10**6, 16_000), grown(fills, 0, 14_000)):
        number += 1
        assert isinstance(reply(gradient), SendOutcome)
    number, before = number + 1, state_of(shard)
    records.clear()
    ids = np.append(np.arange(10**6, 10**6 + 16_000), np.arange(2 * 10**6, 2 * 10**6 + 20_000))
    both = Gradient(counted.key, np.ones((len(ids), 16), np.float32), ids, 0.1)
    assert "'counted' was asked to add 16000 rows" in str(reply(both).error)
    assert (state_of(shard), records) == (before, [])
    assert isinstance(reply(grown(counted, 10**6, 16_000)), SendOutcome)
    assert [type(record) for record in records] == [Evict, Push]


def peak(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.long)])
def test_a_server_stays_below_its_memory(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker fills two tables of a real server: from one rows go, the other refuses.

    At no time has the process more memory than it was allowed; what was refused changed nothing.
    """
    monkeypatch.setenv("PSFLEET_MEMORY", "420M")
    with LocalFleet(servers=1, workers=1) as fleet:
        runtime = fleet.connect(0, mode)
        try:
            fills = runtime.create(spec_of(WIDE, name="fills"))
            spills = runtime.create(spec_of(WIDE, CapacityEntry(), name="spills"))
            send_many(runtime, fills, range(5))
            send_many(runtime, spills, range(60))
            runtime.flush()
            assert rows(runtime, fills) == 5 * FEW
            assert 10 * FEW < rows(runtime, spills) < 60 * FEW
            # In sync mode the push that waits for its round may be what there is no room for.
            refusals = r"'fills' was asked to add 1024 rows|the pushes of round \d+ take"
            with pytest.raises(UsageError, match=refusals):
                send_many(runtime, fills, range(1000))
            assert rows(runtime, fills) % FEW == 0
            assert peak(fleet.processes[0].pid) <= 420 * MIB
        finally:
            runtime.close()


def fill_in_turn(runtime: Runtime, keys: list[int]) -> None:
    for number in range(10_000):
        send_many(runtime, keys[number % len(keys)], range(number, number + 1))


def send_many(runtime: Runtime, key: int, numbers: range) -> None:
    values = np.ones((FEW, WIDE), np.float32)
    for number in numbers:
        ids = np.arange(number * FEW, (number + 1) * FEW, dtype=np.int64)
        runtime.push([Gradient(key, values, ids, 0.1)]).wait()


def rows(runtime: Runtime, key: int) -> int:
    name = runtime.specs()[key].name
    return sum(int(t["count"]) for s in runtime.stats() for t in s["tables"] if t["name"] == name)


@pytest.mark.parametrize("count", [3000, 300_000])
def test_a_loaded_table_takes_what_a_grown_one_takes(count: int, tmp_path: Path) -> None:
    """Rows come from a snapshot ordered by hash, and the index is then as large as after pushes."""
    grown, loaded = EmbeddedRuntime(), EmbeddedRuntime()
    key = grown.create(spec_of(4))
    for first in range(0, count, BATCH):
        ids = np.arange(first, min(first + BATCH, count))
        grown.push([Gradient(key, np.ones((len(ids), 4), np.float32), ids, 0.1)])
    grown.save(str(tmp_path / "model"))
    loaded.load(str(tmp_path / "model"))
    taken = [runtime.stats()[0]["tables"][0]["bytes"] for runtime in (grown, loaded)]
    assert taken[1] <= taken[0] * 1.02 + (4 << 20)  # pages that are made in advance
    assert taken[1] <= count * (4 * 12 + 34) * 1.05 + (8 << 20)


def test_weights_that_are_only_read_take_little(tmp_path: Path) -> None:
    """A client of a snapshot takes at most 96 bytes for a row with 64 bytes of weights; closed, none."""
    runtime, count = EmbeddedRuntime(), 700_000
    key = runtime.create(spec_of(16))
    for first in range(0, count, BATCH):
        ids = np.arange(first, min(first + BATCH, count))
        runtime.push([Gradient(key, np.ones((len(ids), 16), np.float32), ids, 0.1)])
    runtime.save(str(tmp_path / "model"))
    frozen = FrozenRuntime(str(tmp_path / "model"))
    assert frozen.stats()[0]["tables"][0]["bytes"] <= 96 * count
    ids = np.random.default_rng(0).permutation(count)
    trained, weights = (one.pull([Read(key, ids)])[0] for one in (runtime, frozen))
    assert np.array_equal(trained, weights)
    frozen.close()
    with pytest.raises(UsageError, match="is closed, and its tables are gone"):
        frozen.pull([Read(key, ids)])


@pytest.mark.long
def test_what_a_server_has_saved_it_can_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers are filled until they refuse, and as many others with as much memory load what they saved."""
    mode, servers = "sync", 2
    monkeypatch.setenv("PSFLEET_MEMORY", "300M")
    with LocalFleet(servers, workers=1) as fleet:
        runtime = fleet.connect(0, mode)
        keys = [runtime.create(spec_of(WIDE, name=name)) for name in "ab"]
        with pytest.raises(UsageError, match="was asked to add"):
            fill_in_turn(runtime, keys)
        states = [rows(runtime, key) for key in keys]
        runtime.save(str(tmp_path / "model"))
        runtime.close()
    with LocalFleet(servers, workers=1, resume=str(tmp_path / "model")) as fleet:
        runtime = fleet.connect(0, mode)
        for name, count in zip("ab", states, strict=True):
            assert rows(runtime, runtime.open(name).key) == count
        runtime.load(str(tmp_path / "model"))
        runtime.close()


def test_amounts_of_memory() -> None:
    """Texts of an amount are read; nonsense and amounts that leave nothing are refused with the value."""
    expected = {
        "8G": 8 << 30,
        "1.5g": 3 << 29,
        "512M": 512 * MIB,
        "64 KiB": 64 << 10,
        "": 0,
        "7": 7,
    }
    for text in expected:
        said = {"PSFLEET_MEMORY": text}
        assert from_variable(JobSettings, "memory", said) == expected[text]
    for text in ("much", "8X", "G8", "inf"):
        with pytest.raises(ConfigError, match=f"PSFLEET_MEMORY is '{text}'; it must be a number"):
            from_variable(JobSettings, "memory", {"PSFLEET_MEMORY": text})
    assert table_limit(0) is None
    assert 0 < (table_limit(1 << 40) or 0) < 1 << 40
    with pytest.raises(ConfigError, match="allows this server 16 MiB"):
        table_limit(16 * MIB)


def test_the_launcher_tells_servers_their_memory(tmp_path: Path) -> None:
    """--server-memory and --server-disk reach servers and no worker; --device-memory reaches servers."""
    script = tmp_path / "train.py"
    script.touch()
    request = JobRequest(str(script), memory=2 << 30, device_memory=1 << 30, disk="/rows")
    job = Job(request, "j", "token", tmp_path, tmp_path)
    server, worker = (
        child_environment(job, Member(role, 0), Told(["unix:/a"]), {})
        for role in ("server", "worker")
    )
    assert (server["PSFLEET_MEMORY"], server["PSFLEET_DEVICE_MEMORY"]) == (
        "2147483648",
        "1073741824",
    )
    assert server["PSFLEET_DISK"] == "/rows"
    assert not {"PSFLEET_MEMORY", "PSFLEET_DISK"} & worker.keys()
