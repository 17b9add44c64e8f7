"""A checkpoint is whole or not there: when it replaces another, through links, and after every crash."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import psfleet.checkpoint.writing
from psfleet.checkpoint import load_shard, save_fleet
from psfleet.core.base.errors import CheckpointError, TableConflict
from psfleet.core.base.files import exchange
from psfleet.core.base.json_documents import Format
from psfleet.core.engine.rules import SGD
from psfleet.core.engine.runtime_interface import Read
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from tests.checkpoint.test_deltas import SPECS, fleet, push

TABLE = TableSpec("t", "dense", (3,), SGD())
SAVER = """
import sys
import numpy as np
import psfleet.checkpoint.writing
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.engine.rules import SGD
from psfleet.core.engine.schema.table import TableSpec

path, value, exchanges = sys.argv[1:]
if exchanges == "False":
    psfleet.checkpoint.writing.exchange = lambda one, other: False
runtime = EmbeddedRuntime()
runtime.create(TableSpec("t", "dense", (3,), SGD()), np.full(3, float(value), np.float32))
runtime.save(path)
"""


@contextlib.contextmanager
def saving(
    path: Path, value: float, crash: str = "", exchanges: bool = True
) -> Iterator["subprocess.Popen[bytes]"]:
    """A process of its own that writes a table full of this value."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "saver.py")
        script.write_text(SAVER)
        places = os.pathsep.join(entry for entry in sys.path if entry)
        with subprocess.Popen(
            [sys.executable, script, path, str(value), str(exchanges)],
            env={**os.environ, "PYTHONPATH": places, "PSFLEET_CRASH": crash},
        ) as process:
            try:
                yield process
            finally:
                process.kill()


def save(path: Path, value: float, crash: str = "", exchanges: bool = True) -> int:
    """Its exit code."""
    with saving(path, value, crash, exchanges) as process:
        return process.wait(150)


def save_here(path: Path, value: float) -> None:
    """The same in this process."""
    runtime = EmbeddedRuntime()
    runtime.create(TABLE, np.full(3, value, np.float32))
    runtime.save(str(path))


def loaded(path: Path) -> float:
    """The value of the checkpoint."""
    runtime = EmbeddedRuntime()
    runtime.load(str(path))
    values = set(runtime.pull([Read(TABLE.key)])[0].tolist())
    assert len(values) == 1
    return float(values.pop())


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("point", ["began", "unnamed", "away", "named"])
def test_a_killed_save_leaves_a_whole_model(tmp_path: Path, point: str, exchanges: bool) -> None:
    """Killed at any step, a load gives the old or the new model; the next save leaves nothing else there."""
    path = tmp_path / "model"
    save_here(path, 1.0)
    reached = exchanges is False or point != "away"
    code = save(path, 2.0, f"{point}:1", exchanges)
    assert code == (-signal.SIGKILL if reached else 0)
    assert loaded(path) == (1.0 if point != "named" and reached else 2.0)
    save_here(path, 3.0)
    assert loaded(path) == 3.0
    assert [left.name for left in tmp_path.iterdir()] == ["model"]


def test_a_load_between_two_renames(tmp_path: Path) -> None:
    """Where folders cannot be exchanged, a load meanwhile puts the old model back, and the save goes on."""
    path = tmp_path / "model"
    save_here(path, 1.0)
    with saving(path, 2.0, "away:1:stop", exchanges=False) as process:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert loaded(path) == 1.0
        process.send_signal(signal.SIGCONT)
        assert process.wait(150) == 0
    assert loaded(path) == 2.0
    assert [left.name for left in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("point", ["began", "unnamed", "named"])
def test_a_killed_first_save(tmp_path: Path, point: str) -> None:
    """Where nothing was before, there is nothing or the whole model."""
    assert save(tmp_path / "model", 2.0, f"{point}:1") == -signal.SIGKILL
    if point == "named":
        assert loaded(tmp_path / "model") == 2.0
    else:
        with pytest.raises(CheckpointError, match="not a complete checkpoint"):
            loaded(tmp_path / "model")
    save_here(tmp_path / "model", 3.0)
    assert [left.name for left in tmp_path.iterdir()] == ["model"]


def test_what_an_earlier_version_moved_away_is_put_back(tmp_path: Path) -> None:
    """A load finds the model that a process moved away and did not live to replace."""
    save_here(tmp_path / "model", 1.0)
    (tmp_path / "model").rename(tmp_path / ".model.4711.old")
    assert loaded(tmp_path / "model") == 1.0


def test_a_save_through_a_link_keeps_the_link(tmp_path: Path) -> None:
    """The folder that a symbolic link leads to is replaced, also where that is not there yet."""
    link, real = tmp_path / "latest", tmp_path / "elsewhere" / "model"
    link.symlink_to(real)
    for value in (1.0, 2.0):
        save_here(link, value)
        assert link.is_symlink()
        assert loaded(real) == loaded(link) == value
    assert [path.name for path in real.parent.iterdir()] == ["model"]
    link.unlink()
    link.symlink_to("latest")
    with pytest.raises(CheckpointError, match="Too many levels of symbolic links"):
        save_here(link, 3.0)


def test_a_delta_beside_a_link_finds_its_base(tmp_path: Path) -> None:
    """A delta that is saved through a link names its base from where it really lies."""
    (tmp_path / "far" / "away").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "far" / "away")
    runtime = EmbeddedRuntime()
    runtime.create(TABLE, np.ones(3, np.float32))
    runtime.save(str(tmp_path / "base"), base=True)
    runtime.save(str(tmp_path / "link" / "delta"), delta=True)
    assert loaded(tmp_path / "link" / "delta") == loaded(tmp_path / "far/away/delta") == 1.0


def test_a_save_under_way_is_not_cleared(tmp_path: Path) -> None:
    """Two that save to one place at once do not remove each other's files."""
    with psfleet.checkpoint.writing.SnapshotDraft(tmp_path / "model") as draft:
        save_here(tmp_path / "model", 1.0)
        assert Path(draft.folder).is_dir()
    assert [left.name for left in tmp_path.iterdir()] == ["model"]


def test_an_exchange_is_one_step(tmp_path: Path) -> None:
    """Two folders change places; one that is not there is an error."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("NOT TESTED: this file system has no exchange")
    assert (tmp_path / "a" / "b").exists()
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "a", tmp_path / "c")


def test_a_small_file_that_cannot_be_written_leaves_no_draft(tmp_path: Path) -> None:
    """A write that the system refuses keeps the old file, and leaves no temporary file behind."""
    where = tmp_path / "servers.json"
    Format("a test").write(where, said="old")
    before = where.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            Format("a test").write(where, said="x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [file.name for file in tmp_path.iterdir()] == ["servers.json"]
    assert where.read_bytes() == before


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
    with pytest.raises(CheckpointError, match="nowhere' does not exist, so it holds no manifest"):
        load_shard(str(tmp_path / "nowhere"), Shard())
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"empty' holds no manifest\.json; it is not"):
        load_shard(str(tmp_path / "empty"), Shard())
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
