"""Every single-bit flip and every truncation of a small snapshot is noticed, whatever the file."""

from pathlib import Path

import numpy as np
import pytest

from psfleet.checkpoint import MANIFEST, load_shard, read_manifest, save_fleet, verify
from psfleet.errors import CheckpointError
from psfleet.rules.sgd import SGD
from psfleet.schema.table import TableSpec
from psfleet.shard.events import Join
from psfleet.shard.shard import Shard
from psfleet.tables.sparse import SparseTable

SPARSE = TableSpec("s", "sparse", (1,), SGD())


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One row, one worker."""
    shard = Shard()
    shard.handle(Join(0, 1, "async"), "join")
    shard.create(SPARSE, np.zeros(0, np.float32))
    table = shard.tables[SPARSE.key]
    assert isinstance(table, SparseTable)
    table.push(np.array([7]), np.ones((1, 1), np.float32), 0.1)
    path = tmp_path_factory.mktemp("damage") / "m"
    save_fleet(str(path), [shard])
    return path


def test_every_flip_in_the_manifest(snapshot: Path) -> None:
    """The manifest has a checksum of its own, and only one way to be written."""
    file = snapshot / MANIFEST
    whole = file.read_bytes()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"damaged|format"):
            read_manifest(snapshot)
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"damaged|format"):
            read_manifest(snapshot)
    file.write_bytes(whole)
    verify(snapshot)


def test_every_flip_in_a_file(snapshot: Path) -> None:
    """A file that is not as it was written changes nothing of the shard that would load it."""
    [name] = [file.file for file in read_manifest(snapshot).files]
    file = snapshot / name
    whole = file.read_bytes()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="damaged"):
            verify(snapshot)
    shard = Shard()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="damaged"):
            load_shard(snapshot, shard)
    file.write_bytes(whole)
    assert not shard.tables
    load_shard(snapshot, shard)
    assert shard.tables
