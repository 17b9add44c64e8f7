"""CUDA kernels of every rule: under the simulator, and compiled to PTX without a device."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import pytest

from tests.kernels.rule_cases import IS_FULL
from tests.programs import ended

ROOT = Path(__file__).parents[2]
ROW_PARTS = 3 if IS_FULL else 1  # processes
# Each takes some seconds of processor time, in many short turns or in large compilations.
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    "module",
    [
        *("kernels.cuda_agreement", "tables.device_tables", "tables.device_order"),
        *("tables.device_distinct", "kernels.cuda_quick"),
        *(f"tables.device_rows {part} {ROW_PARTS}" for part in range(ROW_PARTS)),
    ],
)
def test_the_simulated_device_has_the_bits_of_the_cpu(module: str) -> None:
    """Every rule as a kernel, dense and sparse, with and without decay, has the bits of the NumPy twin.
    Tables on the device say and hold what those in host memory do, whatever is done to both, and in whatever
    order the device does what is asked of it."""
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", *f"tests.{module}".split()]
    run = ended(command, cwd=ROOT, env=environment, timeout=570)
    assert run.returncode == 0, run.stdout + run.stderr


def passes_on_a_device(tests: list[str], folder: Path, **variables: str) -> None:
    """Check that these tests pass with tables on a device, in a process with these variables."""
    own = {name: said for name, said in os.environ.items() if not name.startswith("PYTEST_")}
    run = ended(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "tests.tables.on_device"),
            *("-p", "no:cacheprovider", "--basetemp", str(folder / "inner"), *tests),
        ],
        cwd=ROOT,
        env={**own, "PYTHONPATH": str(ROOT), **variables},
        timeout=570,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout


def test_tests_of_shards_and_snapshots_pass_on_the_simulated_device(tmp_path: Path) -> None:
    """Rounds, cuts, parts, frozen views and entries hold what their tests ask for when their tables are there
    and most rows in host memory. `make test-device` has the others."""
    tests = ["--device-room=49152", "tests/shard", "tests/snapshots/test_parts.py"]
    tests += [f"tests/tables/test_{name}.py" for name in ("freezing", "entry")]
    passes_on_a_device(tests, tmp_path, NUMBA_ENABLE_CUDASIM="1")


needs_numba_cuda = pytest.mark.skipif(
    find_spec("numba_cuda") is None,
    reason="numba-cuda is not installed: pip install 'psfleet[cuda]'",
)
needs_compiler = pytest.mark.skipif(which("cc") is None, reason="no C compiler is installed")


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """The folder of a driver whose device memory is the host's."""
    source, library = Path(__file__).with_name("driver.c"), tmp_path / "libcuda.so.1"
    compiler = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    subprocess.run(compiler, check=True, timeout=100)
    (tmp_path / "libcuda.so").symlink_to(library)
    return tmp_path


def said_with(driver: Path, script: str, **variables: str) -> str:
    """What a script prints that finds this driver."""
    process = ended(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={**os.environ, "LD_LIBRARY_PATH": str(driver), **variables},
        check=True,
    )
    return process.stdout


@needs_numba_cuda
@needs_compiler
def test_tables_use_a_driver_as_it_asks(driver: Path) -> None:
    """With a driver whose device memory is the host's, tables, numba and the CUDA bindings do what they do
    with a GPU: reserve, map and free memory, copy on streams, wait for events, launch kernels. What runs in
    place of a kernel has its arguments from the parameters of the launch. A driver that refuses this process
    is told in a sentence."""
    passes_on_a_device(
        ["--device-room=0", *(f"tests/tables/test_{name}.py" for name in ("freezing", "entry"))],
        driver,
        LD_LIBRARY_PATH=str(driver),
    )
    asks = "from psfleet.core.engine.tables import memory_choice; print(memory_choice.why_no_gpu())"
    text = said_with(driver, asks, DRIVER_REFUSES="46")
    assert "no usable NVIDIA GPU or driver here (CUDA_ERROR: " in text
    assert "device is unavailable" in text


