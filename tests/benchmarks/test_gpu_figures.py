"""benchmarks/gpu_figures.py, on a driver whose device memory is the host's."""

import json
from pathlib import Path

import pytest

from tests.kernels.test_cuda import driver, needs_compiler, needs_numba_cuda, said_with

__all__ = ["driver"]
SCRIPT = """
import runpy, sys
from tests.tables import compiled_kernels

compiled_kernels.install()
compiled_kernels.use(compiled_kernels.CompiledOperations())
from tests.torch import on_table_gpu

on_table_gpu.use_processor()
sys.argv = ["gpu_figures.py", *{arguments!r}]
sys.path.insert(0, "benchmarks")
runpy.run_path("benchmarks/gpu_figures.py", run_name="__main__")
"""


@needs_numba_cuda
@needs_compiler
@pytest.mark.long
@pytest.mark.timeout(600)
def test_every_figure_has_a_line(driver: Path, tmp_path: Path) -> None:
    """Rows, W1, W3 and pooled look-ups are measured, and FBGEMM is named where it is not installed."""
    pytest.importorskip("torch", reason="PyTorch is not installed: pip install psfleet[torch]")
    sizes = "--rows 100 --w1 16 --w3 2 --ids 100 --hidden 3 --dims 2 --samples 2 --table-rows 9"
    arguments = [*sizes.split(), "--seconds", "0", "--runs", "1", "--json", str(tmp_path / "json")]
    said_with(driver, SCRIPT.format(arguments=arguments), PYTHONPATH=".")
    figures = json.loads((tmp_path / "json").read_text())
    there, host, mixed = (
        f"psfleet, {name}" for name in ("on the GPU", "host memory", "host memory")
    )
    mixed += ", model on the GPU"
    expected = [f"16 distinct ids, tensors: {name}" for name in ("pull", "push")]
    w1 = there, host, mixed, "torch EmbeddingBag, SparseAdam"
    expected += [f"W1, 16 ids: {name}" for name in w1]
    expected += [f"W3, 2 samples: {name}" for name in (there, mixed, "torch, SparseAdam and Adam")]
    pooled = "26 features, 2 samples, dim 2"
    expected += [f"{pooled}: {name}" for name in (there, mixed)]
    known, rows = 0, [row["what"] for row in figures["rows"]]
    while rows[known].endswith(", 100 of 100 x 16"):  # as gpu.py measures them
        known += 1
    rows = rows[known:]
    assert known >= 5
    assert [what for what in rows if "FBGEMM" not in what] == expected
    assert all(row["M ids / s"] > 0 for row in figures["rows"])
    assert set(figures["skipped"]) <= {f"{pooled}: FBGEMM's TBE"}
    assert len(rows) + len(figures["skipped"]) == len(expected) + 1
