"""Programs, PyTorch and clients look features up, and update their rows, to the same bits."""

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.programs import ended

pytest.importorskip("torch", reason="PyTorch is not installed: pip install psfleet[torch]")

SCRIPT = Path(__file__).parent / "scripts" / "feature_interfaces.py"
JOB = ["-m", "psfleet_launch", "--no-progress", "--sync", "--servers", "2", "--workers", "2"]


@pytest.mark.parametrize("on_servers", [False, True], ids=["embedded", "2x2"])
def test_every_interface_gives_the_same_bits(
    on_servers: bool, tmp_path: Path, torch_zygote: None
) -> None:
    """Rows and state of all tables are the same after some steps of each interface, each one push.

    Embedded, and on two servers with two workers in sync mode, whose gradients name the same ids.
    """
    out = tmp_path / "out.npz"
    job = [*JOB, "--log-dir", str(tmp_path / "logs")] if on_servers else []
    process = ended([sys.executable, *job, str(SCRIPT), str(out)])
    assert process.returncode == 0, process.stdout + process.stderr
    with np.load(out) as saved:
        actual = dict(saved)
    assert len(actual) == 18
    for name in [name for name in actual if name.startswith("client")]:
        for way in ("program", "torch"):
            other = actual[name.replace("client", way)]
            assert other.tobytes() == actual[name].tobytes(), f"{name} by {way}"
    assert actual["client users"].tolist() == [4]
    assert len(actual["client users ids"]) == 9
