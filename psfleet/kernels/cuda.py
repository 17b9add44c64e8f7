"""Updates on a CUDA device, or in numba's simulator (NUMBA_ENABLE_CUDASIM=1)."""
# numba.cuda is untyped, and absent from some installations: it is imported when first used.

import math
import threading
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import NDArray

from psfleet.kernels.cache import load_text
from psfleet.kernels.cuda_text import CudaSource
from psfleet.kernels.rule_text import CHUNK, LANES
from psfleet.rules.rule import Rule
from psfleet.schema.table import DecaySpec

__all__ = ["CudaUpdate", "cuda_kernels", "launch"]

Floats = NDArray[np.float32]
_THREADS = 128
_launching = threading.Lock()  # the simulator runs one kernel at a time


@cache
def cuda_kernels(rule: Rule, l1: bool, l2: bool, dim: int) -> tuple[CudaSource, ModuleType]:
    """The CUDA kernels of a rule; dim 0: for dense arrays."""
    text = CudaSource(rule, l1, l2, dim)
    return text, load_text(f"cuda_{rule.name}_{dim}", text.module())


def launch(kernel: Any, threads: int, *arguments: Any) -> None:
    """Run a kernel on so many threads at least. Any thread may call."""
    with _launching:
        kernel[-(-threads // _THREADS), _THREADS](*arguments)


class CudaUpdate:
    """A rule's update of weights and state, with its working memory on the device. Not thread-safe.

    Args:
        rule, decay: Of the table.
        dim: Width of the sparse table's rows; 0: of dense arrays.
    """

    def __init__(self, rule: Rule, decay: DecaySpec, dim: int = 0) -> None:
        self._rule = rule
        self._dim = dim
        self._text, self._kernels = cuda_kernels(rule, bool(decay.l1), bool(decay.l2), dim)
        self._buffers: dict[str, Any] = {}

    def dense(
        self, values: Sequence[Any], gradient: Any, width: int, scalars: Floats, step: int
    ) -> None:
        """Update dense arrays in place.

        Args:
            values: Weights [n], then the slots: [n], or one value for each unit. Float32, flat.
            gradient: float32 [n].
            width: How many weights a unit has.
            scalars: Of psfleet.kernels.rule_text.scalars_of.
            step: How many updates the table has had, this one included.
        """
        turns, turn = self._rule.turns, self._turn(step)
        kept = [*values[: len(values) - turns], values[turn - turns]] if turns else values
        units = len(gradient) // width if width else 0
        self._run(units, width, turn, gradient, list(kept), scalars)

    def rows(self, table: Any, rows: Any, gradient: Any, scalars: Floats, step: int) -> None:
        """Update rows of a sparse table in place.

        Args:
            table: float32, flat: rows of weights and state as the sparse table keeps them.
            rows: int64 [n]: the numbers of the rows, no row twice.
            gradient: float32, flat: [n * dim].
            scalars, step: As for `dense`.
        """
        self._run(len(rows), self._dim, self._turn(step), gradient, [rows, table], scalars)

    def _turn(self, step: int) -> int:
        return (step - 1) % self._rule.turns if self._rule.turns else 0

    def _run(
        self, units: int, n: int, turn: int, gradient: Any, values: list[Any], scalars: Floats
    ) -> None:
        if not units * n:
            return
        text, kernels, h = self._text, self._kernels, tuple(scalars)
        extra = self._buffer("extra", (units, max(text.extra_width, 1)), np.float32)
        chunks = units * math.ceil(n / CHUNK)
        totals = self._buffer("totals", (max(text.sums, 1), chunks), np.float64)
        if text.sums:
            sums = self._buffer("sums", (text.sums, chunks, LANES), np.float32)
            launch(kernels.lanes, chunks * LANES, units, n, turn, gradient, *values, sums, h)
            launch(kernels.fold, text.sums * chunks, chunks, sums, totals)
        if text.extra_width:
            launch(kernels.combine, units, units, n, turn, *values, totals, extra, h)
        launch(kernels.update, units * n, units, n, turn, gradient, *values, extra, h)

    def _buffer(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Working memory of this shape, taken anew only when it must be larger: that stops the device."""
        size = math.prod(shape)
        if len(self._buffers.get(name, ())) < size:
            self._buffers[name] = cuda.device_array(size, dtype)
        return self._buffers[name][:size].reshape(shape)
