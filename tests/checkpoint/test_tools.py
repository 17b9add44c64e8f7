"""psfleet ckpt and psfleet log say what lies on the disk, in sentences."""

import json
from pathlib import Path

import numpy as np
import pytest

from psfleet.core.engine.rules.adam import Adam
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet_launch.commands.psfleet_cli import main
from psfleet_server.durability.journal import Journal
from psfleet_server.durability.log import LogHeader, ServerLog

TABLE = TableSpec("t", "sparse", (2,), Adam())
DENSE = TableSpec("d", "dense", (4,), Adam())


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base `a` and a delta `b` of it; the folder is the present one."""
    monkeypatch.chdir(tmp_path)
    runtime = EmbeddedRuntime()
    runtime.create(TABLE)
    runtime.create(DENSE, np.zeros(4, np.float32))
    for number in range(2):
        rows = Gradient(TABLE.key, np.ones((2, 2), np.float32), np.array([number, 7]), 0.1)
        runtime.push([rows])
        runtime.save("ab"[number], delta=number == 1, base=number == 0)
    return tmp_path


def test_list_verify_and_compare(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Kinds, places and bases are listed; equal is exit code 0, different 1."""
    assert main(["ckpt", "ls", "."]) == 0
    listed = capsys.readouterr().out
    assert "a  full  async, 1 pushes  1 server(s), 2 table(s)" in listed
    assert "b  delta  async, 2 pushes" in listed
    assert "changes since ../a" in listed
    assert main(["ckpt", "ls", "--json", "."]) == 0
    a, b = map(json.loads, capsys.readouterr().out.splitlines())
    assert (a["path"], a["kind"], a["mode"], a["base"]) == ("a", "full", "async", None)
    assert (b["pushes"], b["servers"], b["tables"], b["base"]) == (2, 1, 2, "../a")
    assert main(["ckpt", "verify", "b"]) == 0
    assert main(["ckpt", "diff", "a", "a"]) == 0
    capsys.readouterr()
    assert main(["ckpt", "diff", "a", "b"]) == 1
    out = capsys.readouterr().out
    assert "d: equal, 4 after 0 updates" in out
    assert "t: 1 differ (a weight by 0.1 at most), 0 gone, 1 new, 1 equal; updates 1 and 2" in out


def test_reshard_and_export(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A delta becomes whole by itself; tables become plain arrays."""
    assert main(["ckpt", "reshard", "b", "c", "--servers", "3"]) == 0
    assert "c  full" in capsys.readouterr().out
    assert main(["ckpt", "diff", "b", "c"]) == 0
    assert main(["ckpt", "export", "c", "out", "--format", "npz", "--ids"]) == 0
    assert (models / "out" / "t.csv").read_text().split() == ["id", "0", "1", "7"]


def test_what_is_wrong_is_a_sentence(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing there, damage, no log."""
    assert main(["ckpt", "ls", "a/none"]) == 2
    assert "no snapshot" in capsys.readouterr().err
    file = models / "a" / "shard-0-of-1.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert main(["ckpt", "verify", "b"]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert main(["ckpt", "ls", "--json", "a"]) == 1
    damaged = json.loads(capsys.readouterr().out)
    assert damaged["path"] == "a"
    assert "is damaged" in damaged["error"]
    assert main(["log", "verify", "server.0.log"]) == 1


def test_logs(models: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A log is counted, and taken again into a checkpoint."""
    header = LogHeader(server=1, servers=2, workers=1)
    log, shard = ServerLog(models / "server.1.log", header), Shard(1, 2, 1)
    Journal(log, shard, None).start()
    shard.create(TABLE, np.zeros(0, np.float32))
    log.close()
    assert main(["log", "verify", "server.1.log"]) == 0
    assert main(["log", "replay", "server.1.log", "--save", "again"]) == 0
    out = capfd.readouterr().out
    assert "2 records (1 ready, 1 create)" in out
    assert "server 1 of 2 after 2 records" in out
    assert "t: 0 rows, 0 updates" in out
