"""One trainer script, by itself and in a job. (The same bits: tests/cluster/test_bits.py, tests/pipeline.)"""

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.programs import ended

SCRIPT = Path(__file__).parent / "scripts" / "trainer.py"
JOB = "-m psfleet_launch --no-progress --sync --tcp --servers 3 --workers 2"


def trained(folder: Path, *launcher: str) -> dict[str, NDArray[np.float32]]:
    """The weights that the script saves."""
    process = ended([sys.executable, *launcher, str(SCRIPT), str(folder / "out.npz")], cwd=folder)
    assert process.returncode == 0, process.stdout + process.stderr
    with np.load(folder / "out.npz") as arrays:
        return dict(arrays)


def test_two_workers_equal_one_with_the_doubled_batch(tmp_path: Path) -> None:
    """Sync mode averages: two workers with half of each batch take the steps of one with all of it."""
    one, two = trained(tmp_path), trained(tmp_path, *JOB.split())
    assert one.keys() == two.keys()
    for name, value in one.items():
        difference = np.linalg.norm(value - two[name])
        assert difference <= 1e-6 * np.linalg.norm(value), name
