"""Jagged arrays, which have any number of values for each sample, and their conversion from other data types.

Transforms take and return `Jagged`. `as_jagged` converts lists, arrays, tensors and data frames. It looks
at the methods of an object and does not import torch, pandas or similar libraries, so that they need not
be installed.
"""

import contextlib
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from psfleet.core.base.errors import ShapeError
from psfleet.core.base.validation.annotations import checked
from psfleet.core.engine.kernels.bags import chosen_bags

Floats = NDArray[np.float32]
Lengths = NDArray[np.int64]


@checked
class Jagged:
    """Values of a batch, with any number of values for each sample.

        Jagged([7, 8, 9], lengths=[2, 0, 1])     # three samples, with the ids 7 and 8, none, and 9
        Jagged([7, 8, 9], offsets=[0, 2, 2, 3])  # the same

    Args:
        values: Ids, numbers or texts of all samples, one sample after the other, [n].
        lengths: Number of values of each sample, integers [samples].
        offsets: Alternative to `lengths`, integers [samples + 1]: index at which each sample's values
            begin, and n.
        weights: Factor for the row of each value, floats [n], or None for factors of 1.

    Attributes:
        values: The array of values, [n].
        lengths: int64 [samples].
        weights: float32 [n] or None.

    Raises:
        ShapeError: The parts do not fit each other.
    """

    def __init__(
        self,
        values: Any,
        lengths: ArrayLike | None = None,
        *,
        offsets: ArrayLike | None = None,
        weights: ArrayLike | None = None,
    ) -> None:
        if (lengths is None) == (offsets is None):
            raise ShapeError("jagged values have lengths or offsets; give one of them")
        self.values = as_plain(values).reshape(-1)
        self.lengths = _lengths(lengths) if offsets is None else _between(offsets)
        self.weights = None if weights is None else _factors(weights)
        count = int(self.lengths.sum())
        if len(self.values) != count:
            raise ShapeError(f"jagged values are {len(self.values)}, their lengths sum to {count}")
        if self.weights is not None and len(self.weights) != count:
            raise ShapeError(f"jagged values are {count}, their weights are {len(self.weights)}")

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.lengths)

    @functools.cached_property
    def offsets(self) -> Lengths:
        """Start of each sample's values and, as last entry, the number of all values: int64 [samples + 1]."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])

    def __getitem__(self, rows: Any) -> "Jagged":
        """Return some samples: those that a slice, a list of positions or a mask selects."""
        lengths, starts = self.lengths[rows], self.offsets[:-1][rows]
        # Consecutive samples are one slice of the values: a view, which copies nothing.
        if isinstance(rows, slice) and rows.step in (None, 1):
            first = int(starts[0]) if len(starts) else 0
            part = slice(first, first + int(lengths.sum()))
            weights = None if self.weights is None else self.weights[part]
            return Jagged(self.values[part], lengths, weights=weights)
        weights = None if self.weights is None else chosen_bags(self.weights, starts, lengths)
        return Jagged(chosen_bags(self.values, starts, lengths), lengths, weights=weights)

    def kept(self, keep: NDArray[np.bool_]) -> "Jagged":
        """Keep only the values for which the mask `keep`, [n], is true. The number of samples does not
        change.
        """
        counts = np.concatenate([np.zeros(1, np.int64), np.cumsum(keep)])
        ends = self.offsets
        weights = None if self.weights is None else self.weights[keep]
        return Jagged(self.values[keep], counts[ends[1:]] - counts[ends[:-1]], weights=weights)

    def with_values(self, values: NDArray[Any]) -> "Jagged":
        """Replace the values, [n], but keep lengths and weights."""
        return Jagged(values, self.lengths, weights=self.weights)

    def expanded(self, values: NDArray[Any], counts: Lengths) -> "Jagged":
        """Replace value i by the next `counts[i]` of the new values, which get its weight.

        `counts` is int64 [n].
        """
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        lengths = ends[self.offsets[1:]] - ends[self.offsets[:-1]]
        weights = None if self.weights is None else np.repeat(self.weights, counts)
        return Jagged(values, lengths, weights=weights)

    @property
    def rows(self) -> Lengths:
        """Index of each value's sample, int64 [n]."""
        return np.repeat(np.arange(len(self)), self.lengths)

    @property
    def ranks(self) -> Lengths:
        """Position of each value within its sample, from 0, int64 [n]."""
        return np.arange(len(self.values)) - np.repeat(self.offsets[:-1], self.lengths)

    def last(self, count: int) -> "Jagged":
        """Keep the last `count` values of each sample. A shorter sample keeps all its values."""
        if len(self) == 0 or int(self.lengths.max()) <= count:
            return self
        ends = np.repeat(self.offsets[1:], self.lengths)
        return self.kept(np.arange(len(self.values)) >= ends - count)


