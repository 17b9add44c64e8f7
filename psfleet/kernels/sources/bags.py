# ruff: noqa
# mypy: ignore-errors
from numba import float32, int64, void

from psfleet.kernels.intrinsics import kernel, load_f32, load_i64, read_f32, store_f32

DIM = 4


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
