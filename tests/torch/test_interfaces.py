"""Programs, PyTorch and clients in one job: look-ups, updates and evaluations to the same bits."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.programs import ended

SCRIPTS = Path(__file__).parent / "scripts"
JOB = ["-m", "psfleet_launch", "--no-progress", "--sync", "--servers", "2", "--workers", "2"]

pytestmark = pytest.mark.usefixtures("torch_zygote")


def run(script: str, folder: Path, *words: str, in_job: bool) -> dict[str, Any]:
    """What a script leaves, in a job of two servers and two workers or embedded."""
    out = folder / f"{words[-1] if words else 'out'}.npz"
    job = [*JOB, "--log-dir", f"{out}.logs"] if in_job else []
    process = ended([sys.executable, *job, str(SCRIPTS / script), str(out), *words])
    assert process.returncode == 0, process.stdout + process.stderr
    with np.load(out) as saved:
        return dict(saved)


@pytest.mark.long
def test_evaluation_in_a_job(tmp_path: Path) -> None:
    """In sync mode the metrics are those of the model's own forward pass with the snapshot of the cut, to the
    bit, and training ends with the same bits as without evaluating."""
    plain, evaluated, checked = (
        run("evaluating.py", tmp_path, str(tmp_path), what, in_job=what != "check")
        for what in ("train", "evaluate", "check")
    )
    tables = {name for name in plain if name.startswith("table")}
    assert {name.split()[1] for name in tables} >= {"program_rows.w_0", "torch_rows", "client_rows"}
    for name in tables:
        assert plain[name].tobytes() == evaluated[name].tobytes(), name
    scores = {name for name in evaluated if not name.startswith("table")}
    ways = ("program", "torch", "client")
    assert {f"{way} {metric}" for way in ways for metric in ("auc", "log_loss")} <= scores
    for name in scores:
        assert evaluated[name] == checked[name], name


@pytest.mark.parametrize(
    "in_job", [pytest.param(False, marks=pytest.mark.long), True], ids=["embedded", "2x2"]
)
def test_every_interface_gives_the_same_bits(in_job: bool, tmp_path: Path) -> None:
    """Rows and state of all tables are the same after some steps of each interface, each one push.

    Embedded, and in sync mode with two workers, whose gradients name the same ids.
    """
    actual = run("feature_interfaces.py", tmp_path, in_job=in_job)
    assert len(actual) == 18
    for name in [name for name in actual if name.startswith("client")]:
        for way in ("program", "torch"):
            other = actual[name.replace("client", way)]
            assert other.tobytes() == actual[name].tobytes(), f"{name} by {way}"
    assert actual["client users"].tolist() == [4]
    assert len(actual["client users ids"]) == 9
