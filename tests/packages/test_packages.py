"""The wheel and the sdist install into a fresh environment, which then runs a script from anywhere.

`make test-packages` runs this; it needs a package index and some minutes.
"""

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest

from tests.programs import ended

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import numpy as np
import psfleet

with psfleet.connect(mode="sync") as ps:
    rows = ps.sparse_table("rows", dim=4, optimizer=psfleet.optimizer.SGD(0.5))
    rows.push([1, 2, 3], np.ones((3, 4))).wait()
    print(rows.pull([1]).shape)
"""
pytestmark = [
    pytest.mark.skipif(
        os.environ.get("PSFLEET_TEST_PACKAGES") != "1",
        reason="fresh environments take minutes; make test-packages",
    ),
    pytest.mark.timeout(1200),
]


def run(folder: Path, *words: str | Path) -> str:
    """What a command prints that must succeed."""
    kept = {name: output for name, output in os.environ.items() if not name.startswith("PYTHON")}
    process = ended(words, timeout=600, cwd=folder, env=kept)
    if "No matching distribution" in process.stderr or "NewConnectionError" in process.stderr:
        pytest.skip(f"no package index answers: {process.stderr[-300:]}")
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_a_package_runs_a_script_of_ones_own(tmp_path: Path, kind: str) -> None:
    """Two servers and two workers train, from a folder without any of psfleet's sources."""
    run(tmp_path, sys.executable, "-m", "venv", tmp_path / "builder")
    builder = tmp_path / "builder" / "bin" / "python"
    run(tmp_path, builder, "-m", "pip", "install", "--quiet", "build")
    run(tmp_path, "git", "-C", ROOT, "archive", "--output", tmp_path / "source.tar", "HEAD")
    (tmp_path / "source").mkdir()
    run(tmp_path, "tar", "-xf", "source.tar", "-C", "source")
    run(tmp_path, builder, "-m", "build", f"--{kind}", "--outdir", tmp_path / "made", "source")
    [made] = (tmp_path / "made").iterdir()

    run(tmp_path, sys.executable, "-m", "venv", tmp_path / "fresh")
    programs, folder = tmp_path / "fresh" / "bin", tmp_path / "elsewhere"
    run(tmp_path, programs / "python", "-m", "pip", "install", "--quiet", made)
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    output = run(folder, programs / "psfleet", "--version")
    assert output == f"psfleet, version {importlib.metadata.version('psfleet')}\n"
    launch = ("--servers", "2", "--workers", "2", "--job", "j", "train.py")
    assert run(folder, programs / "psfleet-launch", *launch) == "(1, 4)\n"
    words = ("--render", "kubernetes", "files", "--image", "i", "--agents", "2", "--job", "j")
    assert "files/launcher.json" in run(folder, programs / "psfleet-launch", *words, "train.py")
    report = run(folder, programs / "psfleet", "report", "j").strip()
    assert "Ended with exit code 0" in (folder / report).read_text()
