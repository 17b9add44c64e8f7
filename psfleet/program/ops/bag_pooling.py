"""One row for each bag of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from psfleet.errors import ShapeError
from psfleet.kernels.bags import pool_bags, spread_gradient
from psfleet.program.operation import Array, Context, Gradient, Op, Spec
from psfleet.program.ops.check import need_floats

if TYPE_CHECKING:
    from psfleet.program.variable import Variable

__all__ = ["PoolBags"]


@dataclass(frozen=True)
class PoolBags(Op, saved="pool_bags mean"):
    """Inputs: rows [n, dim], the bags' lengths, int64 [bags], and perhaps weights, float32 [n].

    Output: [bags, dim], see `psfleet.kernels.bags.pool_bags`. Weights get no gradient.
    """

    mean: bool = False

    def infer(self, rows: "Variable", lengths: "Variable", *weights: "Variable") -> Spec:
        need_floats("features", rows)
        if len(rows.shape) != 2 or len(lengths.shape) != 1:
            raise ShapeError(
                f"bags of {rows.name!r} {rows.shape} with lengths {lengths.shape}; they must be [n, dim] "
                "and [bags]"
            )
        return (lengths.shape[0], rows.shape[1]), rows.dtype

    def forward(self, context: Context, rows: Array, lengths: Array, *weights: Array) -> Array:
        context.save(lengths, weights[0] if weights else None)
        return pool_bags(rows, lengths, weights[0] if weights else None, self.mean)

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        lengths, weights = context.saved
        found = spread_gradient(gradient, lengths, weights, self.mean)
        return found, *(None for _ in context.record.inputs[1:])
