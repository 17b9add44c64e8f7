"""The library that multiplies matrices, and the precision in which it does."""

import importlib.util
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from psfleet.errors import ConfigError
from psfleet.kernels.number_formats import encode
from psfleet.program.operation import Array
from psfleet.strategy import AMPSettings

_WORTHWHILE = 2**16  # below this, converting costs more than it saves
_FLAGS = frozenset(("avx512_bf16", "amx_bf16", "bf16"))  # of x86-64; the last one of 64-bit Arm


class MatrixProducts:
    """A way to multiply matrices: by NumPy's BLAS, in the dtype of the factors."""

    def suited(self, left: Array, right: Array) -> "MatrixProducts":
        """The way to multiply arrays such as these: this one, or one that is better for them."""
        return self

    def factor(self, values: Array) -> Array:
        """The values as `multiply` takes them, which may be views with other axes."""
        return values

    def multiply(self, left: Array, right: Array) -> Array:
        """The product of two factors over their last two axes, in the dtype of the values."""
        out: Array = np.matmul(left, right)
        return out


class Bfloat16Products(MatrixProducts):
    """Products of torch: factors and results in bfloat16, sums in float32.

    A factor is an array of uint16, the bits of its values, rounded to the nearest, ties to even.

    Args:
        worthwhile: Two factors with fewer values than this together are multiplied in float32.
    """

    def __init__(self, worthwhile: int = _WORTHWHILE) -> None:
        self._worthwhile = worthwhile

    @override
    def suited(self, left: Array, right: Array) -> MatrixProducts:
        whole = left.dtype == right.dtype == np.float32
        return self if whole and left.size + right.size >= self._worthwhile else FLOAT32

    @override
    def factor(self, values: Array) -> Array:
        return encode(values, "bfloat16")

    @override
    def multiply(self, left: Array, right: Array) -> Array:
        out: Array = (_tensor(left) @ _tensor(right)).float().numpy()
        return out


FLOAT32 = MatrixProducts()


def products_under(settings: AMPSettings) -> MatrixProducts:
    """The products that a strategy's part `amp` asks for.

    Raises:
        ConfigError: It asks for bfloat16, and torch is not installed.
    """
    missing = importlib.util.find_spec("torch") is None
    if settings.compute == "bfloat16":
        if missing:
            raise ConfigError(
                "amp compute is 'bfloat16', and torch, which multiplies such matrices, is not "
                "installed; install it with pip install '.[torch]' in psfleet's "
                "checkout, or leave compute out"
            )
        return Bfloat16Products()
    if settings.compute == "float32" or settings.dtype != "bfloat16":
        return FLOAT32
    if missing or not has_bfloat16(Path("/proc/cpuinfo").read_text()):
        lacks = (
            "torch is not installed" if missing else "this processor has no bfloat16 instructions"
        )
        warnings.warn(
            f"amp computes in float32 here, as {lacks}; set compute to 'float32' in the "
            "strategy part amp to say that this is meant",
            stacklevel=2,
        )
        return FLOAT32
    return Bfloat16Products()


def has_bfloat16(description: str) -> bool:
    """Return whether a processor multiplies in bfloat16, by the text of its /proc/cpuinfo."""
    return not _FLAGS.isdisjoint(description.split())


def _tensor(halves: Array) -> Any:
    torch = _torch()
    return torch.from_numpy(halves.view(np.int16)).view(torch.bfloat16)


@cache
def _torch() -> Any:
    import torch

    return torch
