"""One row for each bag of ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from psfleet.errors import ShapeError
from psfleet.kernels.bags import RowBags
from psfleet.parameters.parameter import Parameter
from psfleet.parameters.pooled_gradient import PooledGradient
from psfleet.program.operation import Array, Context, Gradient, Spec
from psfleet.program.ops.embedding import Embedding, Ids
from psfleet.runtime.pooled_ids import PooledIds

if TYPE_CHECKING:
    from psfleet.program.variable import Variable

__all__ = ["PooledEmbedding"]


@dataclass(frozen=True)
class PooledEmbedding(Embedding, saved="pooled_embedding padding mean"):
    """Inputs: ids [n], the weights, the bags' lengths, int64 [bags], and perhaps weights, float32 [n].

    Output: [bags, dim], see `psfleet.kernels.bags.RowBags`. Weights of ids get no gradient.
    """

    mean: bool = False

    def infer(self, ids: "Variable", weights: "Variable", *bags: "Variable") -> Spec:
        lengths = bags[0]
        if len(ids.shape) != 1 or len(lengths.shape) != 1:
            raise ShapeError(
                f"bags of {ids.name!r} {ids.shape} with lengths {lengths.shape}; they must be [n] and [bags]"
            )
        (_, dim), dtype = super().infer(ids, weights)
        return (lengths.shape[0], dim), dtype

    def predicting(self, inputs: "tuple[Variable, ...]") -> "tuple[Variable, ...]":
        return inputs

    def asked(self, ids: Ids, *bags: Array) -> PooledIds:
        lengths, weights = bags if len(bags) > 1 else (bags[0], None)
        return PooledIds(ids, (RowBags(lengths, weights, self.mean),))

    def forward(self, context: Context, ids: Ids, table: Parameter, *bags: Array) -> Array:
        held, values = table.pooled(self.asked(ids, *bags))
        context.save(held)
        return values

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        found = PooledGradient(context.saved[0], gradient)
        return None, found, *(None for _ in context.record.inputs[2:])
