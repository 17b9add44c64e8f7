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
from psfleet.kernels.cuda_arithmetic import SIMULATED
from psfleet.kernels.cuda_text import CudaSource
from psfleet.kernels.rule_text import CHUNK, LANES
from psfleet.rules.rule import Rule
from psfleet.schema.table import DecaySpec

__all__ = ["CudaUpdate", "DeviceBuffers", "cuda_kernels", "launch"]

Floats = NDArray[np.float32]
_THREADS = 128  # of a block
_SIMULATED = 2
_launching = threading.Lock()  # the simulator runs one kernel at a time


@cache
def cuda_kernels(
    rule: Rule, l1: bool, l2: bool, dim: int, scores: int = 0
) -> tuple[CudaSource, ModuleType]:
    """The CUDA kernels of a rule; dim 0: for dense arrays."""
    text = CudaSource(rule, l1, l2, dim, scores)
    return text, load_text(f"cuda_{rule.name}_{dim}", text.module())


def launch(kernel: Any, count: int, *arguments: Any) -> None:
    """Run a kernel for so many things, of which each of its threads takes some. Any thread may call."""
    if not count:
        return
    blocks, threads = -(-count // _THREADS), _THREADS
    if SIMULATED:  # each is a thread of Python: as many as may get in each other's way
        blocks, threads = 1, min(count, _SIMULATED)
    with _launching:
        kernel[blocks, threads](*arguments)


class DeviceBuffers:
    """Working memory on the device, by name; taken anew only to become larger, for that stops the device."""

    def __init__(self) -> None:
        self._held: dict[str, Any] = {}

    def get(self, name: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """The memory of this name, which has always the same dtype, in this shape; not set to anything."""
        size = math.prod(shape)
        if name not in self._held or len(self._held[name]) < size:
            self._held.pop(name, None)
            self._held[name] = cuda.device_array(max(size, 1), dtype)
        return self._held[name][:size].reshape(shape)

    def fill(self, name: str, values: NDArray[Any]) -> Any:
        """The memory of this name with a copy of these values."""
        there = self.get(name, values.shape, values.dtype)
        if values.size:
            there.copy_to_device(np.ascontiguousarray(values))
        return there


class CudaUpdate:
    """A rule's update of weights and state, with its working memory on the device. Not thread-safe.

    Args:
        rule, decay: Of the table.
        dim: Width of the sparse table's rows; 0: of dense arrays.
        scores: So many values follow each row and each gradient.
    """

    def __init__(self, rule: Rule, decay: DecaySpec, dim: int = 0, scores: int = 0) -> None:
        self._rule = rule
        self._dim = dim
        self._text, self._kernels = cuda_kernels(rule, bool(decay.l1), bool(decay.l2), dim, scores)
        self._buffers = DeviceBuffers()

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
            gradient: float32, flat: [n * (dim + scores)].
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
        extra = self._buffers.get("extra", (units, max(text.extra_width, 1)), np.float32)
        chunks = units * math.ceil(n / CHUNK)
        totals = self._buffers.get("totals", (max(text.sums, 1), chunks), np.float64)
        if text.sums:
            sums = self._buffers.get("sums", (text.sums, chunks, LANES), np.float32)
            launch(kernels.lanes, chunks * LANES, units, n, turn, gradient, *values, sums, h)
            launch(kernels.fold, text.sums * chunks, chunks, sums, totals)
        if text.extra_width:
            launch(kernels.combine, units, units, n, turn, *values, totals, extra, h)
        launch(kernels.update, units * n, units, n, turn, gradient, *values, extra, h)
