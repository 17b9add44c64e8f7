"""Learning rate schedules: they change the learning rate while a script trains.

Pass a schedule to an optimizer as its learning rate:

    rate = lr.StepDecay(0.1, step_size=10)
    optimizer = SGD(rate)
    ...
    rate.step()  # after each epoch

Classes (`schedules.py`) change the learning rate when the script calls `step()`. Functions such as
`noam_decay` (`update_counted.py`) return schedules that the optimizer advances after each update.
"""

from psfleet.optimizer.lr.scheduler import LRScheduler, ReduceOnPlateau
from psfleet.optimizer.lr.schedules import (
    CosineAnnealingDecay,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialDecay,
    InverseTimeDecay,
    LambdaDecay,
    LinearLR,
    LinearWarmup,
    MultiplicativeDecay,
    MultiStepDecay,
    NaturalExpDecay,
    NoamDecay,
    OneCycleLR,
    PiecewiseDecay,
    PolynomialDecay,
    StepDecay,
)
from psfleet.optimizer.lr.update_counted import (
    cosine_decay,
    exponential_decay,
    inverse_time_decay,
    linear_lr_warmup,
    natural_exp_decay,
    noam_decay,
    piecewise_decay,
    polynomial_decay,
)

__all__ = [
    "CosineAnnealingDecay",
    "CosineAnnealingWarmRestarts",
    "CyclicLR",
    "ExponentialDecay",
    "InverseTimeDecay",
    "LRScheduler",
    "LambdaDecay",
    "LinearLR",
    "LinearWarmup",
    "MultiStepDecay",
    "MultiplicativeDecay",
    "NaturalExpDecay",
    "NoamDecay",
    "OneCycleLR",
    "PiecewiseDecay",
    "PolynomialDecay",
    "ReduceOnPlateau",
    "StepDecay",
    "cosine_decay",
    "exponential_decay",
    "inverse_time_decay",
    "linear_lr_warmup",
    "natural_exp_decay",
    "noam_decay",
    "piecewise_decay",
    "polynomial_decay",
]
