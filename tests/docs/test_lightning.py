"""The example of PyTorch Lightning, run as a person runs it."""

import re
import sys
from pathlib import Path

import pytest

from tests.docs.test_pages import ROOT
from tests.programs import IN_DOCS, ended


@IN_DOCS
def test_lightning_learns(tmp_path: Path) -> None:
    """Lightning runs the loop of each of two workers; 5,000 flights are enough for an AUC of 0.62."""
    for module in ("torch", "lightning"):
        pytest.importorskip(module, reason=f"{module} is not installed: pip install {module}")
    launch = [sys.executable, "-m", "psfleet_launch", "--servers", "2", "--workers", "2", "--sync"]
    script = str(ROOT / "examples" / "torch_lightning.py")
    process = ended(
        [*launch, "--log-dir", str(tmp_path), script, "--flights", "5000"], cwd=tmp_path
    )
    assert process.returncode == 0, process.stdout + process.stderr
    match = re.search(r"November and December +AUC ([\d.]+)", process.stdout)
    assert match, process.stdout
    assert float(match[1]) > 0.62
