"""float32 in 16 bits and back: bfloat16, which keeps the range, and float16, which keeps digits."""

from functools import cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.generate import static_kernels

__all__ = ["Half", "decode", "encode", "overflows", "rounded", "shorten", "widen"]

Floats = NDArray[np.float32]
Halves = NDArray[np.uint16]
Half = Literal["bfloat16", "float16"]

_FLOAT16_END = 65520.0  # from here on float16 rounds to infinity


def encode(values: Floats, half: Half, scale: float = 1.0) -> Halves:
    """The bits of values * scale, rounded to the nearest, ties to even: uint16 in their shape."""
    scaled = np.ascontiguousarray(values if scale == 1 else values * np.float32(scale)).reshape(-1)
    out = np.empty(scaled.size, np.uint16)
    if half == "bfloat16":
        shorten(scaled, out)
    else:
        static_kernels("halves").encode_float16(scaled, scaled.view(np.uint32), out)
    return out.reshape(values.shape)


def shorten(values: Floats, out: Halves) -> None:
    """Write values, float32 [n], as bfloat16, rounded to the nearest, ties to even."""
    static_kernels("halves").encode_bfloat16(values.view(np.uint32), out)


def widen(halves: Halves, out: Floats) -> None:
    """Write bfloat16 [n] as float32."""
    static_kernels("halves").decode_bfloat16(halves, out.view(np.uint32))


def decode(halves: Halves, half: Half, scale: float = 1.0) -> Floats:
    """The values that `encode` was given, as far as 16 bits hold them: times float32(1 / scale)."""
    flat = np.ascontiguousarray(halves).reshape(-1)
    out = np.empty(flat.size, np.float32)
    if half == "bfloat16" and scale == 1:
        widen(flat, out)
        return out.reshape(halves.shape)
    static_kernels("halves").decode(flat, _patterns(half), np.float32(1 / scale), out)
    return out.reshape(halves.shape)


def rounded(values: Floats, half: Half, scale: float = 1.0) -> Floats:
    """What arrives of values that travel in 16 bits."""
    return decode(encode(values, half, scale), half, scale)


def overflows(values: Floats, scale: float) -> bool:
    """Whether values * scale has an infinity or NaN once it is float16."""
    peak = np.max(np.abs(values), initial=0).astype(np.float32)  # NaN if one is
    with np.errstate(over="ignore"):
        return not float(peak * np.float32(scale)) < _FLOAT16_END


@cache
def _patterns(half: Half) -> Floats:
    """The value of each pattern of 16 bits."""
    every = np.arange(1 << 16, dtype=np.uint16)
    if half == "float16":
        return every.view(np.float16).astype(np.float32)
    return (every.astype(np.uint32) << np.uint32(16)).view(np.float32)
