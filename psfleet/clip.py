"""Gradient clipping: on the worker, per worker, before the push and before regularization.

Parameters with `need_clip=False` are left out, of a global norm too. The rows of repeated ids in a
sparse gradient are summed first, so it is clipped as the array that it stands for.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import ConfigError
from psfleet.kernels.dedup import dedup
from psfleet.parameter import Parameter, SparseGrad

__all__ = [
    "ClipGradBase",
    "ClipGradByGlobalNorm",
    "ClipGradByNorm",
    "ClipGradByValue",
    "GradientClipByGlobalNorm",
    "GradientClipByNorm",
    "GradientClipByValue",
    "gathering",
    "merge_rows",
]

Floats = NDArray[np.float32]
Grad = Floats | SparseGrad
Pairs = Sequence[tuple[Parameter, Grad]]


def merge_rows(grad: SparseGrad) -> SparseGrad:
    """The same gradient with each id once; the rows of a repeated id are summed in order."""
    unique = dedup(grad.ids, 1)
    scores = None if grad.scores is None else unique.merge(grad.scores)[0]
    return SparseGrad(unique.unique[0], unique.merge(grad.rows)[0], scores)


Gather = Callable[[list[str], list[float]], list[float]]
_gather: Gather | None = None


@contextlib.contextmanager
def gathering(gather: Gather) -> Iterator[None]:
    """Inside the block global norms are over more parameters than are clipped here.

    Args:
        gather: Of the names and squared norms here, the squared norms of all.
    """
    global _gather
    before, _gather = _gather, gather
    try:
        yield
    finally:
        _gather = before


class ClipGradBase:
    """Base of the clips: calling one clips (parameter, gradient) pairs."""

    def __call__(self, params_grads: Pairs) -> list[tuple[Parameter, Grad]]:
        """New pairs, in the same order; gradients are not changed in place."""
        merged = [(p, _merged(g) if p.need_clip else g) for p, g in params_grads]
        clipped = iter(self._clip([_values(g) for p, g in merged if p.need_clip]))
        return [(p, _like(g, next(clipped)) if p.need_clip else g) for p, g in merged]

    def _clip(self, values: list[Floats]) -> list[Floats]:
        raise NotImplementedError


class ClipGradByValue(ClipGradBase):
    """Every component into [min, max]; min is -max unless given."""

    def __init__(self, max: float, min: float | None = None) -> None:
        low: float = (-max if _is_finite(max) else max) if min is None else min
        if not (_is_finite(max) and _is_finite(low) and low <= max):
            raise ConfigError(
                f"{type(self).__name__}: min is {low!r} and max is {max!r}, "
                "they must be finite numbers in order"
            )
        self.max = float(max)
        self.min = float(low)

    def _clip(self, values: list[Floats]) -> list[Floats]:
        return [np.clip(v, np.float32(self.min), np.float32(self.max)) for v in values]


class ClipGradByNorm(ClipGradBase):
    """Each gradient scaled down to an L2 norm of at most clip_norm."""

    def __init__(self, clip_norm: float) -> None:
        self.clip_norm = _check_norm(type(self).__name__, clip_norm)

    def _clip(self, values: list[Floats]) -> list[Floats]:
        return [_scaled(v, self.clip_norm, math.sqrt(_square(v))) for v in values]


class ClipGradByGlobalNorm(ClipGradBase):
    """All gradients scaled by one factor to a common norm of at most clip_norm."""

    def __init__(
        self, clip_norm: float, group_name: str = "default_group", auto_skip_clip: bool = False
    ) -> None:
        self.clip_norm = _check_norm(type(self).__name__, clip_norm)
        self.group_name = group_name
        self.auto_skip_clip = auto_skip_clip

    def __call__(self, params_grads: Pairs) -> list[tuple[Parameter, Grad]]:
        """See ClipGradBase."""
        self._names = [p.name for p, _ in params_grads if p.need_clip]
        return super().__call__(params_grads)

    def _clip(self, values: list[Floats]) -> list[Floats]:
        squares = [_square(v) for v in values]
        if _gather is not None:
            squares = _gather(self._names, squares)
        norm = math.sqrt(sum(squares))
        return [_scaled(v, self.clip_norm, norm) for v in values]


GradientClipByValue = ClipGradByValue
GradientClipByNorm = ClipGradByNorm
GradientClipByGlobalNorm = ClipGradByGlobalNorm


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float | np.number) and math.isfinite(value)


def _check_norm(owner: str, value: float) -> float:
    if not _is_finite(value) or value <= 0:
        raise ConfigError(f"{owner}: clip_norm is {value!r}, it must be a finite number above 0")
    return float(value)


def _square(values: Floats) -> float:
    """The squared norm, summed in float64 so that it does not depend on the array's layout."""
    return float(np.sum(np.square(values, dtype=np.float64)))


def _scaled(values: Floats, clip_norm: float, norm: float) -> Floats:
    return values * np.float32(clip_norm / norm) if norm > clip_norm else values


def _merged(grad: Grad) -> Grad:
    return merge_rows(grad) if isinstance(grad, SparseGrad) else grad


def _values(grad: Grad) -> Floats:
    return grad.rows if isinstance(grad, SparseGrad) else grad


def _like(grad: Grad, values: Floats) -> Grad:
    return grad.with_rows(values) if isinstance(grad, SparseGrad) else values
