# ruff: noqa
# mypy: ignore-errors
from numba import float64, int64

from psfleet.kernels.intrinsics import kernel, read_f32


@kernel(float64(int64, int64))
def summed(values, count):
    """The sum of the squares of float32 values; no finite ones overflow it."""
    total = float64(0)
    for i in range(count):
        value = float64(read_f32(values, i))
        total += value * value
    return total
