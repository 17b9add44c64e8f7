"""Kernels between the ids of a batch and its distinct ids, and between rows and bags of rows.

    distinct rows  -- expand -->  rows of the batch       -- pool -->    one row for each bag
    sums           <-- merge --   gradients of the batch  <-- spread --  gradients of the bags

A *bag* is the ids of one feature in one sample. A *group* is the ids of one server; codes are those of
`dedup` in sources/dedup.py: group << shift | position.

Sums are added in the order of the batch in float32, so their bits depend neither on threads nor on the number
of servers. Rows and gradients may lie at any address. Rows are read in random order, so the row of the id
that is AHEAD places further on is prefetched. bag_rows.py does `expand` with `pool`, and `spread` with
`merge`, in one pass each.
"""
from numba import float32, int64, void

from psfleet.core.engine.kernels.intrinsics import (kernel, load_f32, load_i64, prefetch, prefetch_write,
                                        read_f32, read_i64, read_u32, store_f32, store_i64)

DIM = 4  # `width_kernels` of generate.py replaces this line
AHEAD = 16
LINES = min((DIM * 4 + 63) // 64, 8)


@kernel(void(int64, int64, int64, int64, int64))
def expand(inverse, n, shift, rows, out):
    """Copy rows from distinct ids to the batch: out[i] = the row of code i.

    inverse, shift: codes of the batch, which say which distinct id each id of the batch is. rows: int64
    [groups], the address of each group's rows, float32 [distinct ids of the group, DIM]. out: float32 [n,
    DIM].
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
    """Sum gradients by distinct id: sum of code i += gradients[i], in the order of the batch.

    inverse, shift: codes of the batch, which say which distinct id each id of the batch is. gradients:
    float32 [n, DIM]. sums: int64 [groups, 2]: for each group (server) the address of its sums, float32
    [distinct ids, DIM], and the number of sums that have a value already. The sums with a value come first;
    the memory behind them is uninitialised.
    """
    # Positions in a group count up in the order of first occurrence. So an id that occurs for the first time
    # always has the position behind the last sum that has a value. Its gradient is written instead of added,
    # so the caller need not clear the sums.
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
    """Pool rows: out[b] = scales[b] * sum of weights[i] * rows[i] over the rows i of bag b, in order.

    rows: float32 [n, DIM]. ends: int64 [bags], the end of each bag, which is the start of the next bag.
    weights: float32 [n]. scales: float32 [bags]. Address 0 for weights or scales means factors of 1. out:
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
