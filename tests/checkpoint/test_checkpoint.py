"""Checkpoints: whole or not at all, for any number of servers, never silently wrong."""

import resource
from pathlib import Path

import numpy as np
import pytest

from psfleet.checkpoint import load_shard, read_specs, save_fleet
from psfleet.consistency import find_mode
from psfleet.errors import CheckpointError, TableConflict
from psfleet.kernels.hashing import owned_by
from psfleet.rules.adam import Adam
from psfleet.rules.proximal import Ftrl
from psfleet.runtime.interface import Gradient
from psfleet.schema.table import TableSpec
from psfleet.shard.events import Join, Push
from psfleet.shard.server_group import dense_range
from psfleet.shard.shard import Shard
from psfleet.tables.dense import DenseTable
from psfleet.tables.sparse import SparseTable

DENSE = TableSpec("w", "dense", (9000, 2), Adam())
SPARSE = TableSpec("rows", "sparse", (5,), Ftrl(), seed=5)


def trained(servers: int) -> list[Shard]:
    """Shards of a fleet after two pushes; the same content for any number of servers."""
    rng = np.random.default_rng(3)
    shards = [Shard(index, servers) for index in range(servers)]
    value = rng.normal(size=DENSE.size).astype(np.float32)
    for shard in shards:
        low, high = dense_range(DENSE, shard.index, servers)
        shard.create(DENSE, value[low:high])
        shard.create(SPARSE, np.zeros(0, np.float32))
        shard.handle(Join(0, 1, find_mode("async")), "join")
    for sequence in (1, 2):
        dense = rng.normal(size=DENSE.size).astype(np.float32)
        ids = np.unique(rng.integers(-50, 50, 40))
        rows = rng.normal(size=(len(ids), 5)).astype(np.float32)
        for shard in shards:
            low, high = dense_range(DENSE, shard.index, servers)
            mine = owned_by(ids, shard.index, servers)
            shard.handle(
                Push(
                    0,
                    1,
                    sequence,
                    (
                        Gradient(DENSE.key, dense[low:high], None, 0.1),
                        Gradient(SPARSE.key, rows[mine], ids[mine], 0.1),
                    ),
                ),
                "push",
            )
    return shards


def content(shards: list[Shard]) -> tuple[list[bytes], dict[int, bytes], set[int]]:
    """Everything a fleet holds, put together: dense slots, rows by id, step counters."""
    slots: list[np.ndarray] = [np.empty(DENSE.size, np.float32) for _ in range(3)]
    rows: dict[int, bytes] = {}
    steps = set()
    for shard in shards:
        dense, sparse = shard.tables[DENSE.key], shard.tables[SPARSE.key]
        assert isinstance(dense, DenseTable)
        assert isinstance(sparse, SparseTable)
        low, high = dense_range(DENSE, shard.index, shard.servers)
        for slot, values in zip(slots, dense.state(), strict=True):
            slot[low:high] = values
        ids, values = sparse.state(0, len(sparse))
        rows.update({int(i): v.tobytes() for i, v in zip(ids, values, strict=True)})
        steps |= {dense.step, sparse.step}
    return [slot.tobytes() for slot in slots], rows, steps


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 3), (3, 2), (2, 5)])
def test_loads_on_any_number_of_servers(tmp_path: Path, before: int, after: int) -> None:
    """Weights, optimizer state and step counters are bit-equal after a change of server count."""
    shards = trained(before)
    save_fleet(str(tmp_path / "model"), shards)
    fresh = [Shard(index, after) for index in range(after)]
    for shard in fresh:
        load_shard(str(tmp_path / "model"), shard)
    assert content(fresh) == content(shards)
    assert sorted(spec.name for spec in read_specs(str(tmp_path / "model"))) == ["rows", "w"]


def test_saving_again_replaces_the_checkpoint(tmp_path: Path) -> None:
    """The second save takes the first one's place and leaves nothing beside it."""
    for servers in (2, 1):
        save_fleet(str(tmp_path / "model"), trained(servers))
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "manifest.json",
        "shard-0-of-1.safetensors",
    ]


def test_other_folder_is_not_overwritten(tmp_path: Path) -> None:
    """A folder that holds something else is refused and kept."""
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        save_fleet(str(tmp_path), trained(1))
    assert (tmp_path / "thesis.txt").exists()


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """A flip anywhere in a shard file is refused, and so is every truncation; nothing is changed."""
    save_fleet(str(tmp_path / "model"), trained(1))
    file = tmp_path / "model" / "shard-0-of-1.safetensors"
    good = file.read_bytes()
    damaged = [
        good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :]
        for at in range(0, len(good), len(good) // 50)
    ]
    damaged += [good[:length] for length in range(0, len(good), len(good) // 20)]
    for content_ in damaged:
        file.write_bytes(content_)
        shard = Shard()
        with pytest.raises(CheckpointError, match="damaged"):
            load_shard(str(tmp_path / "model"), shard)
        assert not shard.tables


def test_missing_parts_are_named(tmp_path: Path) -> None:
    """No folder, no manifest, no shard file: each is one sentence."""
    with pytest.raises(CheckpointError, match="manifest"):
        load_shard(str(tmp_path / "nowhere"), Shard())
    save_fleet(str(tmp_path / "model"), trained(1))
    (tmp_path / "model" / "shard-0-of-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match="missing"):
        load_shard(str(tmp_path / "model"), Shard())


def test_other_definition_is_a_conflict(tmp_path: Path) -> None:
    """A table that exists with another rule is not overwritten."""
    save_fleet(str(tmp_path / "model"), trained(1))
    shard = Shard()
    shard.create(TableSpec("rows", "sparse", (5,), Adam()), np.zeros(0, np.float32))
    with pytest.raises(TableConflict):
        load_shard(str(tmp_path / "model"), shard)


def test_a_disk_that_takes_no_more(tmp_path: Path) -> None:
    """Without a cluster too a checkpoint that cannot be written is one sentence, and nothing is left."""
    shards, (soft, hard) = trained(1), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot write to '.*model': File too large"):
            save_fleet(str(tmp_path / "model"), shards)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())
    save_fleet(str(tmp_path / "model"), shards)
