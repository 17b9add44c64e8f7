"""Forms of a gradient: a dense array, rows by id, pooled rows, or single elements.

A script, a program or torch makes one of these, and `gradient_of` converts it to the gradient of a push.
Pooled rows are the gradient of sums over groups of rows (bags). They and single elements exist so that the
gradient never has to be written out in full.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ShapeError
from psfleet.core.engine.device_arrays import DeviceSums
from psfleet.core.engine.kernels.bags import spread_parts
from psfleet.core.engine.kernels.dedup import dedup
from psfleet.core.engine.runtime_interface import Gradient, PooledIds, joined_ids

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SparseGrad:
    """Gradient that is zero except for some rows, for example for an embedding table.

        SparseGrad(ids=np.array([7, 3]), rows=np.ones((2, 16), np.float32))

    Attributes:
        ids: Ids of the rows: int64 [n], repeats allowed.
        rows: Gradients of the rows: float32 [n, dim]. Rows of a repeated id are summed.
        scores: Shows and clicks of each id: float32 [n, 2], summed for a repeated id. None means one show and
            no click for each id. Only for parameters with a ShowClickEntry, which counts shows and clicks.
    """

    ids: NDArray[np.int64]
    rows: Floats
    scores: Floats | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", np.asarray(self.ids))
        object.__setattr__(
            self, "rows", as_numbers(self.rows, "the rows array of a sparse gradient")
        )
        if self.ids.ndim != 1 or self.rows.ndim != 2 or len(self.ids) != len(self.rows):
            raise ShapeError(
                f"a sparse gradient has ids {self.ids.shape} and rows {self.rows.shape}; "
                "they must be [n] and [n, dim]"
            )
        if self.scores is not None and self.scores.shape != (len(self.ids), 2):
            raise ShapeError(
                f"a sparse gradient of {len(self.ids)} ids has scores {self.scores.shape}; "
                "they must be [n, 2]: shows and clicks"
            )

    def counted(self) -> Floats:
        """Return the shows and clicks of each id: float32 [n, 2].

        If the gradient has no scores, every id has one show and no click.
        """
        if self.scores is None:
            return np.broadcast_to(np.array([1, 0], np.float32), (len(self.ids), 2))
        return self.scores

    def with_rows(self, rows: Floats) -> "SparseGrad":
        """Return a gradient with the same ids and scores, and other rows."""
        return SparseGrad(self.ids, rows, self.scores)


class PooledGradient(SparseGrad):
    """Gradient of pooled rows, one for each group of ids (bag). Expanded to single rows when `rows` is read.

    Args:
        values: Gradients of the pooled rows: float32 [all bags, dim].
    """

    __slots__ = ("_rows", "of", "values")

    of: PooledIds
    values: Floats
    _rows: Floats | None

    def __init__(self, of: PooledIds, values: Floats) -> None:
        parts = {"of": of, "values": values, "ids": of.ids, "scores": None, "_rows": None}
        for name, value in parts.items():
            object.__setattr__(self, name, value)

    @property
    def rows(self) -> Floats:
        """Gradient of each id: float32 [n, dim]."""
        if self._rows is None:
            object.__setattr__(self, "_rows", spread_parts(self.values, self.of.parts))
        assert self._rows is not None
        return self._rows


class DeviceGradient(SparseGrad):
    """Gradient of single rows on the GPU, from another library. Copied to the host when `rows` is read.

    Args:
        host: Makes the copy.
        sums: Returns the sums by distinct id, or None if a sum is not finite or there are no ids.
    """

    __slots__ = ("_copy", "sums")

    sums: Callable[[], DeviceSums | None]
    _copy: Callable[[], SparseGrad]

    def __init__(
        self, host: Callable[[], SparseGrad], sums: Callable[[], DeviceSums | None]
    ) -> None:
        for name, value in {"scores": None, "_copy": functools.cache(host), "sums": sums}.items():
            object.__setattr__(self, name, value)

    @property
    def ids(self) -> Ids:
        """Ids of the rows: int64 [n], repeats allowed."""
        return self._copy().ids

    @property
    def rows(self) -> Floats:
        """Gradients of the rows: float32 [n, dim]."""
        return self._copy().rows


def joined_gradients(parts: Sequence[PooledGradient]) -> PooledGradient:
    """Return the sum of pooled gradients, as one gradient with the bags (groups of ids) of all parts."""
    of = joined_ids([part.of for part in parts])
    return PooledGradient(of, np.concatenate([part.values for part in parts]))


def merge_rows(grad: SparseGrad) -> SparseGrad:
    """Return the same gradient with each id once. Rows of a repeated id are summed in the given order."""
    deduplicated = dedup(grad.ids, 1)
    scores = None if grad.scores is None else deduplicated.merge(grad.scores)[0]
    return SparseGrad(deduplicated.unique[0], deduplicated.merge(grad.rows)[0], scores)


@dataclass(frozen=True, slots=True)
class SparseElements:
    """Gradient of a dense array that is zero except for some elements.

    Attributes:
        positions: Indices of the elements in the flattened array: int64 [k], ascending.
        values: Gradients of these elements: float32 [k].
    """

    positions: Ids
    values: Floats


Grad = Floats | SparseGrad


def scaled(grad: Grad, factor: float) -> Grad:
    """Return the gradient multiplied by a number."""
    if isinstance(grad, SparseGrad):
        return grad.with_rows(grad.rows * np.float32(factor))
    return grad * np.float32(factor)


def zeroed(grad: Grad | None) -> Grad | None:
    """Return a zero gradient of the same kind, or None for None."""
    if isinstance(grad, SparseGrad):
        return SparseGrad(np.empty(0, np.int64), np.empty((0, grad.rows.shape[1]), np.float32))
    return None if grad is None else np.zeros_like(grad)


def gradient_of(table: int, grad: Grad | SparseElements, rate: float) -> Gradient:
    """Convert a gradient to the form in which a push contains it."""
    if isinstance(grad, SparseElements):
        return Gradient(table, grad.values, grad.positions, rate)
    if isinstance(grad, PooledGradient):
        return Gradient(table, grad.values, grad.ids, rate, bags=grad.of.parts)
    if isinstance(grad, DeviceGradient) and (sums := grad.sums()) is not None:
        return Gradient(table, cast(Floats, sums), cast(Ids, sums.ids), rate)
    if isinstance(grad, SparseGrad):
        rows, scores = grad.rows, grad.scores
        values = rows if scores is None else np.concatenate([rows, scores], axis=1)
        return Gradient(table, values, grad.ids, rate)
    return Gradient(table, grad, None, rate)


def as_numbers(value: Any, what: str) -> NDArray[Any]:
    """Convert a value to an array of real numbers, which keeps its dtype.

    Args:
        value: Any value that NumPy can convert to an array.
        what: Description of the value, for messages.

    Raises:
        ShapeError: The value is no array of real numbers.
    """
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShapeError(f"{what} cannot be read as an array: {error}") from None
    if array.dtype.kind not in "fiub":
        fault = f"has the dtype {array.dtype}" if isinstance(value, np.ndarray) else f"is {value!r}"
        raise ShapeError(f"{what} {fault}; it must be an array of real numbers")
    return array


def without_values(gradient: Gradient) -> Gradient:
    """Return an empty gradient for the same table, so that the push still counts as an update."""
    is_dense = gradient.ids is None or gradient.values.ndim == 1
    shape = (0,) if is_dense else (0, gradient.values.shape[1])
    return dataclasses.replace(
        gradient, values=np.zeros(shape, np.float32), ids=np.zeros(0, np.int64), bags=None
    )
