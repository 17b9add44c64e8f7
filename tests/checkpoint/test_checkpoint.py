"""Checkpoints: whole or not at all. What they hold is compared in test_deltas.py, damage in tests/fuzz."""

import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from psfleet.checkpoint import load_shard, save_fleet
from psfleet.errors import CheckpointError, TableConflict
from psfleet.rules import SGD
from psfleet.shard.shard import Shard
from tests.checkpoint.test_deltas import SPECS, fleet, push


def trained(servers: int) -> list[Shard]:
    """Shards of a fleet after a push."""
    shards = fleet(servers)
    push(shards, 1)
    return shards


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
    shard.create(replace(SPECS[1], rule=SGD()), np.zeros(0, np.float32))
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
