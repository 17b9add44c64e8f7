"""Values of a declared type: the same from every file and request; and their hashes, which are ids."""

import hashlib
import re
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from psfleet.core.base.errors import IdError
from psfleet.core.base.validation.annotations import NonNegativeInt, checked
from psfleet.core.engine.kernels.hashing import hash_ids
from psfleet.data.feature_sets.jagged import Jagged

Ids = NDArray[np.int64]

_WHOLE = re.compile(rb"0|-?[1-9][0-9]{0,19}")


@checked
def hashed(values: ArrayLike, buckets: NonNegativeInt = 0, salt: str = "") -> Ids:
    """The id of each value, int64 [n]: the same in every process, on every machine.

    A text that is a whole number of 64 bits as computers write it, such as "15", stands for that number,
    since files and messages have ids either way. Another text ("015", "red") stands for the first 8 bytes of
    the BLAKE2b (RFC 7693) of its UTF-8. Bytes are as texts. The numbers are mixed by splitmix64's finalizer,
    which maps no two numbers to one id.

    Args:
        values: Whole numbers of 64 bits, texts or bytes, [n].
        buckets: Ids are 0 to buckets - 1; 0: any int64.
        salt: Another text gives other ids.

    Raises:
        IdError: A value is none of these.
    """
    values = np.asarray(values)
    key = _digest(salt.encode()) if salt else 0
    if values.dtype.kind in "iu":
        numbers = values.astype(np.int64) ^ np.uint64(key).view(np.int64)
    elif values.size == 0:
        numbers = np.empty(0, np.int64)
    else:
        try:
            distinct, places = distinct_values(values.tolist())
        except TypeError:
            raise IdError(f"{values.tolist()!r} cannot be hashed to ids; give texts, [n]") from None
        keys = [_number(value) ^ key for value in distinct]
        numbers = np.array(keys, np.uint64).view(np.int64)[places]
    hashes = hash_ids(numbers)
    return (hashes % np.uint64(buckets) if buckets else hashes).view(np.int64)


def distinct_values(values: list[Any]) -> tuple[list[Any], NDArray[np.intp]]:
    """Each value once, and the place of each of them in that list, [n]. 1, 1.0 and True are three values.

    Raises:
        TypeError: A value is a list.
    """
    numbers: dict[Any, int] = {}
    if (
        len({int, float, bool}.intersection(map(type, values))) > 1
    ):  # equal ones are one key of a dict
        places = [numbers.setdefault((type(value), value), len(numbers)) for value in values]
        return [value for _, value in numbers], np.array(places, np.intp)
    places = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), np.array(places, np.intp)


def _digest(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _number(value: Any) -> int:
    """Return the unsigned number for a value."""
    if isinstance(value, str | bytes):
        text = value.encode() if isinstance(value, str) else value
        whole = int(text) if _WHOLE.fullmatch(text) else None
        return _digest(text) if whole is None or not _fits(whole) else whole % 2**64
    if isinstance(value, int) and not isinstance(value, bool) and _fits(value):
        return value % 2**64
    raise IdError(f"{value!r} cannot be hashed to an id; it must be a whole number or a text")


def _fits(number: int) -> bool:
    return -(2**63) <= number < 2**64


def are_value(values: NDArray[Any], value: int | str) -> NDArray[np.bool_]:
    """Return a mask of the values, [n], numbers or texts, that are this one, whichever of the two it is."""
    text = str(value)
    whole = int(text) if _WHOLE.fullmatch(text.encode()) else None
    if values.dtype.kind not in "OUS":
        return np.asarray(values == whole) if whole is not None else np.zeros(len(values), bool)
    same = np.asarray(values == (text.encode() if values.dtype.kind == "S" else text))
    return same | (values == whole) if values.dtype.kind == "O" and whole is not None else same


Dtype = Literal["int", "float", "text"]
Mask = NDArray[np.bool_]

_WRITTEN_WHOLE = re.compile(r"([+-]?[0-9]+)(?:\.0*)?")
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
        match = _WRITTEN_WHOLE.fullmatch(
            (value if isinstance(value, str) else value.decode()).strip()
        )
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
