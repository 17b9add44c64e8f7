from numba import int64, void

import numpy as np

from psfleet.core.engine.kernels.intrinsics import (kernel, load_i64, prefetch, read_i64, read_u32, store_i64,
                                        store_u32)

AHEAD = 8


@kernel(void(int64, int64, int64, int64, int64, int64))
def copy(values, starts, lengths, bags, words, out):
    """out = the values of bag 0, then those of bag 1, ...

    values: so many words of 32 bits each. starts, lengths: int64 [bags]: the first value of each bag, and
    how many it has.
    """
    to = out
    for b in range(bags):
        if b + AHEAD < bags:
            prefetch(values + load_i64(starts, b + AHEAD) * (4 * words))
        bag = values + load_i64(starts, b) * (4 * words)
        size = load_i64(lengths, b) * words
        for k in range(size):
            store_u32(to, k, read_u32(bag, k))
        to += 4 * size


@kernel(void(int64, int64, int64, int64, int64))
def widen(values, starts, lengths, bags, out):
    """Copy as `copy` does, values in int32 to values in int64."""
    to = out
    for b in range(bags):
        if b + AHEAD < bags:
            prefetch(values + load_i64(starts, b + AHEAD) * 4)
        bag = values + load_i64(starts, b) * 4
        size = load_i64(lengths, b)
        for k in range(size):
            store_i64(to, k, np.int64(np.int32(read_u32(bag, k))))
        to += 8 * size


@kernel(int64(int64, int64, int64))
def narrow(values, count, out):
    """out = the values, int64, as int32. Returns 0, or another number if some do not fit."""
    overflow = np.int64(0)
    for k in range(count):
        value = read_i64(values, k)
        store_u32(out, k, np.uint32(value))
        overflow |= value ^ np.int64(np.int32(value))
    return overflow


@kernel(void(int64, int64, int64, int64, int64))
def choose(offsets, rows, count, starts, lengths):
    """starts and lengths of the bags at `rows`, from the offsets of all bags. Everything is int64."""
    for k in range(count):
        row = read_i64(rows, k)
        start = read_i64(offsets, row)
        store_i64(starts, k, start)
        store_i64(lengths, k, read_i64(offsets, row + 1) - start)
