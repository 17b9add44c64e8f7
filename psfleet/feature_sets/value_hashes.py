"""Hashes of values: the ids of a feature whose values are not ids."""

import hashlib
import re
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from psfleet.errors import IdError
from psfleet.kernels.hashing import hash_ids
from psfleet.validation.annotations import NonNegativeInt, checked

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
