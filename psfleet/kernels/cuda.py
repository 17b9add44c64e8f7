"""Updates on a CUDA device, or in numba's simulator (NUMBA_ENABLE_CUDASIM=1).

The CPU tables do not use this. It shows that every rule runs on a device as it is written.
"""
# numba.cuda is untyped, and absent from some installations: it is imported when first used.

import math
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.cache import load_text
from psfleet.kernels.cuda_text import CudaSource
from psfleet.kernels.rule_text import CHUNK, LANES, scalars_of
from psfleet.rules.rule import Rule
from psfleet.schema.table import DecaySpec

__all__ = ["cuda_kernels", "update_dense", "update_rows"]

Floats = NDArray[np.float32]
_THREADS = 128


@cache
def cuda_kernels(rule: Rule, l1: bool, l2: bool, dim: int) -> tuple[CudaSource, ModuleType]:
    """The CUDA kernels of a rule; dim 0: for dense arrays."""
    text = CudaSource(rule, l1, l2, dim)
    return text, load_text(f"cuda_{rule.name}_{dim}", text.module())


def update_dense(
    rule: Rule,
    decay: DecaySpec,
    learning_rate: float,
    step: int,
    values: Sequence[Floats],
    gradient: Floats,
    width: int,
) -> None:
    """Update weights and slots in place; every array is flat.

    Args:
        rule, decay, learning_rate, step: As for the tables.
        values: Weights [n], then the slots: [n], or one value per unit.
        gradient: float32 [n].
        width: How many weights a unit has.
    """
    turn = (step - 1) % rule.turns if rule.turns else 0
    kept = (
        [*values[: len(values) - rule.turns], values[turn - rule.turns]] if rule.turns else values
    )
    kernels = cuda_kernels(rule, bool(decay.l1), bool(decay.l2), 0)
    units = len(gradient) // width if width else 0
    _run(
        *kernels,
        units,
        width,
        turn,
        gradient,
        list(kept),
        scalars_of(rule, decay, learning_rate, step),
    )


def update_rows(
    rule: Rule,
    decay: DecaySpec,
    learning_rate: float,
    step: int,
    table: Floats,
    rows: NDArray[np.int64],
    gradient: Floats,
    resting: bool = False,
) -> None:
    """Update rows of a table in place.

    Args:
        rule, decay, learning_rate, step: As for the tables.
        table: float32, flat: rows of weights and state as the sparse table keeps them.
        rows: int64 [n]: the numbers of the rows, no row twice.
        gradient: float32 [n, dim].
        resting: The step does not name these rows.
    """
    turn = (step - 1) % rule.turns if rule.turns else 0
    kernels = cuda_kernels(rule, bool(decay.l1), bool(decay.l2), gradient.shape[1])
    _run(
        *kernels,
        len(rows),
        gradient.shape[1],
        turn,
        gradient.reshape(-1),
        [rows, table],
        scalars_of(rule, decay, learning_rate, step, resting),
    )


def _run(
    text: CudaSource,
    kernels: ModuleType,
    units: int,
    n: int,
    turn: int,
    gradient: Floats,
    values: list[Any],
    scalars: Floats,
) -> None:
    if not units * n:
        return
    h = tuple(scalars)
    extra = np.zeros((units, max(text.extra_width, 1)), np.float32)
    chunks = units * math.ceil(n / CHUNK)
    totals = np.zeros((max(text.sums, 1), chunks), np.float64)
    if text.sums:
        sums = np.zeros((text.sums, chunks, LANES), np.float32)
        _launch(kernels.lanes, chunks * LANES, units, n, turn, gradient, *values, sums, h)
        _launch(kernels.fold, text.sums * chunks, chunks, sums, totals)
    if text.extra_width:
        _launch(kernels.combine, units, units, n, turn, *values, totals, extra, h)
    _launch(kernels.update, units * n, units, n, turn, gradient, *values, extra, h)


def _launch(kernel: Any, threads: int, *arguments: Any) -> None:
    kernel[-(-threads // _THREADS), _THREADS](*arguments)
