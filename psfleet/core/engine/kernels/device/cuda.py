"""Applies a rule to weights on a CUDA device, or in numba's simulator (NUMBA_ENABLE_CUDASIM=1).

Tables on a device call `CudaUpdate` for each push. A unit is the weights that share sums and state values
(`Rule.unit`); sums are computed by chunks and lanes, as rule_source.py draws them. A rule with sums (Lamb,
say) needs all terms of a sum before it can update the first weight, so an update is up to four kernels:

    lanes      the sum of each lane of each chunk            only for rules with sums
    fold       the total of the lanes of each chunk          only for rules with sums
    combine    the values that `Rule.combine` appends to h   for rules with sums or `per_unit` slots
    update     the rule itself, a thread for each weight

The kernels are added to a `DeviceQueue`, and the call returns before they have run. cuda_text.py generates
the kernels. They are compiled once and cached on disk, as the kernels of the CPU are.
"""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.engine.kernels.cache import load_text
from psfleet.core.engine.kernels.device.cuda_queue import DeviceBuffers, DeviceQueue
from psfleet.core.engine.kernels.device.cuda_text import CudaSource
from psfleet.core.engine.kernels.rule_source import CHUNK, LANES
from psfleet.core.engine.rules.rule import Rule
from psfleet.core.engine.schema.table import DecaySpec

# numba.cuda is untyped, and absent from some installations: functions import it when they use it.

Floats = NDArray[np.float32]

_HERE = Path(__file__).parent
# Kernels contain functions of these modules, so the code of the modules is part of the cache's key.
_HELPERS = (
    "cuda_arithmetic.py",
    "cuda_index.py",
    "cuda_rows.py",
    "../hashing.py",
    "../row_rounding.py",
)


@cache
def cuda_kernels(
    rule: Rule, l1: bool, l2: bool, dim: int, push_scores: int = 0, row_scores: int = 0
) -> tuple[CudaSource, ModuleType]:
    """Compile the CUDA kernels of a rule.

    Args:
        rule: Rule to compile.
        l1, l2: True if this regularization is added to the gradient.
        dim, push_scores, row_scores: As for CudaUpdate.

    Returns:
        The generator of the kernels' text, and the module with the kernels.
    """
    text = CudaSource(rule, l1, l2, dim, push_scores, row_scores)
    return text, load_kernels(f"cuda_{rule.name}_{dim}", text.module())


@cache
def table_kernels(name: str) -> ModuleType:
    """Return the module with the kernels of `<name>.py` in this folder, which do not depend on a rule."""
    return load_kernels(name, (_HERE / f"{name}.py").read_text())


def load_kernels(stem: str, text: str) -> ModuleType:
    """Import a module of CUDA kernels, whose compiled code numba keeps in the cache's folder.

    A kernel is compiled when it is first launched, not here: numba needs the types of its arguments.

    Args:
        stem: Start of the file's name.
        text: Python source of the module.
    """
    helpers = "".join((_HERE / name).read_text() for name in _HELPERS)
    return load_text(stem, text.replace("@cuda.jit\n", "@cuda.jit(cache=True)\n"), helpers)


