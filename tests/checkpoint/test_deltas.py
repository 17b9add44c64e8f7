"""Snapshots that say the changes of others, and snapshots dealt to other numbers of servers."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from psfleet.checkpoint import (
    chain,
    compare,
    export,
    load_shard,
    read_manifest,
    reshard,
    save_fleet,
)
from psfleet.core.base.errors import CheckpointError
from psfleet.core.engine.consistency import find_mode
from psfleet.core.engine.kernels.id_routing import owned_by
from psfleet.core.engine.rules.adagrad import Adagrad
from psfleet.core.engine.rules.adam import Adam
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.entry import (
    CapacityEntry,
    CountFilterEntry,
    EvictionStreamEntry,
    ShowClickEntry,
)
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.events import Join, Push, Shrink
from psfleet.core.engine.shard.rescaled_rows import DealtShard, dealt
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.shard.shard_tables import DeltaBases
from psfleet.core.engine.shard.snapshot_cuts import PendingCut
from psfleet.core.engine.shard.table_placement import dense_range
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.core.engine.tables.sparse import SparseTable
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime

pytestmark = pytest.mark.quick

SPECS = (
    TableSpec("dense", "dense", (9000, 2), Adam()),
    TableSpec("plain", "sparse", (5,), Adam(), seed=5),
    TableSpec("counted", "sparse", (5,), Adagrad(), seed=6, entry=CountFilterEntry(2)),
    TableSpec("scored", "sparse", (5,), Adam(), seed=7, entry=ShowClickEntry("s", "c")),
)


def fleet(servers: int) -> list[Shard]:
    """Shards with every kind of table, and a worker that has joined."""
    shards = [Shard(index, servers) for index in range(servers)]
    for shard in shards:
        shard.handle(Join(0, 1, find_mode("async")), "join")
        for spec in SPECS:
            low, high = dense_range(spec, shard.index, servers) if spec.kind == "dense" else (0, 0)
            shard.create(spec, np.ones(high - low, np.float32))
    return shards


def push(shards: list[Shard], number: int) -> None:
    """The number-th push, the same for any number of servers."""
    dice = np.random.default_rng(number)
    parts: list[tuple[TableSpec, Any, Any]] = []
    for spec in SPECS:
        if spec.kind == "dense":
            parts.append((spec, None, dice.standard_normal(spec.size, np.float32)))
            continue
        ids = np.unique(dice.integers(-60, 60, 40))
        parts.append(
            (spec, ids, np.abs(dice.standard_normal((len(ids), spec.push_width), np.float32)))
        )
    for shard in shards:
        gradients = []
        for spec, ids, values in parts:
            if ids is None:
                low, high = dense_range(spec, shard.index, shard.servers)
                gradients.append(Gradient(spec.key, values[low:high], None, 0.1))
            else:
                mine = owned_by(ids, shard.index, shard.servers)
                gradients.append(Gradient(spec.key, values[mine], ids[mine], 0.1))
        [reply] = shard.handle(Push(0, 1, number, tuple(gradients)), "push")
        assert not hasattr(reply, "error"), reply


def content(shards: list[Shard]) -> dict[str, object]:
    """Every bit that a fleet knows of its tables, whatever server it is on."""
    arrays: dict[str, object] = {}
    for spec in SPECS:
        if spec.kind == "dense":
            planes = [np.empty(spec.size, np.float32) for _ in spec.slot_names]
            for shard in shards:
                table = shard.tables[spec.key]
                assert isinstance(table, DenseTable)
                low, high = dense_range(spec, shard.index, shard.servers)
                for plane, values in zip(planes, table.state(), strict=True):
                    plane[low:high] = values
            arrays[spec.name] = [plane.tobytes() for plane in planes]
            continue
        rows: dict[int, object] = {}
        for shard in shards:
            table = shard.tables[spec.key]
            assert isinstance(table, SparseTable)
            read, waiting = table.rows(table.ids()), table.candidates()
            for i, *kept in zip(read.ids, read.values, read.touched, read.scores, strict=True):
                rows[int(i)] = [value.tobytes() for value in kept]
            candidates = (waiting.ids, *waiting.values.values(), waiting.touched)
            for i, *counts in zip(*candidates, strict=True):
                rows[int(i)] = counts
            arrays[f"{spec.name} clock"] = table.clock
        arrays[spec.name] = rows
    return arrays


def test_three_five_two(tmp_path: Path) -> None:
    """3 servers -> 5 -> 2: every bit of weights, state, ages, scores, counts and clocks is the same."""
    shards = fleet(3)
    for number in range(1, 6):
        push(shards, number)
    expected = content(shards)
    for step, servers in enumerate((5, 2)):
        save_fleet(str(tmp_path / str(step)), shards)
        shards = [Shard(index, servers) for index in range(servers)]
        for shard in shards:
            load_shard(tmp_path / str(step), shard)
        assert content(shards) == expected
    reshard(str(tmp_path / "1"), str(tmp_path / "again"), 4)
    assert len(read_manifest(tmp_path / "again").files) == 4
    assert all(d.is_equal for d in compare(str(tmp_path / "0"), str(tmp_path / "again")))


def trained() -> EmbeddedRuntime:
    """One process, a table."""
    runtime = EmbeddedRuntime()
    runtime.create(SPECS[1])
    runtime.create(SPECS[0], np.ones(SPECS[0].shape, np.float32))
    return runtime


def train(runtime: EmbeddedRuntime, seed: int) -> None:
    """A push to a few rows, and rows that go."""
    dice = np.random.default_rng(seed)
    ids = np.unique(dice.integers(0, 200, 30))
    values = dice.standard_normal((len(ids), 5), np.float32)
    runtime.push([Gradient(SPECS[1].key, values, ids, 0.1)])
    table = runtime._shard.tables[SPECS[1].key]
    assert isinstance(table, SparseTable)
    table.remove(dice.integers(0, 200, 15))


def test_deltas_build_on_each_other(tmp_path: Path) -> None:
    """Base, delta, delta: each loads as what was there then; removed rows stay removed."""
    runtime = trained()
    states = []
    for number in range(4):
        for i in range(6):
            train(runtime, 10 * number + i)
        runtime.save(str(tmp_path / str(number)), delta=number > 0, base=number == 0)
        states.append([runtime.read_table(spec.key) for spec in SPECS[1::-1]])
    sizes = [read_manifest(tmp_path / str(number)).files[0].bytes for number in range(4)]
    assert [folder.name for folder, _ in chain(tmp_path / "3")] == ["0", "1", "2", "3"]
    assert sizes[0] > 0
    for number in range(4):
        again = EmbeddedRuntime()
        again.load(str(tmp_path / str(number)))
        for spec, state in zip(SPECS[1::-1], states[number], strict=True):
            read = again.read_table(spec.key)
            assert read.step == state.step
            np.testing.assert_array_equal(
                np.array([] if read.ids is None else read.ids),
                np.array([] if state.ids is None else state.ids),
            )
            for ours, theirs in zip(read.values, state.values, strict=True):
                np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


def test_a_delta_after_a_shrink_has_all_scores(tmp_path: Path) -> None:
    """A shrink lowers the scores of all rows. A delta had those of the rows that were pushed since its base
    only, so the next shrink after a restart removed other rows."""
    shards = fleet(2)
    for number in range(1, 6):
        push(shards, number)
    save_fleet(str(tmp_path / "base"), shards, PendingCut(1, remember=True))
    push(shards, 6)
    for shard in shards:
        [reply] = shard.handle(Shrink(threshold=0.3), "shrink")
        assert reply.number > 0  # type: ignore[union-attr]  # an outcome
    delta = str(tmp_path / "delta")
    save_fleet(delta, shards, PendingCut(2, since=1), base=str(tmp_path / "base"))
    again = [Shard(index, 2) for index in range(2)]
    for shard in again:
        load_shard(delta, shard)
    assert content(again) == content(shards)


def test_a_move_around_a_shrink_has_all_scores() -> None:
    """Rows that were sent ahead of a shrink are sent again: another number of servers gets their scores."""
    shards, sent = fleet(1), DeltaBases()
    for number in range(1, 6):
        push(shards, number)
    moved = [DealtShard(shards[0], 2), DealtShard(Shard(1, 2), 2)]
    sent.advance(shards[0].tables, 1)
    for server, record in dealt(shards[0], {}, 2, ahead=True):
        moved[server].apply_record(record)
    shards[0].handle(Shrink(threshold=0.3), "shrink")
    for server, record in dealt(shards[0], sent.last(), 2):
        moved[server].apply_record(record)
    assert content([dealt_shard.shard for dealt_shard in moved]) == content(shards)


@pytest.mark.parametrize("keep", [300, 1 << 16])
def test_a_delta_holds_the_evictions_since_its_base(keep: int, tmp_path: Path) -> None:
    """Not the whole stream; joined again, all that the table remembers comes back, also after a load."""
    entry = CapacityEntry(rows=64) & EvictionStreamEntry(keep=keep)
    spec = TableSpec("rows", "sparse", (5,), Adam(), entry=entry)

    def evict(runtime: EmbeddedRuntime, rounds: int) -> None:
        for _ in range(rounds):
            ids = np.arange(64) + 64 * runtime.pushes
            runtime.push([Gradient(spec.key, np.ones((64, 5), np.float32), ids, 0.1)])

    def candidates(runtime: EmbeddedRuntime) -> list[Any]:
        [gone] = runtime.evictions(spec.key, [0], 1 << 20)
        return [gone.position, gone.missed, gone.ids.tolist(), gone.steps.tolist()]

    runtime = EmbeddedRuntime()
    runtime.create(spec)
    evict(runtime, 40)
    runtime.save(str(tmp_path / "0"), base=True)
    actual = [candidates(runtime)]
    for number in range(1, 5):
        if number == 3:
            runtime.load(str(tmp_path / "1"))
        evict(runtime, 2)
        runtime.save(str(tmp_path / str(number)), delta=True)
        actual.append(candidates(runtime))
    for number, gone in enumerate(actual):
        again = EmbeddedRuntime()
        again.load(str(tmp_path / str(number)))
        assert candidates(again) == gone
        if number:
            evicted = load_file(tmp_path / str(number) / "shard-0-of-1.safetensors")["rows/evicted"]
            assert len(evicted) == 128 or number == 3


def test_a_delta_needs_the_snapshot_before_it(tmp_path: Path) -> None:
    """Without a base there is no delta; a base that is gone or was replaced is a sentence."""
    runtime = trained()
    with pytest.raises(CheckpointError, match="save a base first"):
        runtime.save(str(tmp_path / "d"), delta=True)
    train(runtime, 1)
    runtime.save(str(tmp_path / "b"), base=True)
    train(runtime, 2)
    runtime.save(str(tmp_path / "d"), delta=True)
    load_shard(tmp_path / "d", Shard())
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(CheckpointError, match="manifest"):
        load_shard(tmp_path / "d", Shard())
    runtime.save(str(tmp_path / "b"))
    with pytest.raises(CheckpointError, match="replaced since"):
        load_shard(tmp_path / "d", Shard())


def test_exported_arrays_are_plain(tmp_path: Path) -> None:
    """One file per table, rows in order of id, ids as CSV."""
    runtime = trained()
    train(runtime, 1)
    runtime.save(str(tmp_path / "m"))
    files = export(str(tmp_path / "m"), str(tmp_path / "out"), "npz", True)
    assert sorted(file.name for file in files) == ["dense.npz", "plain.csv", "plain.npz"]
    state = runtime.read_table(SPECS[1].key)
    with np.load(tmp_path / "out" / "plain.npz") as arrays:
        np.testing.assert_array_equal(arrays["ids"], state.ids)
        np.testing.assert_array_equal(arrays["value"], state.values[0])
    listed = (tmp_path / "out" / "plain.csv").read_text().split()
    assert listed == ["id", *map(str, state.ids)]  # type: ignore[arg-type]  # sparse tables have ids


def test_a_delta_never_replaces_what_it_builds_on(tmp_path: Path) -> None:
    """Written to the folder of its base, or of that one's, it is refused; all stays loadable."""
    runtime = EmbeddedRuntime()
    runtime.create(SPECS[1])
    for number, (name, kind) in enumerate((("a", "base"), ("b", "delta"))):
        runtime.push([Gradient(SPECS[1].key, np.ones((3, 5), np.float32), np.arange(3) + number)])
        runtime.save(str(tmp_path / name), **{kind: True})
    for name in ("a", "b"):
        with pytest.raises(CheckpointError, match=rf"/{name}': it builds on the snapshot there"):
            runtime.save(str(tmp_path / name), delta=True)
    runtime.save(str(tmp_path / "c"), delta=True)
    assert [folder.name for folder, _ in chain(tmp_path / "c")] == ["a", "b", "c"]
    loaded = EmbeddedRuntime()
    loaded.load(str(tmp_path / "c"))
    state, expected = loaded.read_table(SPECS[1].key), runtime.read_table(SPECS[1].key)
    assert state.ids is not None
    assert expected.ids is not None
    assert set(state.ids.tolist()) == set(expected.ids.tolist()) == {0, 1, 2, 3}
