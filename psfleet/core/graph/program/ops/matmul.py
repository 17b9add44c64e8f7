"""Matrix products (matmul and fully connected layers), and the library and precision that compute them.

By default NumPy's BLAS multiplies in the dtype of the factors. With the strategy part `amp`, torch can
multiply in bfloat16 instead (`products_under`), which is faster on processors with instructions for bfloat16.
All other values and gradients stay float32. Each factor is converted once, and kept for the backward pass.
"""

import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from psfleet.core.base.errors import ConfigError, ShapeError
from psfleet.core.engine.kernels.number_formats import encode
from psfleet.core.graph.program.operation import (
    Array,
    Context,
    Gradient,
    Op,
    Spec,
    broadcast,
    need_floats,
    same,
    size_of,
)
from psfleet.core.graph.program.ops.arithmetic import unbroadcast
from psfleet.core.runtime.strategy import AMPSettings

if TYPE_CHECKING:
    from psfleet.core.graph.program.variable import Variable

_WORTHWHILE = (
    2**16
)  # values of both factors together; with fewer, converting costs more than it saves
_FLAGS = frozenset(
    ("avx512_bf16", "amx_bf16", "bf16")
)  # in /proc/cpuinfo of x86-64; the last on 64-bit Arm


class MatrixProducts:
    """Multiplies matrices with NumPy's BLAS in the dtype of the factors. Base of other implementations."""

    def suited(self, left: Array, right: Array) -> "MatrixProducts":
        """Return the implementation to multiply these arrays with: this one, or a better one for them."""
        return self

    def factor(self, values: Array) -> Array:
        """Convert an array to the form that `multiply` takes. Axes of the result may be swapped or split."""
        return values

    def multiply(self, left: Array, right: Array) -> Array:
        """Multiply two results of `factor` over their last two axes.

        The result has the dtype of the arrays.
        """
        out: Array = np.matmul(left, right)
        return out


class Bfloat16Products(MatrixProducts):
    """Multiplies matrices with torch. Factors and results are rounded to bfloat16, sums are in float32.

    A factor is an array of uint16 that holds bfloat16 values, rounded to nearest with ties to even.

    Args:
        worthwhile: Number of values that both factors must have together. Smaller products are in float32.
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
    """Return the implementation of matrix products for a strategy's part `amp`.

    If the strategy leaves `compute` out, bfloat16 is used if torch is installed and the processor supports
    it. Otherwise a warning says that it is not used.

    Raises:
        ConfigError: The strategy requires bfloat16, and torch is not installed.
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
    """Return whether a processor can multiply in bfloat16, given the text of its /proc/cpuinfo."""
    return not _FLAGS.isdisjoint(description.split())


def _tensor(halves: Array) -> Any:
    """Return a bfloat16 tensor that shares the memory of an array of uint16."""
    torch = _torch()
    return torch.from_numpy(halves.view(np.int16)).view(torch.bfloat16)


@cache
def _torch() -> Any:
    import torch

    return torch


def _swap(x: Any) -> Any:
    return x.swapaxes(-1, -2)