class CudaUpdate:
    """Update of one table's weights and state by a rule, with scratch memory on the device.

    Not thread-safe. Updates take effect in the order of the calls, and no call waits for the device.

    Args:
        rule: Rule of the table.
        decay: Regularization of the table.
        queue: Queue that the kernels are added to.
        dim: Number of weights of a row of the sparse table, or 0 for dense arrays.
        push_scores: Number of scores (such as shows and clicks) that a push stores after each gradient.
        row_scores: Number of scores that the table stores after the state of each row.
    """

    def __init__(
        self,
        rule: Rule,
        decay: DecaySpec,
        queue: DeviceQueue,
        dim: int = 0,
        push_scores: int = 0,
        row_scores: int = 0,
    ) -> None:
        self._rule = rule
        self._dim = dim
        self._text, self._kernels = cuda_kernels(
            rule, bool(decay.l1), bool(decay.l2), dim, push_scores, row_scores
        )
        self._queue = queue
        self._buffers = DeviceBuffers(queue)

    def dense(
        self, values: Sequence[Any], gradient: Any, width: int, scalars: Floats, step: int
    ) -> None:
        """Update dense arrays in place.

        Args:
            values: Weights, float32 [n], then each slot (state value): float32 [n], or [units] if all weights
                of a unit share the value. Arrays of the device.
            gradient: Gradient, float32 [n], an array of the device.
            width: Number of weights of a unit.
            scalars: Numbers of the batch, from `rule_source.scalars_of`.
            step: Number of updates that the table has had, including this one.
        """
        turns, turn = self._rule.turns, self._turn(step)
        arrays = [*values[: len(values) - turns], values[turn - turns]] if turns else values
        units = len(gradient) // width if width else 0
        self._run(units, width, turn, gradient, list(arrays), scalars)

    def rows(self, table: Any, rows: Any, gradient: Any, scalars: Floats, step: int) -> None:
        """Update rows of a sparse table in place.

        Args:
            table: All rows of the table, flat float32: weights, state and scores of each.
            rows: Numbers of the rows to update, int64 [n]. A row that occurs twice would be updated by two
                threads at the same time.
            gradient: Gradients, each followed by its scores, flat float32 [n * (dim + push_scores)].
            scalars, step: As for `dense`.
        """
        self._run(len(rows), self._dim, self._turn(step), gradient, [rows, table], scalars)

    def _turn(self, step: int) -> int:
        """Return the number of the slot (state value) that this step updates, if slots take turns."""
        return (step - 1) % self._rule.turns if self._rule.turns else 0

    def _run(
        self, units: int, n: int, turn: int, gradient: Any, values: list[Any], scalars: Floats
    ) -> None:
        if not units * n:
            return
        # No waits between the kernels: each starts when the kernel before it in the stream has ended.
        text, kernels, h = self._text, self._kernels, tuple(scalars)
        launch = self._queue.launch
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


def compile_ptx(rule: Rule, dim: int) -> dict[str, str]:
    """Compile a rule's kernels to PTX, to check their instructions without a device.

    Args:
        rule: Rule to compile, with both regularizations.
        dim: Number of weights of a row, or 0 for dense arrays.

    Returns:
        The assembly text of each kernel by its name, for compute capability 9.0.
    """
    _, kernels = cuda_kernels(rule, True, True, dim)
    signatures = _signatures(rule, dim).items()
    return {name: ptx_of(getattr(kernels, name), signature) for name, signature in signatures}


def ptx_of(kernel: Any, signature: Any) -> str:
    """Return the PTX (NVIDIA's assembly language) of a kernel for arguments of these types."""
    from numba import cuda

    text, _ = cuda.compile(  # type: ignore[attr-defined]
        kernel.py_func, signature, device=False, cc=(9, 0), output="ptx", abi="numba"
    )
    assert isinstance(text, str)
    return text


def _signatures(rule: Rule, dim: int) -> dict[str, Any]:
    from numba import float32, float64, int64, types, void

    flat, sums, totals = float32[::1], float32[:, :, ::1], float64[:, ::1]
    extra = float32[:, ::1]
    text, _ = cuda_kernels(rule, True, True, dim)
    values = [int64[::1], flat] if dim else [flat] * len(text.arguments)
    h = types.UniTuple(float32, len(rule.scalars(0.1, 1)) + 2)  # type: ignore[no-untyped-call]
    signatures = {"update": void(int64, int64, int64, flat, *values, extra, h)}
    if text.sums:
        signatures["lanes"] = void(int64, int64, int64, flat, *values, sums, h)
        signatures["fold"] = void(int64, sums, totals)
    if text.extra_width:
        signatures["combine"] = void(int64, int64, int64, *values, totals, extra, h)
    return signatures
