"""Copies of large arrays that do not go through the caches.

An ordinary store reads the line that it is about to overwrite, and pushes others out of the caches for
one that will not be used here again. A large array goes straight to memory instead: 0.044 CPU seconds
per GB against 0.07 of np.copyto for arrays of 2 MB in memory, 0.024 against 0.05 from a cache (AMD
Zen 5).
"""

import platform
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.generate import static_kernels
from psfleet.kernels.initial_values import address_of

__all__ = ["STREAM_FROM", "copy_over"]

STREAM_FROM = 1 << 20
"""Bytes from which an array is streamed: what is shorter may well be read from a cache soon."""

_LINE = 64
_KNOWN = platform.machine() in ("x86_64", "AMD64")  # elsewhere streamed stores need other fences


def copy_over(out: NDArray[Any], values: NDArray[Any]) -> None:
    """Write `values` to `out`, arrays of one shape and dtype that do not overlap.

    Args:
        out: Contiguous.
        values: Contiguous, else they are copied in the ordinary way.
    """
    if not _KNOWN or out.nbytes < STREAM_FROM or not values.flags.c_contiguous:
        out[...] = values  # np.copyto takes 0.3 us more
        return
    flat, source = out.reshape(-1).view(np.uint8), values.reshape(-1).view(np.uint8)
    head = -address_of(flat) % _LINE
    lines = (len(flat) - head) // _LINE
    end = head + lines * _LINE
    flat[:head] = source[:head]
    static_kernels("streaming").copy_lines(
        address_of(flat) + head, address_of(source) + head, lines
    )
    flat[end:] = source[end:]