def joined(parts: Sequence[Jagged]) -> Jagged:
    """Join the samples of all parts, in their order. Either all parts have weights or none has."""
    if len(parts) == 1:
        return parts[0]
    weights = [part.weights for part in parts if part.weights is not None]
    return Jagged(
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        weights=np.concatenate(weights) if weights else None,
    )


def as_jagged(name: str, bags: Any) -> Jagged:
    """Convert the values of a feature in a batch to a Jagged.

    These forms are accepted:

    - a Jagged,
    - an object with methods `values` and `lengths`, such as TorchRec's JaggedTensor,
    - a mapping with `values` and `lengths` or `offsets`, and perhaps `weights`,
    - an array, tensor or column of a data frame, with one value for each sample [n] or equally many [n, k],
    - a list of values, lists, arrays or tensors, or a nested tensor. None in a list means no value.

    Args:
        name: Name of the feature, for error messages.
        bags: Values in one of these forms.

    Raises:
        ShapeError: The object has none of these forms.
    """
    try:
        return _jagged(bags)
    except ShapeError as error:
        raise ShapeError(f"feature {name!r}: {error}") from None


def _jagged(bags: Any) -> Jagged:
    if isinstance(bags, Jagged):
        return bags
    is_nested = getattr(bags, "is_nested", False)  # torch's nested tensor has both methods too
    if not is_nested and all(
        callable(getattr(bags, method, None)) for method in ("values", "lengths")
    ):
        weighted = getattr(bags, "weights_or_none", lambda: None)()
        return Jagged(bags.values(), bags.lengths(), weights=weighted)
    if isinstance(bags, Mapping):
        return _of_parts(bags)
    array = as_plain(bags)
    if array.dtype == object and array.ndim == 1:
        items = array.tolist()
        if any(map(_is_list, set(map(type, items)))):
            return _of_lists(items)
    if array.ndim not in (1, 2):
        problem = f"has the shape {array.shape}" if array.ndim else f"is {bags!r:.60}"
        raise ShapeError(f"the array {problem}; it must be [n] or [n, k], values for each sample")
    width = 1 if array.ndim == 1 else array.shape[1]
    return Jagged(array, np.full(len(array), width, np.int64))


def _of_parts(parts: Mapping[str, Any]) -> Jagged:
    if "values" not in parts or parts.keys() - {"values", "lengths", "offsets", "weights"}:
        raise ShapeError(
            f"the dict has {', '.join(map(repr, parts)):.200}; it must have values, and lengths or offsets, "
            "and may have weights"
        )
    return Jagged(**parts)


def _is_list(kind: type) -> bool:
    """Return True if an object of this type holds several values. A text or bytes object is one value."""
    return not issubclass(kind, str | bytes) and (
        issubclass(kind, Sequence | np.ndarray) or hasattr(kind, "detach") or _is_column(kind)
    )


def _of_lists(bags: list[Any]) -> Jagged:
    rows = bags if set(map(type, bags)) <= {list, tuple} else list(map(_row, bags))
    dtypes = {row.dtype if isinstance(row, np.ndarray) else None for row in rows}
    if None in dtypes or len(dtypes) > 1:
        values = array_of(list(itertools.chain.from_iterable(rows)))
    else:
        values = np.concatenate(rows)
    return Jagged(values, np.fromiter(map(len, rows), np.int64, len(rows)))


