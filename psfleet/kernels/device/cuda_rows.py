"""The rows of a sparse table on a CUDA device: kernels that read, set and begin them.

A row is `stride` float32, weights first, then state, then scores; `rows` is all of them, flat.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined,misc"

from numba import cuda, float32, int64

from psfleet.kernels.device.cuda_arithmetic import (
    device_function,
    mix,
    random_bits,
    rounded_product,
)

STEP = float32(2.0**-24)


@device_function
def first_value(hash_, k, low, span, stream):
    """Value k of a new row: as `fill_row` of psfleet.kernels.hashing, constant or uniform."""
    fraction = rounded_product(float32(random_bits(hash_, stream, k)), STEP)
    return low + rounded_product(fraction, span)


@cuda.jit
def gather(rows, stride, slots, n, out):
    """out[i] = row slots[i]. n: values in all."""
    for place in range(cuda.grid(1), n, cuda.gridsize(1)):
        i = place // stride
        out[place] = rows[slots[i] * stride + place - i * stride]


@cuda.jit
def scatter(rows, stride, slots, n, width, values):
    """The first `width` values of row slots[i] = values[i]. n: values in all."""
    for place in range(cuda.grid(1), n, cuda.gridsize(1)):
        i = place // width
        rows[slots[i] * stride + place - i * width] = values[place]


@cuda.jit
def weights(rows, stride, ids, slots, n, dim, low, span, stream, out):
    """out[i] = the weights of ids[i], or its first values. n: values in all."""
    for place in range(cuda.grid(1), n, cuda.gridsize(1)):
        i = place // dim
        k = place - i * dim
        if slots[i] != 0:
            out[place] = rows[slots[i] * stride + k]
        else:
            out[place] = first_value(mix(ids[i]), k, low, span, stream)


@cuda.jit
def begin(rows, stride, ids, slots, fresh, n, dim, low, span, stream, state):
    """Give each fresh row its first values. state: float32 [stride], what stands behind the weights."""
    for place in range(cuda.grid(1), n * stride, cuda.gridsize(1)):
        i = place // stride
        k = place - i * stride
        if fresh[i] != 0:
            value = state[k]
            if k < dim:
                value = first_value(mix(ids[i]), k, low, span, stream)
            rows[slots[i] * stride + k] = value


@cuda.jit
def add_scores(rows, stride, slots, n, place, scores, gradients, dim):
    """Add the values behind each gradient to those at `place` of its row."""
    for one in range(cuda.grid(1), n * scores, cuda.gridsize(1)):
        i = one // scores
        k = one - i * scores
        rows[slots[i] * stride + place + k] += gradients[i * (dim + scores) + dim + k]


@cuda.jit
def merge(codes, n, width, gradients, sums):
    """Add gradient i to row codes[i] of `sums`. No code comes twice: one launch for each push, in order.

    n: values in all.
    """
    for place in range(cuda.grid(1), n, cuda.gridsize(1)):
        i = place // width
        sums[int64(codes[i]) * width + place - i * width] += gradients[place]


@cuda.jit
def scale(values, n, width, dim, factor):
    """Multiply the first `dim` values of each row of `width` by `factor`. n: values in all."""
    for place in range(cuda.grid(1), n, cuda.gridsize(1)):
        if place % width < dim:
            values[place] = rounded_product(values[place], factor)


@cuda.jit
def mark(slots, n, marks, value):
    """marks[slots[i]] = value."""
    for i in range(cuda.grid(1), n, cuda.gridsize(1)):
        marks[slots[i]] = value
