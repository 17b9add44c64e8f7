"""Weight decay that the servers add to the gradient, after the worker's clipping."""

from psfleet.parameters.regularizer import (
    L1Decay,
    L1DecayRegularizer,
    L2Decay,
    L2DecayRegularizer,
    WeightDecay,
    as_decay,
    as_regularizer,
)

__all__ = [
    "L1Decay",
    "L1DecayRegularizer",
    "L2Decay",
    "L2DecayRegularizer",
    "WeightDecay",
    "as_decay",
    "as_regularizer",
]
