# ruff: noqa
# mypy: ignore-errors
from numba import int64, void

from psfleet.kernels.intrinsics import kernel, load_i64, prefetch, read_u32, store_u32

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
