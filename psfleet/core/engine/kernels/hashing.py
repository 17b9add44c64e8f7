"""Hash of an id (splitmix64's finalizer) and the first values of a row, in kernels and in NumPy.

The hash is a bijection of 64 bits. It never collides, so tables keep only the hash and compute the id from
it. Its bits have one use each: the top 8 choose a table's segment, bits 40 to 49 the virtual shard, and the
low bits the chunk and the line of the index. First values are a function of the id, the table's stream and
the position, so every server, worker and replay gives a row the same bits.
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
_U = uint64  # a bare literal is int64, and int64 with uint64 makes float64


_STEP = np.float32(2.0**-24)


@helper
def mix(x):
    """Return the hash of a uint64."""
    x = (x ^ (x >> _U(30))) * _U(_FIRST)
    x = (x ^ (x >> _U(27))) * _U(_SECOND)
    return x ^ (x >> _U(31))


@helper
def unmix(x):
    """Return the uint64 whose hash is x."""
    x = (x ^ (x >> _U(31)) ^ (x >> _U(62))) * _U(_SECOND_INVERSE)
    x = (x ^ (x >> _U(27)) ^ (x >> _U(54))) * _U(_FIRST_INVERSE)
    return x ^ (x >> _U(30)) ^ (x >> _U(60))


def hash_ids(ids: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the hashes of ids, computed in NumPy."""
    x = np.ascontiguousarray(ids).view(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    return x ^ (x >> np.uint64(31))


def ids_of(hashes: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the ids with these hashes."""
    x = hashes
    x = (x ^ (x >> np.uint64(31)) ^ (x >> np.uint64(62))) * np.uint64(_SECOND_INVERSE)
    x = (x ^ (x >> np.uint64(27)) ^ (x >> np.uint64(54))) * np.uint64(_FIRST_INVERSE)
    ids: NDArray[np.int64] = (x ^ (x >> np.uint64(30)) ^ (x >> np.uint64(60))).view(np.int64)
    return ids


def drawn(ids: NDArray[np.int64], probability: float, stream: int, step: int) -> NDArray[np.bool_]:
    """Draw ids, each with this probability, by a hash of id, stream and step; return their mask."""
    salt = np.uint64((stream + step * GOLDEN) % 2**64)
    fraction = hash_ids((hash_ids(ids) ^ salt).view(np.int64)) >> np.uint64(11)
    return fraction < np.uint64(probability * 2**53)


CONSTANT, UNIFORM, NORMAL, TRUNCATED = 0, 1, 2, 3


@helper
def normal_of(bits):
    """Return a number of the standard normal distribution, computed from 64 random bits by Box and Muller."""
    radius = (int64(bits >> _U(32)) + 1) * 2.0**-32
    angle = int64(bits & _U(0xFFFFFFFF)) * 2.0**-32
    return math.sqrt(-2.0 * math.log(radius)) * math.cos(2.0 * math.pi * angle)


@helper
def fill_row(out, hash_, dim, kind, low, span, stream):
    """Write the `dim` first values of the row whose id has the hash `hash_` to the address `out`.

    Value k comes from the k-th number of a splitmix64 generator that is seeded by id and stream.
    Uniform: 24 bits to [low, low + span), in float32. Normal: mean `low`, deviation `span`.
    Truncated: the same, drawn again while it is further than two deviations from the mean.
    Constant: low.
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
