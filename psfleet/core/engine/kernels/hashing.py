"""Hash of an id and initial values of a row, computed the same way in kernels and in NumPy.

The hash is the finalizer of splitmix64. It maps 64 bits to 64 bits one to one, so no two ids have the same
hash, and tables store only the hash and compute the id from it. Each range of bits has one use:

    bits 56 to 63   segment of the table (snapshots and sweeps go by segment)
    bits 40 to 49   virtual shard, which decides the server (id_routing.py)
    low bits        chunk and line in the index (hash_index.py)

Initial values are a function of the id, the table's stream (its random seed) and the position in the row. So
every server, every worker and a replay of a log give a row identical bits.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import math

import numpy as np
from numba import int64, uint64
from numpy.typing import NDArray

from psfleet.core.engine.kernels.intrinsics import helper, store_f32

GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_FIRST_INVERSE, _SECOND_INVERSE = 0x96DE1B173F119089, 0x319642B2D24D8EC3


_U = uint64  # in numba, a bare literal is int64, and int64 with uint64 gives float64


_STEP = np.float32(2.0**-24)


@helper
def mix(x):
    """Return the hash of a uint64."""
    x = (x ^ (x >> _U(30))) * _U(_FIRST)
    x = (x ^ (x >> _U(27))) * _U(_SECOND)
    return x ^ (x >> _U(31))


@helper
def unmix(x):
    """Return the uint64 whose hash is x, the inverse of `mix`."""
    x = (x ^ (x >> _U(31)) ^ (x >> _U(62))) * _U(_SECOND_INVERSE)
    x = (x ^ (x >> _U(27)) ^ (x >> _U(54))) * _U(_FIRST_INVERSE)
    return x ^ (x >> _U(30)) ^ (x >> _U(60))


def hash_ids(ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the hash of each id, as `mix` computes it."""
    x = np.ascontiguousarray(ids).view(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return x ^ (x >> np.uint64(31))


def ids_of(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the id of each hash, the inverse of `hash_ids`."""
    x = hashes
    x = (x ^ (x >> np.uint64(31)) ^ (x >> np.uint64(62))) * np.uint64(_SECOND_INVERSE)
    x = (x ^ (x >> np.uint64(27)) ^ (x >> np.uint64(54))) * np.uint64(_FIRST_INVERSE)
    ids: NDArray[np.int64] = (x ^ (x >> np.uint64(30)) ^ (x >> np.uint64(60))).view(np.int64)
    return ids


def drawn(ids: NDArray[np.int64], probability: float, stream: int, step: int) -> NDArray[np.bool_]:
    """Select each id with this probability; return the mask of the selected ids.

    The selection is a hash of id, stream and step, so a repeated call selects the same ids.
    """
    salt = np.uint64((stream + step * GOLDEN) % 2**64)
    fraction = hash_ids((hash_ids(ids) ^ salt).view(np.int64)) >> np.uint64(11)
    return fraction < np.uint64(probability * 2**53)


CONSTANT, UNIFORM, NORMAL, TRUNCATED = 0, 1, 2, 3


@helper
def normal_of(bits):
    """Return a number of the standard normal distribution, computed from 64 random bits (Box-Muller)."""
    radius = (int64(bits >> _U(32)) + 1) * 2.0**-32
    angle = int64(bits & _U(0xFFFFFFFF)) * 2.0**-32
    return math.sqrt(-2.0 * math.log(radius)) * math.cos(2.0 * math.pi * angle)


@helper
def fill_row(out, hash_, dim, kind, low, span, stream):
    """Write the `dim` initial values of the row whose id has the hash `hash_` to the address `out`.

    Value k comes from number k of a splitmix64 generator whose seed is mixed from the id and the stream:

        UNIFORM     24 bits, mapped to [low, low + span) in float32
        NORMAL      mean `low`, standard deviation `span`
        TRUNCATED   as NORMAL, drawn again while it is more than two deviations from the mean
        CONSTANT    low
    """
    seed = mix(hash_ ^ stream)
    if kind == CONSTANT:
        for k in range(dim):
            store_f32(out, k, np.float32(low))
    elif kind == UNIFORM:
        start, width = np.float32(low), np.float32(span)
        for k in range(dim):
            bits = mix(seed + uint64(k + 1) * _U(GOLDEN))
            store_f32(out, k, start + np.float32(int64(bits >> _U(40))) * _STEP * width)
    else:
        for k in range(dim):
            bits = mix(seed + uint64(k + 1) * _U(GOLDEN))
            value = normal_of(bits)
            while kind == TRUNCATED and abs(value) > 2.0:
                bits = mix(bits + _U(GOLDEN))
                value = normal_of(bits)
            store_f32(out, k, np.float32(low + span * value))
