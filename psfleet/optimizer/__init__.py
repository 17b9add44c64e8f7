"""Optimizers, gradient clips, weight decay and `lr`, the learning-rate schedules, for use in scripts.

    from psfleet.optimizer import Adam, ClipGradByGlobalNorm

    optimizer = Adam(0.001, grad_clip=ClipGradByGlobalNorm(1.0))
    optimizer.minimize(loss)

`optimizer.py` has the base class, and rule_optimizers.pyi lists Adam, SGD and the other optimizers with
their arguments.
"""

from psfleet.optimizer import lr, rule_optimizers
from psfleet.optimizer.averages import ExponentialMovingAverage, ModelAverage
from psfleet.optimizer.clip import (
    ClipGradByGlobalNorm,
    ClipGradByNorm,
    ClipGradByValue,
    GradientClipByGlobalNorm,
    GradientClipByNorm,
    GradientClipByValue,
)
from psfleet.optimizer.dgc import DGCMomentum
from psfleet.optimizer.distributed import DistributedOptimizer
from psfleet.optimizer.factory import optimizer_of
from psfleet.optimizer.optimizer import Optimizer
from psfleet.optimizer.rule_optimizers import *  # noqa: F403  # the stub lists the names
from psfleet.optimizer.wrapping_optimizers import LookAhead, PipelineOptimizer, RecomputeOptimizer
from psfleet.regularizer import L1Decay, L1DecayRegularizer, L2Decay, L2DecayRegularizer

DGCMomentumOptimizer = DGCMomentum
LookAheadOptimizer = LookAhead
LookaheadOptimizer = LookAhead

__all__ = [
    "ClipGradByGlobalNorm",
    "ClipGradByNorm",
    "ClipGradByValue",
    "DGCMomentum",
    "DGCMomentumOptimizer",
    "DistributedOptimizer",
    "ExponentialMovingAverage",
    "GradientClipByGlobalNorm",
    "GradientClipByNorm",
    "GradientClipByValue",
    "L1Decay",
    "L1DecayRegularizer",
    "L2Decay",
    "L2DecayRegularizer",
    "LookAhead",
    "LookAheadOptimizer",
    "LookaheadOptimizer",
    "ModelAverage",
    "Optimizer",
    "PipelineOptimizer",
    "RecomputeOptimizer",
    "lr",
    "optimizer_of",
]
__all__ += rule_optimizers.__all__
