"""Snapshots whose checksums are right and whose content cannot be: `psfleet ckpt verify` refuses each."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psfleet.checkpoint import MANIFEST
from psfleet_launch.commands.psfleet_cli import main
from tests.checkpoint.goldens import VERSION, VERSION_2
from tests.checkpoint.test_goldens import at, change_document, seal

Path_ = tuple[str | int, ...]
FIRST, SECOND = "shard-0-of-2.safetensors", "shard-1-of-2.safetensors"
ODD = (-5, 2**80, float("nan"), True, "1")
# Numbers that may be negative, and are no counts.
REALS = ("decay", "hyperparameters", "initializer", "values")
THEIRS = ("states", "generators")  # of schedulers and random generators, which know them alone


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A whole snapshot of two servers."""
    return shutil.copytree(VERSION / "base", tmp_path / "m")


def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The sentence with which it is refused."""
    code = main(["ckpt", "verify", str(folder)])
    captured = capsys.readouterr()
    assert code == 2, captured.out
    assert captured.err.count("\n") == 1, captured.err
    assert str(folder) in captured.err
    return captured.err


def numbers(document: Any, way: Path_ = ()) -> Iterator[Path_]:
    """Where a document has numbers, without those that are not psfleet's and those that `seal` sets."""
    if isinstance(document, dict | list):
        items = document.items() if isinstance(document, dict) else enumerate(document)
        for key, part in items:
            yield from () if key in THEIRS else numbers(part, (*way, key))
    elif (
        isinstance(document, int | float) and not isinstance(document, bool) and way[-1] != "bytes"
    ):
        yield way


@pytest.mark.parametrize("golden", [VERSION / "base", VERSION_2 / "base"], ids=["v1", "v2"])
def test_every_number_of_a_manifest_is_checked(
    golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rounds, steps, pushes, ranges, places, shapes and settings: none may be negative, beyond 64 bits or of
    another type, unless it is a real number that may."""
    folder = shutil.copytree(golden, tmp_path / "m")
    good = (folder / MANIFEST).read_text()
    ways = [*numbers(json.loads(good))]
    assert len(ways) > 60
    for way in ways:
        for odd in ODD:
            if any(key in REALS for key in way) and odd in (-5, 2**80):
                continue
            document = json.loads(good)
            at(document, way[:-1])[way[-1]] = odd
            seal(folder, document)
            refused(folder, capsys)


def set_(*way: str | int) -> Callable[[Any], Callable[[dict[str, Any]], None]]:
    """A change of a manifest: this part of it gets a value."""

    def to(value: Any) -> Callable[[dict[str, Any]], None]:
        return lambda document: at(document, way[:-1]).__setitem__(way[-1], value)

    return to


def repeat_first(part: str) -> Callable[[dict[str, Any]], None]:
    """A change of a manifest: a part has its first entry twice."""
    return lambda document: document[part].append(document[part][0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_("cut", "round")(-5), "-5 as a number of its cut"),
        (set_("files", 0, "steps", "plain")(2**80), "as the number of updates of table 'plain'"),
        (set_("files", 0, "steps", "plain")(3), "the clocks"),
        (set_("files", 0, "steps")({"plain": 4}), "the clocks"),
        (set_("files", 0, "ranges")({"dense": [0, 15], "plain": [0, 3]}), "the clocks"),
        (set_("files", 1, "ranges")({"dense": [3, 3]}), ""),
        (set_("cut", "mode")("nonsense"), "nonsense"),
        (set_("cut", "pushes")({"-1": [1, 1]}), "'-1' as a seat"),
        (set_("cut", "pushes")({"\u0661": [1, 1]}), "as a seat"),
        (repeat_first("tables"), "two entries of one table"),
        (repeat_first("files"), "two entries of one file"),
        (lambda document: document["files"].clear(), "no files"),
    ],
)
def test_parts_that_contradict_each_other(
    change: Callable[[dict[str, Any]], None],
    words: str,
    snapshot: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Wrong counts, unknown modes, one table or file twice."""
    document = json.loads((snapshot / MANIFEST).read_text())
    change(document)
    seal(snapshot, document)
    if words:
        assert words in refused(snapshot, capsys)
    else:  # an empty part may begin anywhere
        assert main(["ckpt", "verify", str(snapshot)]) == 0


def test_parts_of_a_dense_table_do_not_overlap(
    snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two parts that are as long as the table together, and leave some of it out."""
    document = json.loads((snapshot / MANIFEST).read_text())
    shutil.copy(snapshot / FIRST, snapshot / SECOND)
    document["files"][1] |= {"ranges": document["files"][0]["ranges"]}
    [spec] = [table for table in document["tables"] if table["name"] == "dense"]
    spec["shape"] = [10, 3]
    seal(snapshot, document)
    assert "has the parts [(0, 15), (0, 15)] of 30 values" in refused(snapshot, capsys)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step", -1),
        ("step", 2**80),
        ("shrinks", [3, 1]),
        ("shrinks", [True]),
        ("ticks", [[5, 2], [1, 3]]),
    ],
)
def test_clocks_go_up(
    field: str, value: Any, snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clock of a table in a server's file."""
    change_document(snapshot / FIRST, ("clocks", "plain"), field, value)
    document = json.loads((snapshot / MANIFEST).read_text())
    if field == "step":
        document["files"][0]["steps"]["plain"] = 4
    seal(snapshot, document)
    refused(snapshot, capsys)


def column(path: Path, name: str) -> "np.memmap[Any, np.dtype[np.int64]]":
    """A column of whole numbers in a server's file, to be changed there."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    start, end = json.loads(data[8 : 8 + length])[name]["data_offsets"]
    return np.memmap(path, np.int64, "r+", 8 + length + start, ((end - start) // 8,))


@pytest.mark.parametrize("name", ["plain/ids", "admitted/candidates"])
@pytest.mark.parametrize("source", [FIRST, SECOND])
def test_no_id_has_two_rows(
    name: str, source: str, snapshot: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither in one server's file nor in two of them."""
    ids = column(snapshot / SECOND, name)
    ids[0] = column(snapshot / source, name)[-1]
    repeated = int(ids[0])
    ids.flush()
    seal(snapshot, json.loads((snapshot / MANIFEST).read_text()))
    assert f"has two entries of the id {repeated}" in refused(snapshot, capsys)


def test_no_id_of_a_delta_is_there_and_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row that a delta has set is none of those that it says have gone."""
    shutil.copytree(VERSION / "base", tmp_path / "base")
    folder = shutil.copytree(VERSION / "delta", tmp_path / "delta")
    assert main(["ckpt", "verify", str(folder)]) == 0
    capsys.readouterr()
    removed = column(folder / SECOND, "plain/removed")
    removed[0] = column(folder / FIRST, "plain/ids")[0]
    removed.flush()
    seal(folder, json.loads((folder / MANIFEST).read_text()))
    assert "has two entries of the id" in refused(folder, capsys)
