# ruff: noqa
# mypy: ignore-errors
from numba import float64, int64, uint64, void

from psfleet.kernels.hashing import fill_row
from psfleet.kernels.hashing import mix
from psfleet.kernels.intrinsics import kernel, read_i64


@kernel(void(int64, int64, int64, int64, float64, float64, uint64, int64))
def fill(ids, n, dim, kind, low, span, stream, out):
    for i in range(n):
        fill_row(out + i * dim * 4, mix(uint64(read_i64(ids, i))), dim, kind, low, span, stream)
