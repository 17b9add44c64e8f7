"""The operations by family, each with a forward and a vector-Jacobian product."""

from psfleet.program.ops import (
    activation,
    arithmetic,
    bag_pooling,
    batch_norm,
    clipping,
    dropout,
    embedding,
    loss,
    manipulate,
    matmul,
    metric,
    normalize,
    reduce,
    sequence,
    source,
)

__all__ = [
    "activation",
    "arithmetic",
    "bag_pooling",
    "batch_norm",
    "clipping",
    "dropout",
    "embedding",
    "loss",
    "manipulate",
    "matmul",
    "metric",
    "normalize",
    "reduce",
    "sequence",
    "source",
]
