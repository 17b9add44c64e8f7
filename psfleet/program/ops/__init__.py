"""The operations by family, each with a forward and a vector-Jacobian product."""

from psfleet.program.ops import (
    activation,
    arithmetic,
    batch_norm,
    clipping,
    dropout,
    embedding,
    loss,
    manipulate,
    matmul,
    metric,
    normalize,
    pooled_embedding,
    reduce,
    sequence,
    source,
)

__all__ = [
    "activation",
    "arithmetic",
    "batch_norm",
    "clipping",
    "dropout",
    "embedding",
    "loss",
    "manipulate",
    "matmul",
    "metric",
    "normalize",
    "pooled_embedding",
    "reduce",
    "sequence",
    "source",
]
