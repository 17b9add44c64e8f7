"""The operations by family, each with a forward and a vector-Jacobian product."""

from psfleet.program.ops import (
    activation,
    arithmetic,
    dropout,
    embedding,
    loss,
    manipulate,
    matmul,
    metric,
    normalize,
    reduce,
    source,
)

__all__ = [
    "activation",
    "arithmetic",
    "dropout",
    "embedding",
    "loss",
    "manipulate",
    "matmul",
    "metric",
    "normalize",
    "reduce",
    "source",
]
