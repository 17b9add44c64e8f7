"""float32 in 8 bits and back: blocks of values share a scale, a value is a whole number of steps.

The step of a block is its largest magnitude / 127, so a value comes back with an error of half a step
where it is rounded to the nearest, and of less than one where it is drawn. Blocks follow each other in
the flattened array; the last one may be shorter. A block whose largest magnitude is below 2^-100 becomes
zero.
"""

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.generate import width_kernels

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Codes = NDArray[np.int8]


def encode(values: Floats, block: int, scales: Floats, codes: Codes) -> None:
    """Write the nearest steps of `values`; ties to even.

    Args:
        values: float32 [n]. A block with an infinity or NaN comes back as NaN.
        block: Values that share a scale.
        scales: float32 [ceil(n / block)], written.
        codes: int8 [n], written.
    """
    kernels = width_kernels("int8", block, "encode")
    kernels.encode(values, values.view(np.uint32), scales, codes)


def encode_fed(values: Floats, rests: Floats, block: int, scales: Floats, codes: Codes) -> None:
    """Encode values + rests as `encode` does; the remainder that is not sent becomes `rests`.

    Error feedback (Seide et al., 2014): what a step leaves out, a later one brings.

    Args:
        values: float32 [n], finite.
        rests: float32 [n], read and written.
    """
    kernels = width_kernels("int8", block, "encode_fed")
    kernels.encode_fed(values, rests, rests.view(np.uint32), scales, codes)


def encode_drawn(
    rows: Floats, ids: Ids, salt: np.uint64, scales: Floats, codes: Codes
) -> int | None:
    """Write the steps of `rows`, each rounded up or down so that it is right on average.

    Whether up or down is a function of salt, id and place in the row.

    Args:
        rows: float32 [n, dim]; a row is a block.
        ids: int64 [n], of the rows.
        salt: Salt of this push.
        scales: float32 [n], written.
        codes: int8 [n * dim], written.

    Returns:
        The first row that has an infinity or NaN; then only the rows before it are written.
    """
    flat = rows.reshape(-1)
    kernels = width_kernels("int8", rows.shape[1], "encode_drawn")
    bad = int(kernels.encode_drawn(flat, flat.view(np.uint32), ids, salt, scales, codes))
    return None if bad < 0 else bad


def decode(codes: Codes, scales: Floats, block: int, values: Floats) -> None:
    """Write the values that codes int8 [n] and scales float32 [ceil(n / block)] stand for."""
    width_kernels("int8", block, "decode").decode(codes, scales, values)
