"""Kernels on the weights of rows outside a table: initial values of new rows, and rounding as a push rounds.
"""

from numba import float64, int64, uint32, uint64, void

from psfleet.core.engine.kernels.hashing import fill_row, mix
from psfleet.core.engine.kernels.intrinsics import kernel, load_u32, read_i64, store_u32
from psfleet.core.engine.kernels.row_rounding import drawn, noise, random_base


@kernel(void(int64, int64, int64, int64, float64, float64, uint64, int64))
def fill(ids, n, dim, kind, low, span, stream, out):
    """Write the initial values of the rows of ids, int64 [n], to `out`, float32 [n, dim].

    kind, low, span, stream: the initializer, as for `fill_row` of hashing.py.
    """
    for i in range(n):
        fill_row(out + i * dim * 4, mix(uint64(read_i64(ids, i))), dim, kind, low, span, stream)


@kernel(void(int64, int64, int64, int64, uint64, int64))
def draw(bits, ids, n, dim, stream, step):
    """Round the weights of rows to bfloat16 as a push of this step would.

    bits: address of the weights, float32 [n, dim], which are rounded in place.
    """
    for i in range(n):
        base = random_base(mix(uint64(read_i64(ids, i))), stream, step)
        for k in range(dim):
            at = i * dim + k
            store_u32(bits, at, uint32(drawn(load_u32(bits, at), noise(base, k)) << uint32(16)))
