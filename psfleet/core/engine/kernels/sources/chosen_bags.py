"""Kernels that copy selected bags out of a dataset's values, and convert int64 to int32 and back.

A *bag* is the values of one feature in one sample; bags lie one behind the other:

    values    a a a b c c         offsets   0 3 4 6
    chosen bags 2, 0       -->    out       c c a a a
"""
from numba import int64, void

import numpy as np

from psfleet.core.engine.kernels.intrinsics import (kernel, load_i64, prefetch, read_i64, read_u32, store_i64,
                                        store_u32)

AHEAD = 8


@kernel(void(int64, int64, int64, int64, int64, int64))
def copy(values, starts, lengths, bags, words, out):
    """Copy bags one behind the other: out = the values of bag 0, then those of bag 1, ...

    values: address of the values, each of `words` words of 32 bits. starts, lengths: int64 [bags], the
    position of each bag's first value, and its number of values.
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
    """Copy bags as `copy` does, converting int32 to int64. values: int32. out: int64."""
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
    """Convert int64 [count] to int32 [count]; return 0, or another number if a value does not fit."""
    # value ^ int32(value) is 0 only for a value that fits. Collecting these bits needs no branch.
    overflow = np.int64(0)
    for k in range(count):
        value = read_i64(values, k)
        store_u32(out, k, np.uint32(value))
        overflow |= value ^ np.int64(np.int32(value))
    return overflow


@kernel(void(int64, int64, int64, int64, int64))
def choose(offsets, rows, count, starts, lengths):
    """Write the start and length of each bag whose number is in `rows`.

    offsets: the position of the first value of each bag, and the end of the last bag. rows, starts, lengths:
    `count` numbers. All arrays are int64.
    """
    for k in range(count):
        row = read_i64(rows, k)
        start = read_i64(offsets, row)
        store_i64(starts, k, start)
        store_i64(lengths, k, read_i64(offsets, row + 1) - start)
