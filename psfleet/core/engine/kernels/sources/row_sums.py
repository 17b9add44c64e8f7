"""Kernels between the ids of a batch and its distinct ids, and between rows and bags of rows.

    distinct rows  -- expand -->  rows of the batch       -- pool -->    one row for each bag
    sums           <-- merge --   gradients of the batch  <-- spread --  gradients of the bags

Sums are added in the order of the batch in float32, so their bits depend on no thread and no group. Rows and
gradients may lie at any address. The row of the id that is AHEAD further on is prefetched, as rows are read
in random order. bag_rows.py has `expand` with `pool`, and `spread` with `merge`, without the array between
them.
"""
from numba import float32, int64, void

from psfleet.core.engine.kernels.intrinsics import (kernel, load_f32, load_i64, prefetch, prefetch_write,
                                        read_f32, read_i64, read_u32, store_f32, store_i64)

DIM = 4
AHEAD = 16
LINES = min((DIM * 4 + 63) // 64, 8)


@kernel(void(int64, int64, int64, int64, int64))
def expand(inverse, n, shift, rows, out):
    """Copy rows from distinct ids to the batch: out[i] = the row that code i names.

    inverse, shift: codes of the batch, see sources/dedup.py. rows: int64 [groups], the address of each
    group's rows, float32 [distinct ids of the group, DIM]. out: float32 [n, DIM].
    """
    low = (int64(1) << shift) - 1
    for i in range(n):
        if i + AHEAD < n:
            code = int64(read_u32(inverse, i + AHEAD))
            ahead = read_i64(rows, code >> shift) + (code & low) * (4 * DIM)
            for line in range(LINES):
                prefetch(ahead + line * 64)
        code = int64(read_u32(inverse, i))
        row = read_i64(rows, code >> shift) + (code & low) * (4 * DIM)
        to = out + i * (4 * DIM)
        for k in range(DIM):
            store_f32(to, k, read_f32(row, k))


@kernel(void(int64, int64, int64, int64, int64))
def merge(inverse, n, shift, gradients, sums):
    """Sum gradients by distinct id: add gradient i to the row that code i names, in the order of the batch.

    gradients: float32 [n, DIM]. sums: int64 [groups, 2]: for each group the address of its sums, float32
    [distinct ids, DIM], and the number of sums that have been begun. The sums behind these are uninitialised.
    """
    # Codes number the ids of a group in first-seen order, so a row that occurs for the first time is always
    # number `begun`. It is written instead of added to, so the caller need not clear the sums.
    low = (int64(1) << shift) - 1
    for i in range(n):
        if i + AHEAD < n:
            code = int64(read_u32(inverse, i + AHEAD))
            ahead = load_i64(sums, (code >> shift) * 2) + (code & low) * (4 * DIM)
            for line in range(LINES):
                prefetch_write(ahead + line * 64)
        code = int64(read_u32(inverse, i))
        group, place = code >> shift, code & low
        row = load_i64(sums, group * 2) + place * (4 * DIM)
        gradient = gradients + i * (4 * DIM)
        if place == load_i64(sums, group * 2 + 1):
            store_i64(sums, group * 2 + 1, place + 1)
            for k in range(DIM):
                store_f32(row, k, float32(0) + read_f32(gradient, k))  # -0 becomes 0, as in a sum
        else:
            for k in range(DIM):
                store_f32(row, k, load_f32(row, k) + read_f32(gradient, k))


@kernel(void(int64, int64, int64, int64, int64, int64))
def pool(rows, ends, bags, weights, scales, out):
    """Pool rows: out[b] = scales[b] * (weights[i] * rows[i], summed in order over the rows i of bag b).

    rows: float32 [n, DIM]. ends: int64 [bags], the end of each bag; it begins where the bag before it ends.
    weights: float32 [n]. scales: float32 [bags]. An address 0 of these two stands for factors of 1. out:
    float32 [bags, DIM], which the caller has zeroed.
    """
    at = int64(0)
    for b in range(bags):
        to = out + b * (4 * DIM)
        end = load_i64(ends, b)
        while at < end:
            row = rows + at * (4 * DIM)
            if weights == 0:
                for k in range(DIM):
                    store_f32(to, k, load_f32(to, k) + read_f32(row, k))
            else:
                weight = read_f32(weights, at)
                for k in range(DIM):
                    store_f32(to, k, load_f32(to, k) + weight * read_f32(row, k))
            at += 1
        if scales != 0:
            scale = read_f32(scales, b)
            for k in range(DIM):
                store_f32(to, k, load_f32(to, k) * scale)


@kernel(void(int64, int64, int64, int64, int64, int64))
def spread(gradients, ends, bags, weights, scales, out):
    """Compute the gradients of `pool`: out[i] = gradients[b] * scales[b] * weights[i] for row i of bag b.

    gradients: float32 [bags, DIM]. out: float32 [n, DIM]. ends, bags, weights, scales: as for `pool`.
    """
    at = int64(0)
    for b in range(bags):
        gradient = gradients + b * (4 * DIM)
        scale = float32(1) if scales == 0 else read_f32(scales, b)
        end = load_i64(ends, b)
        while at < end:
            to = out + at * (4 * DIM)
            weight = float32(1) if weights == 0 else read_f32(weights, at)
            for k in range(DIM):
                store_f32(to, k, (read_f32(gradient, k) * scale) * weight)
            at += 1