def _row(bag: Any) -> Any:
    if bag is None:
        return []
    if isinstance(bag, list | tuple):
        return bag
    if not _is_list(type(bag)):
        return [bag]
    array = as_plain(bag)
    if array.ndim > 1:
        raise ShapeError(
            f"a sample's values have the shape {array.shape}; give [k], any number of values"
        )
    return array.reshape(-1)


def _factors(weights: Any) -> Floats:
    array = as_plain(weights).reshape(-1)
    kinds = set(map(type, array.tolist())) if array.dtype.kind not in "iufb" else ()
    if not all(issubclass(kind, int | float | np.integer | np.floating) for kind in kinds):
        raise ShapeError(f"the weights are {array.tolist()!r:.60}; they must be numbers")
    with np.errstate(over="ignore"):
        return array.astype(np.float32, copy=False)


def _lengths(values: ArrayLike | None) -> Lengths:
    lengths = _whole("lengths", values)
    if len(lengths) and int(lengths.min()) < 0:
        raise ShapeError(f"one of the lengths is {lengths.min()}; it must be at least 0")
    return lengths


def _between(offsets: ArrayLike) -> Lengths:
    ends = _whole("offsets", offsets)
    if len(ends) == 0 or ends[0] != 0:
        raise ShapeError(f"offsets begin with {ends[:1].tolist()}; they must begin with 0")
    lengths = np.diff(ends)
    if len(lengths) and int(lengths.min()) < 0:
        at = int(lengths.argmin())
        raise ShapeError(f"offset {ends[at + 1]} comes after {ends[at]}; they must ascend")
    return lengths


def _whole(name: str, values: ArrayLike | None) -> Lengths:
    array = as_plain(values).reshape(-1)
    if array.size and array.dtype.kind not in "iu":
        raise ShapeError(f"{name} have the dtype {array.dtype}; they must be whole numbers")
    return array.astype(np.int64, copy=False)


def as_plain(values: Any) -> NDArray[Any]:
    """Return values as an array, without changing their types.

    Values may be a list, an array, a torch tensor on any device, or a column of pandas, Polars or Arrow.
    Masked and null values become None. A list of lists becomes an array [n] of lists.

    Raises:
        ShapeError: The values cannot be read as an array.
    """
    if type(values) is np.ndarray:
        return values
    if isinstance(values, list | tuple):
        return array_of(values)
    if isinstance(values, np.ma.MaskedArray):
        values, mask = values.data.astype(object), np.ma.getmaskarray(values)
        values[mask] = None
    elif hasattr(values, "detach"):
        values = _of_tensor(values)
    elif _is_column(type(values)) and not isinstance(getattr(values, "dtype", None), np.dtype):
        values = values.to_pylist() if hasattr(values, "to_pylist") else values.to_list()
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        return array_of(values)
    try:
        return np.asarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise ShapeError(f"the values cannot be read as an array: {error}") from None


def _is_column(kind: type) -> bool:
    """Return True if objects of this type are columns of pandas, Polars or Arrow."""
    return hasattr(kind, "to_pylist") or hasattr(kind, "to_list")


def _of_tensor(tensor: Any) -> Any:
    """Convert a tensor to an array, or a nested tensor to a list of arrays."""
    try:
        if tensor.is_nested:
            return [row.detach().cpu().numpy() for row in tensor.unbind()]
        return tensor.detach().cpu().numpy()
    except (TypeError, RuntimeError) as error:  # a dtype that NumPy lacks, or a sparse tensor
        raise ShapeError(
            f"the tensor of {tensor.dtype} cannot be read as an array: {error}"
        ) from None


def array_of(values: Sequence[Any]) -> NDArray[Any]:
    """Return Python values as an array [n]: a numeric array if all have the same numeric type, else an
    object array.

    NumPy alone would turn numbers and NaN beside texts into texts, and integers beyond int64 into floats.
    """
    kinds = set(map(type, values))
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is int:
        with contextlib.suppress(OverflowError):
            return np.array(values, np.int64)
    if kind is float or (kind is not None and issubclass(kind, np.number)):
        return np.array(values)
    return np.fromiter(values, object, len(values)) if len(values) else np.empty(0, np.int64)
