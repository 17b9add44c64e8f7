"""The dtypes that variables can have."""

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from psfleet.errors import ShapeError

__all__ = ["dtype_of", "usual_dtype"]

_KINDS: dict[str, np.dtype[Any]] = {
    "f": np.dtype(np.float32),
    "i": np.dtype(np.int64),
    "u": np.dtype(np.int64),
    "b": np.dtype(np.bool_),
}


def dtype_of(dtype: DTypeLike) -> np.dtype[Any]:
    """A dtype by name.

    Raises:
        ShapeError: It is none that variables can have.
    """
    try:
        found = np.dtype(dtype)
    except TypeError:
        found = np.dtype(object)
    if found not in (np.float32, np.float64, np.int64, np.int32, np.bool_):
        raise ShapeError(f"dtype {dtype!r} is unknown; use float32, float64, int64, int32 or bool")
    return found


def usual_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """What values of this dtype become if nothing else is said: float32, int64 or bool.

    Raises:
        ShapeError: They are no numbers.
    """
    kind = _KINDS.get(dtype.kind)
    if kind is None:
        raise ShapeError(f"a variable cannot hold values of dtype {dtype}")
    return kind