@needs_numba_cuda
@needs_compiler
def test_tensors_of_torch_stay_where_the_tables_are(driver: Path, tmp_path: Path) -> None:
    """With that driver, a tensor of the processor is in the memory of the device. Embeddings read and write
    it there, with the bits of the way through host memory."""
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install psfleet[torch]")
    passes_on_a_device(
        [
            *("-p", "tests.torch.on_table_gpu", "--device-room=0", "tests/torch/device_tensors.py"),
            *(f"tests/torch/test_{name}.py" for name in ("embeddings", "tied")),
        ],
        tmp_path,
        LD_LIBRARY_PATH=str(driver),
    )


@pytest.mark.parametrize("seed", [1, 2])
def test_tensors_of_torch_take_turns_with_tables(seed: int, tmp_path: Path) -> None:
    """The bits are the same in whatever order the streams of torch and of the tables do their work."""
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install psfleet[torch]")
    tests = ["tests/torch/device_tensors.py", "-k", "streams or SparseAdam or bags or passes"]
    passes_on_a_device(
        ["-p", "tests.torch.on_table_gpu", "--device-room=0", f"--device-order={seed}", *tests],
        tmp_path,
        NUMBA_ENABLE_CUDASIM="1",
    )


@needs_numba_cuda
@needs_compiler
def test_a_refused_growth_can_be_tried_again(driver: Path) -> None:
    """A driver that maps memory and then gives no access to it leaves the array as it was: what it holds
    is there, and the next growth finds the place free."""
    text = said_with(
        driver,
        """
import os
import numpy as np
from psfleet.core.base.errors import UsageError
from psfleet.core.engine.kernels.device.cuda_queue import DeviceQueue
from psfleet.core.engine.tables.device.device_memory import DeviceArena

arena, queue = DeviceArena(1 << 22, "f4"), DeviceQueue()
arena.grow(1)
queue.write(arena.array[:2], np.full(2, 7, "f4"))
os.environ["DRIVER_REFUSES_ACCESS"] = "1"
try:
    arena.grow(1 << 20)
except UsageError as error:
    print(error)
del os.environ["DRIVER_REFUSES_ACCESS"]
print(arena.bytes)
arena.grow(1 << 20)
print(arena.bytes, queue.read(arena.array[:3]))
""",
    )
    first, *after = text.splitlines()
    assert first.startswith("the GPU's driver refuses 2 MiB for a table")
    assert after == [str(2 << 20), f"{4 << 20} [7. 7. 0.]"]


def passes_with(driver: Path, module: str, **variables: str) -> None:
    """Check that a program that finds this driver ends well."""
    found = {"LD_LIBRARY_PATH": str(driver), "NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS": "0"}
    run = ended(
        [sys.executable, "-m", module],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **found, **variables},
        timeout=570,
    )
    assert run.returncode == 0, run.stdout + run.stderr


@needs_numba_cuda
@needs_compiler
def test_launches_give_the_driver_what_numba_gives_it(driver: Path) -> None:
    """For every kernel of a rule of each shape and of tables, the driver gets the same code, grid and bytes
    as from numba's own dispatcher. What runs from these bytes gives tables the bits of host memory."""
    passes_with(driver, "tests.kernels.cuda_launches")


@needs_numba_cuda
@needs_compiler
def test_compiled_kernels_are_kept_on_disk(driver: Path, tmp_path: Path) -> None:
    """A kernel that was compiled before comes from the disk; what is damaged there is compiled again."""
    passes_with(driver, "tests.kernels.cuda_cache", PSFLEET_CACHE=str(tmp_path / "cache"))


@needs_numba_cuda
def test_kernels_compile_to_machine_code() -> None:
    """A rule of each shape becomes PTX for compute capability 9.0, in float32 throughout its update, and a
    cubin that spills no register. `make torture` has every rule."""
    run = ended(
        [sys.executable, "-m", "tests.kernels.cuda_ptx"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=570,
    )
    assert run.returncode == 0, run.stdout + run.stderr
