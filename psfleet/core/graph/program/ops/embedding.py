"""Embedding operations: look up rows of a table by id, one row per id or one pooled row per bag of ids.

For a sparse parameter, the forward pass reads only the rows of the batch, and the gradient is a SparseGrad. A
run calls `wanted_ids` beforehand, so that one pull brings all rows of a step. A dense parameter is pulled
as a whole array, and its gradient is an array.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import IdError, ShapeError
from psfleet.core.engine.gradients import PooledGradient, SparseGrad
from psfleet.core.engine.kernels.bags import RowBags
from psfleet.core.engine.runtime_interface import Asked, PooledIds
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.graph.program.operation import Array, Context, Gradient, Op, Spec, scatter_rows

if TYPE_CHECKING:
    from psfleet.core.graph.program.variable import Variable


Ids = NDArray[np.int64]


def check_ids(name: str, ids: Ids, rows: int | None) -> None:
    """Check that ids are in [0, rows).

    Args:
        name: Name of the parameter, for the message.
        ids: Ids of any shape.
        rows: Number of rows, or None if every id is valid.

    Raises:
        IdError: An id is outside. The message quotes the first such id.
    """
    if rows is None or ids.size == 0 or (ids.min() >= 0 and ids.max() < rows):
        return
    bad = ids[(ids < 0) | (ids >= rows)].flat[0]
    raise IdError(f"embedding {name!r} has rows 0 to {rows - 1}; an id is {bad}")


def spread(name: str, counts: Array, shape: tuple[int, ...]) -> Array:
    """Return the number of shows or clicks of each id, float32 in the shape of the ids.

    Args:
        name: Name of the counts, for the message.
        counts: One count for each id, or for each sample: [n] or [n, 1] for ids [n, ...].

    Raises:
        ShapeError: The counts have neither shape.
    """
    if counts.shape != shape:
        if not shape or counts.shape not in ((shape[0],), (shape[0], 1)):
            raise ShapeError(
                f"{name!r} has shape {counts.shape} for ids {shape}; shows and clicks have the shape "
                "of the ids, or one value for each sample"
            )
        counts = counts.reshape(shape[0], *(1 for _ in shape[1:]))
    return np.broadcast_to(counts, shape).astype(np.float32)


@dataclass(frozen=True)
class _Embedding(Op):
    """Base of embeddings. Inputs: ids of any shape, and weights [rows, dim]. Output: [*ids.shape, dim].

    Ids equal to `padding` give zeros and get no gradient.
    """

    padding: int | None = None

    def infer(self, ids: "Variable", weights: "Variable", *scores: "Variable") -> Spec:
        if ids.dtype.kind not in "iu":
            raise IdError(
                f"embedding {weights.name!r}: ids {ids.name!r} have dtype {ids.dtype}, "
                "they must be int64"
            )
        return (*ids.shape, weights.shape[1]), weights.dtype

    def _blank(self, ids: Ids, out: Array) -> Array:
        """Set the rows of padding ids to zeros, in a copy, because `out` may be a cached, read-only array."""
        if self.padding is None:
            return out
        pads = ids == self.padding
        if pads.any():
            out = out.copy()
            out[pads] = 0
        return out

    def _without_padding(self, ids: Ids, gradient: Array) -> tuple[Ids, Array]:
        """Return the flat ids without padding, and their gradients [n, dim]."""
        flat, rows = ids.reshape(-1), gradient.reshape(-1, gradient.shape[-1])
        if self.padding is None:
            return flat, rows
        keep = flat != self.padding
        return (flat, rows) if keep.all() else (flat[keep], rows[keep])


class Embedding(_Embedding, saved="embedding padding"):
    """Embedding of a sparse parameter: the forward pass looks rows up, and the gradient is a SparseGrad.

    Two further inputs may give the numbers of shows and clicks, per sample or per id. They do not affect the
    output, but are sent to the servers with the gradient.
    """

    by_rows = True

    def wanted_ids(self, ids: Ids, *others: Array) -> Asked:
        """Return the ids whose rows a run must pull, given the values of all inputs but the parameter."""
        return ids

    def predicting(self, inputs: "tuple[Variable, ...]") -> "tuple[Variable, ...]":
        return inputs[:2]

    def forward(self, context: Context, ids: Ids, table: Parameter, *scores: Array) -> Array:
        if not table.distributed:
            check_ids(table.name, ids, table.shape[0])
        context.save(ids, *scores)
        return self._blank(ids, table.lookup(ids))

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        ids, *scores = context.saved
        flat, rows = self._without_padding(ids, gradient)
        row_gradient = SparseGrad(
            flat, np.ascontiguousarray(rows), self._scores(context, ids, scores)
        )
        return None, row_gradient, *(None for _ in scores)

    def _scores(self, context: Context, ids: Ids, scores: Sequence[Array]) -> Array | None:
        if not scores:
            return None
        names = [variable.name for variable in context.record.inputs[2:]]
        columns = [spread(*pair, ids.shape) for pair in zip(names, scores, strict=True)]
        return self._without_padding(ids, np.stack(columns, axis=-1))[1]


class DenseEmbedding(_Embedding, saved="dense_embedding padding"):
    """Embedding of a dense parameter. Its gradient is an array."""

    def forward(self, context: Context, ids: Ids, weights: Array) -> Array:
        check_ids(context.record.inputs[1].name, ids, len(weights))
        context.save(ids, weights.shape)
        return self._blank(ids, weights[ids])

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        ids, shape = context.saved
        flat, rows = self._without_padding(ids, gradient)
        return None, scatter_rows(flat, rows, shape)


@dataclass(frozen=True)
class PooledEmbedding(Embedding, saved="pooled_embedding padding mean"):
    """Sum or mean of the rows of each bag of ids, [bags, dim].

    Inputs: ids [n], the parameter, the lengths of the bags, int64 [bags], and optionally a weight for each
    id, float32 [n], which gets no gradient. `psfleet.core.engine.kernels.bags.RowBags` defines the pooling.
    Rows are pooled as they arrive, so no array of single rows is made.
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

    def wanted_ids(self, ids: Ids, *bags: Array) -> PooledIds:
        lengths, weights = bags if len(bags) > 1 else (bags[0], None)
        return PooledIds(ids, (RowBags(lengths, weights, self.mean),))

    def forward(self, context: Context, ids: Ids, table: Parameter, *bags: Array) -> Array:
        lookup, values = table.pooled(self.wanted_ids(ids, *bags))
        context.save(lookup)
        return values

    def backward(self, context: Context, gradient: Array) -> Sequence[Gradient | None]:
        no_gradients = (None for _ in context.record.inputs[2:])
        return None, PooledGradient(context.saved[0], gradient), *no_gradients
