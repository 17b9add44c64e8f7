# ruff: noqa
# mypy: ignore-errors
from numba import float32, int64, void

from psfleet.kernels.intrinsics import (
    kernel,
    load_f32,
    load_i64,
    prefetch,
    prefetch_write,
    read_f32,
    read_i64,
    read_u32,
    store_f32,
    store_i64,
)

DIM = 4
AHEAD = 16
LINES = min((DIM * 4 + 63) // 64, 8)


@kernel(void(int64, int64, int64, int64, int64, int64, int64, int64, int64))
def pool(inverse, n, shift, rows, ends, bags, weights, scales, out):
    """`expand` of merge.py and then `pool` of bags.py, with the same bits."""
    low = (int64(1) << shift) - 1
    at = int64(0)
    for b in range(bags):
        to = out + b * (4 * DIM)
        end = load_i64(ends, b)
        while at < end:
            if at + AHEAD < n:
                code = int64(read_u32(inverse, at + AHEAD))
                ahead = read_i64(rows, code >> shift) + (code & low) * (4 * DIM)
                for line in range(LINES):
                    prefetch(ahead + line * 64)
            code = int64(read_u32(inverse, at))
            row = read_i64(rows, code >> shift) + (code & low) * (4 * DIM)
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


@kernel(void(int64, int64, int64, int64, int64, int64, int64, int64, int64))
def merge(inverse, n, shift, gradients, ends, bags, weights, scales, sums):
    """`spread` of bags.py and then `merge` of merge.py, with the same bits."""
    low = (int64(1) << shift) - 1
    at = int64(0)
    for b in range(bags):
        gradient = gradients + b * (4 * DIM)
        scale = float32(1) if scales == 0 else read_f32(scales, b)
        end = load_i64(ends, b)
        while at < end:
            if at + AHEAD < n:
                code = int64(read_u32(inverse, at + AHEAD))
                ahead = load_i64(sums, (code >> shift) * 2) + (code & low) * (4 * DIM)
                for line in range(LINES):
                    prefetch_write(ahead + line * 64)
            code = int64(read_u32(inverse, at))
            group, place = code >> shift, code & low
            row = load_i64(sums, group * 2) + place * (4 * DIM)
            weight = float32(1) if weights == 0 else read_f32(weights, at)
            if place == load_i64(sums, group * 2 + 1):
                store_i64(sums, group * 2 + 1, place + 1)
                for k in range(DIM):
                    store_f32(row, k, float32(0) + (read_f32(gradient, k) * scale) * weight)
            else:
                for k in range(DIM):
                    store_f32(row, k, load_f32(row, k) + (read_f32(gradient, k) * scale) * weight)
            at += 1
