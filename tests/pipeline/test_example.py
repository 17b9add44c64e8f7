"""The example learns, alone and in a pipeline, and has a plan."""

import re
from pathlib import Path

import pytest

from psfleet_launch.commands.psfleet_cli import main
from tests.launch.conftest import Launch, launch

__all__ = ["launch"]

SCRIPT = str(Path(__file__).resolve().parents[2] / "examples" / "pipeline_mlp.py")


def test_the_example_learns_on_two_stages(launch: Launch) -> None:
    """50 steps on two stages bring the loss of 10 classes from 2.3 below 0.3."""
    options = "--pipeline zero-bubble --stages 2 --micro-batches 8"
    code, out, err = launch("--no-progress", *options.split(), SCRIPT, "--steps", "50").ends()
    assert code == 0, err
    matches = re.findall(r"step 50: loss ([\d.]+)", out)
    assert len(matches) == 1
    assert float(matches[0]) < 0.3


def test_the_example_has_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """On 4 stages the bubble of equal pieces is 3 / 11."""
    assert main(["plan", "--stages", "4", "--micro-batches", "8", SCRIPT]) == 0
    output = capsys.readouterr().out
    assert "8 micro-batches of 32 samples" in output
    assert "27.3% if all pieces took equally long" in output
