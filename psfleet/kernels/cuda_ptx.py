"""A rule's CUDA kernels as PTX, the assembly of NVIDIA's devices."""
# mypy: disable-error-code="no-untyped-call,attr-defined"

from typing import Any

from numba import cuda, float32, float64, int64, types, void

from psfleet.kernels.cuda import cuda_kernels
from psfleet.rules.rule import Rule

__all__ = ["compile_ptx"]

_FLAT, _SUMS, _TOTALS, _EXTRA = float32[::1], float32[:, :, ::1], float64[:, ::1], float32[:, ::1]


def compile_ptx(rule: Rule, dim: int) -> dict[str, str]:
    """The PTX of each kernel for compute capability 9.0, with both weight decays; dim 0: dense arrays."""
    _, kernels = cuda_kernels(rule, True, True, dim)
    found = {}
    for name, signature in _signatures(rule, dim).items():
        found[name], _ = cuda.compile(
            getattr(kernels, name).py_func,
            signature,
            device=False,
            cc=(9, 0),
            output="ptx",
            abi="numba",
        )
    return found


def _signatures(rule: Rule, dim: int) -> dict[str, Any]:
    text, _ = cuda_kernels(rule, True, True, dim)
    values = [int64[::1], _FLAT] if dim else [_FLAT] * len(text.arguments)
    h = types.UniTuple(float32, len(rule.scalars(0.1, 1)) + 2)
    found = {"update": void(int64, int64, int64, _FLAT, *values, _EXTRA, h)}
    if text.sums:
        found["lanes"] = void(int64, int64, int64, _FLAT, *values, _SUMS, h)
        found["fold"] = void(int64, _SUMS, _TOTALS)
    if text.extra_width:
        found["combine"] = void(int64, int64, int64, *values, _TOTALS, _EXTRA, h)
    return found
