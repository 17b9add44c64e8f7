"""What lies where a file of psfleet is expected may be anything: each is one sentence, and nothing hangs."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from psfleet.checkpoint import MANIFEST, load_shard, read_manifest
from psfleet.core.base.errors import CheckpointError, PsfleetError
from psfleet.core.engine.rules.adam import Adam
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.graph.execution.inference import load_inference
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet_launch.commands.psfleet_cli import main
from psfleet_server.durability.inspect_log import main as examine
from psfleet_server.durability.log import LogHeader, ServerLog

SHARD = "shard-0-of-1.safetensors"
Shape = Callable[[Path], object]


def hole(path: Path) -> None:
    """20 GB of nothing."""
    with path.open("wb") as file:
        file.truncate(20 << 30)


def loop(path: Path) -> None:
    """A link to itself."""
    path.symlink_to(path.name)


def said(text: str) -> Shape:
    """A file with this text."""
    return lambda path: path.write_text(text)


SHAPES: dict[str, Shape] = {
    "FIFO": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "hole": hole,
    "folder": Path.mkdir,
    "loop": loop,
    "empty": Path.touch,
    "deep": said("[" * 200_000 + "]" * 200_000),
    "deep object": said('{"a":' * 900 + "1" + "}" * 900),
    "huge number": said('{"format": ' + "9" * 5000 + "}"),
    "exponent": said('{"format": 2, "cut": 1e999999}'),
    "NaN": said('{"format": NaN}'),
    "text": said("a model"),
}

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint."""
    runtime = EmbeddedRuntime()
    runtime.create(TableSpec("t", "dense", (3,), Adam()), np.zeros(3, np.float32))
    runtime.save(str(tmp_path / "model"))
    return tmp_path / "model"


def put(path: Path, shape: str) -> None:
    """Have a thing of this shape at the path."""
    path.unlink(missing_ok=True)
    SHAPES[shape](path)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("file", [MANIFEST, SHARD])
def test_tools_say_what_is_wrong_with_a_snapshot(
    model: Path, shape: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """psfleet ckpt with anything in place of a file: exit code 1 or 2 and one line, of every command."""
    put(model / file, shape)
    path, other = str(model), str(model.parent / "other")
    commands = [
        ["ls", path],
        ["verify", path],
        ["diff", path, path],
        ["reshard", path, other, "--servers", "2"],
        ["export", path, other],
    ]
    for command in commands:
        assert main(["ckpt", *command]) in (1, 2), command
        out, err = capsys.readouterr()
        assert (out + err).count("\n") == 1, command
        assert str(model) in out + err
    assert [left.name for left in model.parent.iterdir()] == ["model"]
    with pytest.raises(CheckpointError):
        load_shard(path, Shard())


@pytest.mark.parametrize("shape", SHAPES)
def test_logs_and_inference_models_of_any_shape(
    tmp_path: Path, shape: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same for psfleet log, a server's own log, and both files of an inference model."""
    put(tmp_path / "server.0.log", shape)
    for command in (["verify"], ["replay"]):
        extra = ["", ""] if command == ["replay"] else []
        assert examine([*command, str(tmp_path / "server.0.log"), *extra]) == 1
        assert capsys.readouterr().err.count("\n") == 1
    if shape != "loop":  # which is no file: a server makes one in its place
        with pytest.raises(PsfleetError):
            ServerLog(tmp_path / "server.0.log", LogHeader(job="j"))
    put(tmp_path / "program.json", shape)
    with pytest.raises(CheckpointError, match=r"program\.json' (is damaged|cannot be read)"):
        load_inference(str(tmp_path))
    (tmp_path / "program.json").rename(tmp_path / "elsewhere")
    document = {"format": "inference model", "version": 1, "weights": "weights.1.safetensors"}
    document |= {key: [] for key in ("feeds", "targets", "leaves", "records")}
    (tmp_path / "program.json").write_text(json.dumps(document))
    put(tmp_path / "weights.1.safetensors", shape)
    with pytest.raises(CheckpointError, match=r"weights.*' (is damaged|cannot be read)"):
        load_inference(str(tmp_path))


def test_a_manifest_that_is_a_folder_away(model: Path) -> None:
    """A path with a NUL or of endless length is no name of a file, in a sentence."""
    for path in ("a\0b", "x" * 5000, str(model / MANIFEST)):
        with pytest.raises(CheckpointError):
            read_manifest(path)


def test_a_long_name_is_exported(tmp_path: Path) -> None:
    """Tables whose names are longer than those of files, or differ only there, in case or in what no file may
    be named, have files each."""
    runtime, names = EmbeddedRuntime(), ["x" * 512, "x" * 511 + "y", "X" * 512, "é" * 256]
    names += ["a/b", "a_b"]
    for name in names:
        runtime.create(TableSpec(name, "dense", (3,), Adam()), np.zeros(3, np.float32))
    runtime.save(str(tmp_path / "model"))
    assert main(["ckpt", "export", str(tmp_path / "model"), str(tmp_path / "out"), "--ids"]) == 0
    assert len(list((tmp_path / "out").iterdir())) == len(names)
