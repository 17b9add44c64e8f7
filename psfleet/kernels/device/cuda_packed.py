"""Rows in 16 and 8 bits of a sparse table on a CUDA device: kernels that read, store and begin them.

`rows` is all of them as float32, flat, `stride` to a row; `halves` (uint16) and `codes` (int8) are the same
memory. Columns are those of psfleet.kernels.packed_text. `wide` has rows as float32 while a rule is at work.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,attr-defined,misc"

from numba import cuda, float32, int64, uint16, uint32

from psfleet.kernels.device.cuda_arithmetic import mix, rounded_product
from psfleet.kernels.device.cuda_rounding import (
    bits_of,
    code_of,
    drawn,
    float_of,
    nearest,
    noise,
    random_base,
    scale_of,
)
from psfleet.kernels.device.cuda_rows import first_value

FLOAT32, BFLOAT16 = 0, 1  # other forms are int8
MAGNITUDE = uint32(0x7FFFFFFF)
HALF = uint32(16)  # bits


@cuda.jit
def widen(rows, halves, codes, stride, slots, n, form, word, count, wide, width, place):
    """wide[i] from `place` on = a column of row slots[i], which begins at `word` of it. n: values in all."""
    for one in range(cuda.grid(1), n, cuda.gridsize(1)):
        i = one // count
        k = one - i * count
        at = slots[i] * stride + word
        to = i * width + place + k
        if form == FLOAT32:
            wide[to] = rows[at + k]
        elif form == BFLOAT16:
            wide[to] = float_of(uint32(halves[2 * at + k]) << HALF)
        else:
            wide[to] = rounded_product(float32(codes[4 * at + 4 + k]), rows[at])


@cuda.jit
def narrow(
    rows, halves, stride, slots, ids, n, form, word, count, wide, width, place, stream, step
):
    """The opposite of `widen` for columns without codes; see psfleet.kernels.rounding."""
    for one in range(cuda.grid(1), n, cuda.gridsize(1)):
        i = one // count
        k = one - i * count
        at = slots[i] * stride + word
        value = wide[i * width + place + k]
        if form == FLOAT32:
            rows[at + k] = value
        else:
            random = noise(random_base(mix(ids[i]), stream, step), place + k)
            halves[2 * at + k] = uint16(drawn(bits_of(value), random))


@cuda.jit
def narrow_codes(rows, codes, stride, slots, ids, n, word, count, wide, width, place, stream, step):
    """The same for a column of codes, whose largest magnitude says what they count. n: rows."""
    for i in range(cuda.grid(1), n, cuda.gridsize(1)):
        at = slots[i] * stride + word
        start = i * width + place
        most = uint32(0)
        for k in range(count):
            most = max(most, uint32(bits_of(wide[start + k]) & MAGNITUDE))
        scale = scale_of(most)
        rows[at] = scale
        base = random_base(mix(ids[i]), stream, step)
        for k in range(count):
            codes[4 * at + 4 + k] = code_of(bits_of(wide[start + k]), scale, noise(base, place + k))


@cuda.jit
def begin(halves, stride, ids, slots, fresh, n, dim, low, span, stream):
    """Give each fresh row its first weights. n: values in all."""
    for one in range(cuda.grid(1), n, cuda.gridsize(1)):
        i = one // dim
        k = one - i * dim
        if fresh[i] != 0:
            value = first_value(mix(ids[i]), k, low, span, stream)
            halves[2 * slots[i] * stride + k] = uint16(nearest(bits_of(value)))


@cuda.jit
def weights(halves, stride, ids, slots, n, dim, low, span, stream, out):
    """out[i] = the weights of ids[i], or its first values. n: values in all."""
    for one in range(cuda.grid(1), n, cuda.gridsize(1)):
        i = one // dim
        k = one - i * dim
        short = uint32(halves[2 * int64(slots[i]) * stride + k])
        if slots[i] == 0:
            short = uint32(nearest(bits_of(first_value(mix(ids[i]), k, low, span, stream))))
        out[one] = float_of(uint32(short << HALF))
