"""The hash of an id: splitmix64's finalizer, a bijection of 64 bits.

Being a bijection it never collides, so the tables keep only the hash and get the id back from it.
Its bits have one use each: the top 8 choose a table's segment, bits 40 to 49 the virtual shard,
the low ones the chunk and the line of its index.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import numpy as np
from numba import uint64
from numpy.typing import NDArray

from psfleet.kernels.intrinsics import helper

__all__ = ["GOLDEN", "drawn", "hash_ids", "ids_of", "mix", "unmix"]

GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_FIRST_INVERSE, _SECOND_INVERSE = 0x96DE1B173F119089, 0x319642B2D24D8EC3
_U = uint64  # a bare literal is int64, and int64 with uint64 makes float64


@helper
def mix(x):
    """uint64 -> its hash."""
    x = (x ^ (x >> _U(30))) * _U(_FIRST)
    x = (x ^ (x >> _U(27))) * _U(_SECOND)
    return x ^ (x >> _U(31))


@helper
def unmix(x):
    """The uint64 whose hash is x."""
    x = (x ^ (x >> _U(31)) ^ (x >> _U(62))) * _U(_SECOND_INVERSE)
    x = (x ^ (x >> _U(27)) ^ (x >> _U(54))) * _U(_FIRST_INVERSE)
    return x ^ (x >> _U(30)) ^ (x >> _U(60))


def hash_ids(ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The hashes of `ids`, in plain NumPy."""
    x = np.ascontiguousarray(ids).view(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return x ^ (x >> np.uint64(31))


def ids_of(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The opposite of `hash_ids`."""
    x = hashes
    x = (x ^ (x >> np.uint64(31)) ^ (x >> np.uint64(62))) * np.uint64(_SECOND_INVERSE)
    x = (x ^ (x >> np.uint64(27)) ^ (x >> np.uint64(54))) * np.uint64(_FIRST_INVERSE)
    ids: NDArray[np.int64] = (x ^ (x >> np.uint64(30)) ^ (x >> np.uint64(60))).view(np.int64)
    return ids


def drawn(ids: NDArray[np.int64], probability: float, stream: int, step: int) -> NDArray[np.bool_]:
    """Which ids a draw takes: each with this probability, by a hash of id, stream and step."""
    salt = np.uint64((stream + step * GOLDEN) % 2**64)
    fraction = hash_ids((hash_ids(ids) ^ salt).view(np.int64)) >> np.uint64(11)
    return fraction < np.uint64(probability * 2**53)
