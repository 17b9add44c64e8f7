"""`psfleet plan`: what a strategy means for a script, without training."""

import re
from pathlib import Path

import pytest

from psfleet_launch.commands.psfleet_cli import main

SCRIPT = str(Path(__file__).parent / "scripts" / "trainer.py")


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the script import the tests' model; no role of this process may reach it."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))


def test_a_plan_says_what_a_strategy_means(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Memory of each stage, bytes, picture, bubble and recompute cuts; nothing is trained."""
    out = tmp_path / "out.npz"
    options = "--pipeline 1f1b --stages 3 --micro-batches 4 --recompute"
    code = main(["plan", *options.split(), SCRIPT, str(out), "cut", "4"])
    output = capsys.readouterr().out
    assert code == 0
    assert "1f1b · 3 stages of each worker · 4 micro-batches of 6 samples" in output
    assert re.search(r"stage 1 .* 0 B|stage 1 +4 +320 B", output)
    assert "stage 0  F0 F1 F2 .. .. .. .. B0 -- F3 B1 -- .. B2 -- .. B3 --" in output
    assert "33.3% if all pieces took equally long" in output
    assert "recompute in piece 0" in output
    assert not out.exists()


def test_what_has_no_plan_says_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A script that fails, one that does not train, pieces that stages cannot share."""
    failing, idle = tmp_path / "failing.py", tmp_path / "idle.py"
    failing.write_text("raise ValueError('no data')")
    idle.write_text("")
    for words, why in (
        ([str(failing)], "ValueError: no data"),
        ([str(idle)], "without a training step"),
        (["--stages", "2", SCRIPT, "out", "cut", "1"], "3 pieces, which 2 stages"),
        (["missing.py"], "'missing.py' does not exist"),
    ):
        assert main(["plan", *words]) == 2
        assert why in capsys.readouterr().err
