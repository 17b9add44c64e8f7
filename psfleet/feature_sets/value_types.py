"""Values of a declared type: the same whole number, float32 or text from every file and request."""

import re
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import IdError
from psfleet.feature_sets.jagged import Jagged
from psfleet.feature_sets.value_hashes import distinct_values

Dtype = Literal["int", "float", "text"]
Mask = NDArray[np.bool_]

_WHOLE = re.compile(r"([+-]?[0-9]+)(?:\.0*)?")
_LARGEST = float(np.finfo(np.float32).max)
_WORDS = {"int": "whole number of 64 bits", "float": "finite number", "text": "text"}


def as_typed(owner: str, bags: Jagged, dtype: Dtype) -> Jagged:
    """The values in their declared type: int64, float32, or an object array of str.

    Values that are missing, None or NaN, are left out. What is of the type already stays as it is.

    Raises:
        IdError: A value is not of the type; the error quotes it.
    """
    values, missing, bad = typed(bags.values, dtype)
    if bad.any():
        [value] = bags.values[bad][:1].tolist()
        raise IdError(
            f"{owner} has the value {value!r:.80}, which is no {_WORDS[dtype]}; correct it, or declare "
            f"another dtype than {dtype!r}"
        )
    out = bags.with_values(values)
    return out.kept(~missing) if missing.any() else out


def typed(values: NDArray[Any], dtype: Dtype) -> tuple[NDArray[Any], Mask, Mask]:
    """The values in the type, and masks of those that are missing and of those that are not of it.

    Args:
        values: [n], of any kind.
        dtype: The type.

    Returns:
        values [n], arbitrary where a mask is true; missing and bad, bool [n].
    """
    kind = values.dtype.kind
    if dtype == "int" and kind in "iuf":
        return _whole_numbers(values)
    if dtype == "float" and kind in "iufb":
        return _floats(values)
    if dtype == "text" and kind in "iuU":
        texts = (values if kind == "U" else values.astype(str)).astype(object)
        return texts, _none(values), _none(values)
    return _one_by_one(values, dtype)


def _none(values: NDArray[Any]) -> Mask:
    return np.zeros(len(values), np.bool_)


def _whole_numbers(values: NDArray[Any]) -> tuple[NDArray[Any], Mask, Mask]:
    missing = bad = _none(values)
    if values.dtype.kind == "f":
        missing = np.isnan(values)
        bad = ~missing & ~((np.abs(values) < 2.0**63) & (values == np.floor(values)))
        values = np.where(missing | bad, 0, values)
    elif values.dtype == np.uint64:
        bad = values >= np.uint64(2**63)
    return values.astype(np.int64, copy=False), missing, bad


def _floats(values: NDArray[Any]) -> tuple[NDArray[Any], Mask, Mask]:
    with np.errstate(over="ignore"):
        floats = values.astype(np.float32, copy=False)
    return floats, np.isnan(floats), np.isinf(floats)


def _one_by_one(values: NDArray[Any], dtype: Dtype) -> tuple[NDArray[Any], Mask, Mask]:
    """Convert each distinct value."""
    items = values.tolist()
    if dtype == "text" and set(map(type, items)) <= {str}:
        return values, _none(values), _none(values)
    try:
        distinct, places = distinct_values(items)
    except TypeError:  # lists in lists
        return values, _none(values), np.array([not _is_plain(value) for value in items])
    outputs, missing, bad = [], np.zeros(len(distinct), np.bool_), np.zeros(len(distinct), np.bool_)
    convert, empty = _CONVERTERS[dtype]
    for at, value in enumerate(distinct):
        try:
            output = convert(value)
        except (ValueError, OverflowError):
            output, bad[at] = empty, True
        missing[at] = output is None
        outputs.append(empty if output is None else output)
    return np.array(outputs, _DTYPES[dtype])[places], missing[places], bad[places]


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | bytes | int | float)


def is_of(value: Any, dtype: Dtype) -> bool:
    """Return whether a single value can be read as this type, or is missing."""
    try:
        _CONVERTERS[dtype][0](value)
    except (ValueError, OverflowError):
        return False
    return True


def _is_missing(value: Any) -> bool:
    return value is None or value != value  # NaN


def _whole(value: Any) -> int | None:
    if _is_missing(value):
        return None
    number: int
    if isinstance(value, str | bytes):
        match = _WHOLE.fullmatch((value if isinstance(value, str) else value.decode()).strip())
        if match is None:
            raise ValueError(value)
        number = int(match[1])
    elif isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise ValueError(value)
    else:
        number = int(value)
    if not -(2**63) <= number < 2**63:
        raise ValueError(value)
    return number


def _float(value: Any) -> float | None:
    if _is_missing(value):
        return None
    if not isinstance(value, str | bytes | int | float):
        raise ValueError(value)
    number = float(value)
    if number != number:
        return None
    if not abs(number) <= _LARGEST:
        raise ValueError(value)
    return number


def _text(value: Any) -> str | None:
    if _is_missing(value):
        return None
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(value)
    return str(value)


_CONVERTERS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "int": (_whole, 0),
    "float": (_float, 0.0),
    "text": (_text, ""),
}
_DTYPES = {"int": np.int64, "float": np.float32, "text": object}
