"""fleet.evaluate: the metrics of one cut, while training goes on."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.programs import ended

pytest.importorskip("torch", reason="PyTorch is not installed: pip install psfleet[torch]")

SCRIPT = Path(__file__).parent / "scripts" / "evaluating.py"
JOB = ["-m", "psfleet_launch", "--no-progress", "--sync", "--servers", "2", "--workers", "2"]


def run(tmp_path: Path, what: str) -> dict[str, Any]:
    """What the script leaves, in a job or, to check, embedded."""
    out = tmp_path / f"{what}.npz"
    job = [] if what == "check" else [*JOB, "--log-dir", str(tmp_path / what)]
    process = ended([sys.executable, *job, str(SCRIPT), str(out), str(tmp_path), what])
    assert process.returncode == 0, process.stdout + process.stderr
    with np.load(out) as saved:
        return dict(saved)


def test_evaluation_in_a_job(tmp_path: Path, torch_zygote: None) -> None:
    """Programs, torch and clients, on 2 servers with 2 workers in sync mode: the metrics are those of the
    model's own forward pass with the snapshot of the cut, to the bit, and training ends with the same bits
    as without evaluating."""
    plain, evaluated, checked = (run(tmp_path, what) for what in ("train", "evaluate", "check"))
    tables = {name for name in plain if name.startswith("table")}
    assert {name.split()[1] for name in tables} >= {"program_rows.w_0", "torch_rows", "client_rows"}
    for name in tables:
        assert plain[name].tobytes() == evaluated[name].tobytes(), name
    scores = {name for name in evaluated if not name.startswith("table")}
    assert {
        f"{way} {m}" for way in ("program", "torch", "client") for m in ("auc", "log_loss")
    } <= scores
    for name in scores:
        assert evaluated[name] == checked[name], name
