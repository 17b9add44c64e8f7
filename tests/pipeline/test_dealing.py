"""fleet.dataset hands the same batches to all stages of a worker."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.launch.conftest import Launch, launch

__all__ = ["launch"]

SCRIPT = str(Path(__file__).parent / "scripts" / "dealing.py")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", ["ssp", "changing"])
def test_all_stages_have_the_same_batches(launch: Launch, tmp_path: Path, mode: str) -> None:
    """Two workers of two stages use every sample of two epochs once, each in one of them, in ssp mode
    without any lead, and where the mode changes from sync to async and back meanwhile; what a table counts
    of shows and clicks comes through the pieces of a pipeline."""
    options = ["--workers", "2", "--pipeline", "1f1b", "--stages", "2", "--micro-batches", "2"]
    if mode == "ssp":
        options += ["--mode", "ssp", "--staleness", "0"]
    job = launch("--no-progress", *options, SCRIPT, str(tmp_path), mode)
    code, _, err = job.ends(170)
    assert code == 0, err + job.log("*")
    seen = {
        (worker, stage): json.loads((tmp_path / f"{worker}.{stage}.json").read_text())
        for worker in range(2)
        for stage in range(2)
    }
    for worker in range(2):
        assert seen[worker, 0] == seen[worker, 1]
    used = Counter(sample for worker in range(2) for batch in seen[worker, 0] for sample in batch)
    assert used == Counter(dict.fromkeys(range(24), 2))
    scores = json.loads((tmp_path / "scores.json").read_text())
    # In sync mode a round counts the sums of its workers' pushes.
    assert scores == {str(sample): [12.0, 4.0] for sample in range(24)}
