"""`psfleet ckpt` and `psfleet log` on what is not there, not theirs, or no place to write to."""

from pathlib import Path

import pytest

from psfleet.checkpoint import MANIFEST
from psfleet_launch.commands.psfleet_cli import main
from psfleet_server.durability import inspect_log
from tests.fuzz.chains import LOG, TIP, a_log, some_snapshots
from tests.fuzz.files import of_folder

pytestmark = pytest.mark.long

NOWHERE = ["", "none", "/", ".", "no\0name", "x" * 300, f"{TIP}/{MANIFEST}", "folders/0"]
CKPT: list[list[str]] = [
    ["ls"],
    ["verify"],
    ["diff", TIP],
    ["reshard", "out", "--servers", "2"],
    ["export", "out"],
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The present one, with a chain of snapshots, a log, and a folder where a manifest should be."""
    monkeypatch.chdir(tmp_path)
    some_snapshots(tmp_path, 1)
    a_log(tmp_path / "logs", 1)
    (tmp_path / "folders" / "0" / MANIFEST).mkdir(parents=True)
    return tmp_path


def sentence(capsys: pytest.CaptureFixture[str], code: int, expected: int) -> str:
    """What was said, which must be one line and go with the exit code."""
    out, error = capsys.readouterr()
    assert code == expected, error
    assert out == ""
    assert error.startswith("psfleet: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("words", CKPT, ids=lambda words: words[0])
def test_snapshots_that_are_none(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """Exit code 2, a sentence, nothing written."""
    before = of_folder(folder)
    command, *rest = words
    for path in NOWHERE:
        if command != "ls" or path not in ("", ".", "/", "folders/0"):  # which may hold some
            output = sentence(capsys, main(["ckpt", command, path, *rest]), 2)
            assert "\\x00" in output or path[:50] in output
            assert of_folder(folder) == before
    assert not (folder / "out").exists()


@pytest.mark.parametrize("path", ["folders/0", "folders"])
def test_a_folder_in_place_of_a_manifest_is_listed(
    folder: Path, capsys: pytest.CaptureFixture[str], path: str
) -> None:
    """A snapshot whose manifest cannot be read is damaged: `ls` has a line for it and exit code 1."""
    assert main(["ckpt", "ls", path]) == 1
    out, error = capsys.readouterr()
    assert (out.count("\n"), error) == (1, "")
    assert out.startswith("folders/0  ")
    assert MANIFEST in out


@pytest.mark.parametrize("words", [["verify"], ["replay", "", "out"]], ids=lambda words: words[0])
def test_logs_that_are_none(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """Exit code 1, a sentence, nothing written."""
    before = of_folder(folder)
    command, *rest = words
    for path in NOWHERE:
        sentence(capsys, inspect_log.main([command, path, *rest]), 1)
        assert of_folder(folder) == before


@pytest.mark.parametrize("target", ["logs", f"{TIP}/{MANIFEST}/below", "x" * 300, "no\0name"])
def test_targets_that_cannot_be(
    folder: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    """A folder of something else, one below a file, and what is no name: nothing is written."""
    before = of_folder(folder)
    sentence(capsys, main(["ckpt", "reshard", TIP, target, "--servers", "2"]), 2)
    if target != "logs":  # files are put beside what is there
        sentence(capsys, main(["ckpt", "export", TIP, target]), 2)
    sentence(capsys, inspect_log.main(["replay", f"logs/{LOG}", "", target]), 1)
    assert of_folder(folder) == before
