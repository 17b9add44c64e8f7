"""Kernels on the rows of a sparse table on a CUDA device: read, write and initialise rows, also in 16 bits.

A row is `stride` float32, and `rows` is the flat array of all rows. A slot is the number of a row:

    rows     [ row 0 | row 1 | row 2 | ... ]        row slots[i] begins at rows[slots[i] * stride]
    row      [ weights | state | scores ]

For packed rows `halves` (uint16) is a view of the same memory, with columns as in
psfleet.core.engine.kernels.row_format; `wide` has rows in float32 for the rule. In most kernels a thread
handles single values and not rows, so that neighbouring threads access neighbouring addresses. In these
kernels `n` is the number of all values.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined,misc"

from numba import cuda, float32, int64, uint16, uint32

from psfleet.core.engine.kernels.device.cuda_arithmetic import (
    bits_of,
    device_function,
    drawn,
    float_of,
    mix,
    nearest,
    noise,
    random_base,
    random_bits,
    rounded_product,
)

STEP = float32(2.0**-24)


HALF = uint32(16)  # bits


@device_function
def first_value(hash_, k, low, span, stream):
    """Return value k of a new row, constant or uniform, as `fill_row` of hashing.py computes it."""
    fraction = rounded_product(float32(random_bits(hash_, stream, k)), STEP)
    return low + rounded_product(fraction, span)


@cuda.jit
def gather(rows, stride, slots, n, out):
    """Copy rows: out[i] = row number slots[i].

    slots: int64 [rows]. out: float32 [rows, stride]. n: number of all values of these rows.
    """
    for place in range(cuda.grid(1), n, cuda.gridsize(1)):
        i = place // stride
        out[place] = rows[slots[i] * stride + place - i * stride]


@cuda.jit
def scatter(rows, stride, slots, n, width, values):
    """Overwrite the first `width` values of row number slots[i] with values[i].

    slots: int64 [rows]. values: float32 [rows, width]. n: number of all values in `values`.
    """
    for place in range(cuda.grid(1), n, cuda.gridsize(1)):
        i = place // width
        rows[slots[i] * stride + place - i * width] = values[place]


@cuda.jit
def weights(rows, stride, ids, slots, n, dim, low, span, stream, out):
    """Write out[i] = the weights of ids[i], or the initial weights if slots[i] is 0.

    ids, slots: int64 [rows], the ids and their row numbers, 0 for an id without a row. low, span, stream: the
    initializer. out: float32 [rows, dim]. n: number of all values in `out`.
    """
    for place in range(cuda.grid(1), n, cuda.gridsize(1)):
        i = place // dim
        k = place - i * dim
        if slots[i] != 0:
            out[place] = rows[slots[i] * stride + k]
        else:
            out[place] = first_value(mix(ids[i]), k, low, span, stream)


@cuda.jit
def begin(rows, stride, ids, slots, fresh, n, dim, low, span, stream, state):
    """Write the initial values of each new row: row number slots[i], if fresh[i] is 1. n: number of ids.

    low, span, stream: the initializer of the weights. state: float32 [stride], a row with the initial values
    of optimizer state and scores behind its weights.
    """
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
    """Add the scores (shows and clicks) behind each gradient to the scores of its row. n: number of rows.

    row slots[i]    [ ...        | scores ]     scores begin at `place`
    gradient i      [ dim values | scores ]     `scores` is their number
    """
    for one in range(cuda.grid(1), n * scores, cuda.gridsize(1)):
        i = one // scores
        k = one - i * scores
        rows[slots[i] * stride + place + k] += gradients[i * (dim + scores) + dim + k]


@cuda.jit
def merge(codes, n, width, gradients, sums):
    """Add gradient i to row codes[i] of `sums`. n: number of all values of the gradients.

    A launch must not name a row of `sums` twice, because two threads would add to it at once. So each push
    has a launch of its own; this also fixes the order of additions.
    """
    for place in range(cuda.grid(1), n, cuda.gridsize(1)):
        i = place // width
        sums[int64(codes[i]) * width + place - i * width] += gradients[place]


@cuda.jit
def scale(values, n, width, dim, factor):
    """Multiply the first `dim` values of each row of `width` by `factor`. n: number of all values."""
    for place in range(cuda.grid(1), n, cuda.gridsize(1)):
        if place % width < dim:
            values[place] = rounded_product(values[place], factor)


@cuda.jit
def mark(slots, n, marks, value):
    """Set marks[slots[i]] to `value` for each i below n."""
    for i in range(cuda.grid(1), n, cuda.gridsize(1)):
        marks[slots[i]] = value


@cuda.jit
def widen(rows, halves, stride, slots, n, is_half, word, count, wide, width, place):
    """Copy a column (the weights, or one state value) of each row to `wide`, as float32.

    n: number of all values.

    row slots[i]    `count` values from word `word` on: float32, or bfloat16 if is_half
    wide[i]         `count` values from value `place` on; a row of `wide` has `width` values
    """
    for one in range(cuda.grid(1), n, cuda.gridsize(1)):
        i = one // count
        k = one - i * count
        at = slots[i] * stride + word
        to = i * width + place + k
        if is_half:
            wide[to] = float_of(uint32(halves[2 * at + k]) << HALF)
        else:
            wide[to] = rows[at + k]


@cuda.jit
def narrow(
    rows, halves, stride, slots, ids, n, is_half, word, count, wide, width, place, stream, step
):
    """Copy a column (the weights, or one state value) from `wide` to the rows, rounded as by row_rounding.py.

    The reverse of `widen`, with the same arguments. ids: int64 [rows]. stream, step: seed of the rounding.
    """
    for one in range(cuda.grid(1), n, cuda.gridsize(1)):
        i = one // count
        k = one - i * count
        at = slots[i] * stride + word
        value = wide[i * width + place + k]
        if is_half:
            random = noise(random_base(mix(ids[i]), stream, step), place + k)
            halves[2 * at + k] = uint16(drawn(bits_of(value), random))
        else:
            rows[at + k] = value


@cuda.jit
def packed_begin(halves, stride, ids, slots, fresh, n, dim, low, span, stream):
    """Write the initial weights of each new row in bfloat16: row number slots[i], if fresh[i] is 1.

    n: number of all weights of these rows. Other arguments as for `begin`, with `halves` instead of `rows`.
    """
    for one in range(cuda.grid(1), n, cuda.gridsize(1)):
        i = one // dim
        k = one - i * dim
        if fresh[i] != 0:
            value = first_value(mix(ids[i]), k, low, span, stream)
            halves[2 * slots[i] * stride + k] = uint16(nearest(bits_of(value)))


@cuda.jit
def packed_weights(halves, stride, ids, slots, n, dim, low, span, stream, out):
    """Write out[i] = the weights of ids[i], stored in bfloat16, or the initial weights if slots[i] is 0.

    Arguments as for `weights`, with `halves` instead of `rows`.
    """
    for one in range(cuda.grid(1), n, cuda.gridsize(1)):
        i = one // dim
        k = one - i * dim
        short = uint32(halves[2 * int64(slots[i]) * stride + k])
        if slots[i] == 0:
            short = uint32(nearest(bits_of(first_value(mix(ids[i]), k, low, span, stream))))
        out[one] = float_of(uint32(short << HALF))
