"""Ids of values that have no vocabulary: their hashes."""

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import IdError
from psfleet.kernels.hashing import hash_ids

__all__ = ["hashed"]

Ids = NDArray[np.int64]


def hashed(values: NDArray[Any], buckets: int = 0, salt: str = "") -> Ids:
    """The id of each value, int64 [n]: the same in every process, on every machine.

    A text stands for the first 8 bytes of the BLAKE2b (RFC 7693) of its UTF-8, bytes likewise. Such a number
    and a whole number are mixed by splitmix64's finalizer, which maps no two numbers to one id.

    Args:
        values: Whole numbers of 64 bits, texts or bytes, [n].
        buckets: Ids are 0 to buckets - 1; 0: any int64.
        salt: Another text gives other ids.

    Raises:
        IdError: A value is none of these.
    """
    key = _digest(salt.encode()) if salt else 0
    if values.dtype.kind in "iu":
        numbers = values.astype(np.int64) ^ np.uint64(key).view(np.int64)
    elif values.size == 0:
        numbers = np.empty(0, np.int64)
    else:
        distinct, places = _distinct(values)
        found = [_digest(_bytes(value)) ^ key for value in distinct]
        numbers = np.array(found, np.uint64).view(np.int64)[places]
    mixed = hash_ids(numbers)
    return (mixed % np.uint64(buckets) if buckets else mixed).view(np.int64)


def _distinct(values: NDArray[Any]) -> tuple[list[Any], NDArray[np.intp]]:
    numbers: dict[Any, int] = {}
    places = [numbers.setdefault(value, len(numbers)) for value in values.tolist()]
    return list(numbers), np.array(places, np.intp)


def _digest(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise IdError(f"{value!r} cannot be hashed to an id; it must be a whole number or a text")
    return value.encode()
