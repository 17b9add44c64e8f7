"""CUDA kernels of every rule: under the simulator, and compiled to PTX without a device."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_simulated_kernels_agree_with_the_twin() -> None:
    """Every rule, dense and sparse, with and without decay, agrees to 1e-6 with the CPU's values."""
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.cuda_agreement"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.skipif(
    find_spec("numba_cuda") is None,
    reason="numba-cuda is not installed: pip install 'psfleet[cuda]'",
)
def test_kernels_compile_to_ptx() -> None:
    """Every rule becomes PTX for compute capability 9.0, in float32 throughout its update."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.cuda_ptx"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