@dataclass(frozen=True)
class MatMul(Op, saved="matmul transpose_x transpose_y"):
    """Matrix product x @ y over the last two axes, each possibly transposed. Leading axes broadcast.

    As in NumPy, a vector x is a row, and a vector y is a column.
    """

    transpose_x: bool = False
    transpose_y: bool = False

    def infer(self, x: "Variable", y: "Variable") -> Spec:
        need_floats("matmul", x, y)
        left, right = x.shape, y.shape
        if len(left) < 1 or len(right) < 1:
            raise ShapeError(
                f"matmul of {x.name!r} {left} and {y.name!r} {right}: both need an axis"
            )
        if self.transpose_x and len(left) > 1:
            left = (*left[:-2], left[-1], left[-2])
        if self.transpose_y and len(right) > 1:
            right = (*right[:-2], right[-1], right[-2])
        inner = right[-2] if len(right) > 1 else right[-1]
        if not same((left[-1],), (inner,)):
            raise ShapeError(
                f"matmul of {x.name!r} {left} and {y.name!r} {right}: "
                f"the inner extents {left[-1]} and {inner} differ"
            )
        leading = broadcast(left[:-2], right[:-2], f"matmul of {x.name!r} and {y.name!r}")
        rows = (left[-2],) if len(left) > 1 else ()
        columns = (right[-1],) if len(right) > 1 else ()
        return (*leading, *rows, *columns), x.dtype

    def forward(self, context: Context, x: Array, y: Array) -> Array:
        products = context.products.suited(x, y)
        x, y = products.factor(x), products.factor(y)
        context.save(products, x, y)
        left = _swap(x) if self.transpose_x and x.ndim > 1 else x
        right = _swap(y) if self.transpose_y and y.ndim > 1 else y
        return products.multiply(left, right)

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        products, x, y = context.saved
        # Turn vectors into matrices, and add to the gradient the axes that the product dropped for them. Then
        # dx = g @ y^T and dy = x^T @ g. If the input was transposed, its gradient is transposed again.
        left = x[None, :] if x.ndim == 1 else x
        right = y[:, None] if y.ndim == 1 else y
        if x.ndim == 1:
            gradient = gradient[..., None, :] if y.ndim > 1 else gradient[..., None]
        if y.ndim == 1:
            gradient = gradient[..., None]
        gradient = products.factor(gradient)
        flip_x, flip_y = self.transpose_x and x.ndim > 1, self.transpose_y and y.ndim > 1
        dx = dy = None
        if context.needs[0]:
            dx = products.multiply(gradient, right if flip_y else _swap(right))
            dx = unbroadcast(_swap(dx) if flip_x else dx, left.shape).reshape(x.shape)
        if context.needs[1]:
            dy = products.multiply(left if flip_x else _swap(left), gradient)
            dy = unbroadcast(_swap(dy) if flip_y else dy, right.shape).reshape(y.shape)
        return dx, dy


@dataclass(frozen=True)
class Affine(Op, saved="affine axes relu"):
    """Fully connected layer flatten(x) @ w + b, optionally with relu. Bias and relu are computed in place.

    Inputs: x, whose first `axes` axes become the rows of a matrix and whose other axes become its columns;
    w [in, out]; and optionally b [out].
    """

    axes: int = 1
    relu: bool = False

    def infer(self, x: "Variable", w: "Variable", b: "Variable | None" = None) -> Spec:
        need_floats("fc", x, w)
        inner = size_of(x.shape[self.axes :])
        if len(w.shape) != 2 or not same((inner,), w.shape[:1]):
            raise ShapeError(
                f"fc of {x.name!r} {x.shape} has {inner} inputs, "
                f"but its weights {w.name!r} are {w.shape}"
            )
        if b is not None and not same(b.shape, w.shape[1:]):
            raise ShapeError(
                f"fc of {x.name!r} has {w.shape[1]} outputs, but its bias {b.name!r} is {b.shape}"
            )
        return (*x.shape[: self.axes], w.shape[1]), x.dtype

    def forward(self, context: Context, x: Array, w: Array, b: Array | None = None) -> Array:
        flat = x.reshape(-1, w.shape[0])
        products = context.products.suited(flat, w)
        flat, w = products.factor(flat), products.factor(w)
        out = products.multiply(flat, w)
        if b is not None:
            out += b
        if self.relu:
            np.maximum(out, 0, out=out)
        needs_x, needs_w = context.needs[:2]
        context.save(
            products,
            x.shape,
            flat if needs_w else None,
            w if needs_x else None,
            out if self.relu else None,
        )
        return out.reshape(*x.shape[: self.axes], w.shape[1])

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        products, shape, flat, w, out = context.saved
        gradient = gradient.reshape(-1, gradient.shape[-1])
        if out is not None:
            gradient = gradient * (out > 0)
        factor = products.factor(gradient)
        parts: list[Gradient | None] = [
            products.multiply(factor, w.T).reshape(shape) if context.needs[0] else None,
            products.multiply(flat.T, factor) if context.needs[1] else None,
        ]
        if len(context.needs) > 2:
            parts.append(gradient.sum(axis=0) if context.needs[2] else None)
        return parts
