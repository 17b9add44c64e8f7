from numba import float32, int64, void

from psfleet.core.engine.kernels.intrinsics import (kernel, load_f32, load_i64, prefetch, prefetch_write,
                                        read_f32, read_i64, read_u32, store_f32, store_i64)

DIM = 4
AHEAD = 16
LINES = min((DIM * 4 + 63) // 64, 8)


@kernel(void(int64, int64, int64, int64, int64))
def expand(inverse, n, shift, rows, out):
    """out[i] = the row that code i names; rows: address of each group's rows."""
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
    """Add gradient i to the row that code i names.

    sums: of each group the address of its rows, and how many of them are begun; the others hold anything.
    Places ascend in the order in which they first come.
    """
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
                store_f32(row, k, float32(0) + read_f32(gradient, k))  # 0 + -0 is 0
        else:
            for k in range(DIM):
                store_f32(row, k, load_f32(row, k) + read_f32(gradient, k))


@kernel(void(int64, int64, int64, int64, int64, int64))
def pool(rows, ends, bags, weights, scales, out):
    """out[b] = (the sum of a bag's rows, each times its weight, in order) times the bag's scale.

    ends: int64, where each bag ends; a bag begins where the one before it ends. weights, scales: address
    of float32, 0 for none. out: float32 [bags, DIM], zeroed.
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
    """out[i] = the gradient of the bag of row i, times the bag's scale, times the row's weight.

    gradients: float32 [bags, DIM]. The others as for `pool`; out has a row for each row of the bags.
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
