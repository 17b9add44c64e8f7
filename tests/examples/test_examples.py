"""The examples, run as a person runs them: embedded and on a cluster."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from flights_data import Flights
from flights_report import calibration

from tests.programs import IN_DOCS, ended

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LAUNCH = [sys.executable, "-m", "psfleet_launch", "--servers", "2", "--workers", "2"]
WAYS = {"embedded": [sys.executable], "async": [*LAUNCH, "--async"], "sync": [*LAUNCH, "--sync"]}
SERVED = [*LAUNCH[:3], "--servers", "1", "--workers", "1"]


def run(way: str, script: str, folder: Path, *arguments: str) -> str:
    """What the example prints."""
    logs = [] if way == "embedded" else ["--no-progress", "--log-dir", str(folder / "logs")]
    process = ended(
        [*{**WAYS, "served": SERVED}[way], *logs, str(EXAMPLES / script), *arguments],
        timeout=500,
        cwd=folder,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def flights_figures(way: str, folder: Path, *arguments: str) -> tuple[float, float]:
    """AUC and log loss on the test months; plot and model are saved."""
    message = run(way, "flights.py", folder, *arguments, "--out", str(folder))
    match = re.search(r"psfleet, November and December +([\d.]+) +([\d.]+)", message)
    assert match, message
    assert (folder / "model").is_dir()
    assert (folder / "flights.png").read_bytes().startswith(b"\x89PNG")
    return float(match[1]), float(match[2])


@pytest.mark.long
def test_flights_learns_from_a_part(tmp_path: Path, flights: Flights) -> None:
    """40,000 flights are enough for an AUC of 0.64 in one process."""
    auc, log_loss = flights_figures("embedded", tmp_path, "--flights", "40000")
    assert auc > 0.64
    assert log_loss < 0.56


@IN_DOCS
def test_flights_reaches_what_was_asked(tmp_path: Path, flights: Flights) -> None:
    """Two servers and two workers in sync mode: AUC at least 0.698 and log loss at most 0.517."""
    auc, log_loss = flights_figures("sync", tmp_path)
    assert auc >= 0.698
    assert log_loss <= 0.517


@pytest.mark.parametrize("way", ["embedded", "async"])
def test_numpy_client_learns(way: str, tmp_path: Path) -> None:
    """Four lines of progress; the loss falls from the first to the last, far below 0.69."""
    output = run(way, "numpy_client.py", tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 4
    assert losses[-1] < min(losses[0], 0.3)


def test_numpy_client_is_short() -> None:
    """Under 40 lines, as promised."""
    assert len((EXAMPLES / "numpy_client.py").read_text().splitlines()) < 40


def test_flights_says_no_to_a_month_it_must_not_train_on(tmp_path: Path) -> None:
    """November cannot be trained on by mistake."""
    process = ended(
        [sys.executable, str(EXAMPLES / "flights.py"), "--train-to", "11"], cwd=tmp_path
    )
    assert process.returncode == 2
    assert "invalid choice: 11" in process.stderr


def test_calibration_of_true_probabilities() -> None:
    """Predictions that are the true probabilities lie on the diagonal."""
    rng = np.random.default_rng(0)
    truth = rng.random(200_000).astype(np.float32)
    late = (rng.random(200_000) < truth).astype(np.float32)
    said, happened = calibration(late, truth)
    assert len(said) == 20
    assert (np.diff(said) > 0).all()
    np.testing.assert_allclose(said, happened, atol=0.02)


@pytest.mark.long
@pytest.mark.timeout(600)  # a job and four services, whose kernels may have to be compiled
def test_flights_are_served(tmp_path: Path, flights: Flights) -> None:
    """A service that follows the servers predicts in the end what the trained model does; the model and its
    export in int8 predict over HTTP, with AUCs that are within .0005."""
    pytest.importorskip("httptools", reason="httptools is not installed")
    output = run("served", "serve_flights.py", tmp_path, "--flights", "4000")
    two, one = (float(auc) for auc in re.findall(r"version \d: AUC ([\d.]+)", output))
    assert one > 0.5
    assert abs(one - two) <= 0.0005
    assert re.findall(r"live: AUC ([\d.]+) in the end", output) == re.findall(
        r"version 1: AUC (.+)", output
    )
    assert "late 1: 100 % of requests" in output
