"""CUDA kernels of every rule: under the simulator, and compiled to PTX without a device."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Each takes some seconds of processor time, in many short turns or in large compilations.
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    "module",
    ["kernels.cuda_agreement", "tables.device_tables", "tables.device_rows", "tables.device_order"],
)
def test_the_simulated_device_has_the_bits_of_the_cpu(module: str) -> None:
    """Every rule as a kernel, dense and sparse, with and without decay, has the bits of the NumPy twin.
    Tables on the device say and hold what those in host memory do, whatever is done to both, and in whatever
    order the device does what is asked of it."""
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-m", f"tests.{module}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_tests_of_shards_and_snapshots_pass_on_the_simulated_device(tmp_path: Path) -> None:
    """Rounds, cuts, parts and frozen views hold what their tests ask for when their tables are on the device
    and most rows in host memory. The tests of limits to host memory are left out."""
    own = {name: said for name, said in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "tests.tables.on_device"),
            *("-p", "no:cacheprovider", "--basetemp", str(tmp_path / "inner")),
            *("tests/shard", "tests/tables/test_freezing.py", "tests/snapshots/test_parts.py"),
            *("tests/tables/test_dense.py", "tests/tables/test_entry.py"),
            *("--deselect", "tests/shard/test_room.py"),
        ],
        cwd=ROOT,
        env={**own, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout


needs_numba_cuda = pytest.mark.skipif(
    find_spec("numba_cuda") is None,
    reason="numba-cuda is not installed: pip install 'psfleet[cuda]'",
)


@needs_numba_cuda
def test_compiled_kernels_are_kept_on_disk(tmp_path: Path) -> None:
    """A kernel that was compiled before comes from the disk; what is damaged there is compiled anew."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.cuda_cache"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PSFLEET_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@needs_numba_cuda
@pytest.mark.parametrize("part", ["tables", "dense", "rows"])
def test_kernels_compile_to_machine_code(part: str) -> None:
    """Every rule becomes PTX for compute capability 9.0, in float32 throughout its update, and a cubin
    that spills no register. The parts take some 20 s each, beside each other where there are cores."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.cuda_ptx", part],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
