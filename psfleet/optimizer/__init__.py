"""What a script names: optimizers, clips, regularizers and `lr`, the learning-rate schedules."""

from psfleet.clip import (
    ClipGradByGlobalNorm,
    ClipGradByNorm,
    ClipGradByValue,
    GradientClipByGlobalNorm,
    GradientClipByNorm,
    GradientClipByValue,
)
from psfleet.optimizer import lr
from psfleet.optimizer.adagrad import Adagrad
from psfleet.optimizer.adam import Adam
from psfleet.optimizer.base import Optimizer
from psfleet.optimizer.distributed import DistributedOptimizer
from psfleet.optimizer.ftrl import Ftrl
from psfleet.optimizer.sgd import SGD, Momentum
from psfleet.regularizer import L1Decay, L1DecayRegularizer, L2Decay, L2DecayRegularizer

SGDOptimizer = SGD
MomentumOptimizer = Momentum
AdagradOptimizer = Adagrad
AdamOptimizer = Adam
FtrlOptimizer = Ftrl

__all__ = [
    "SGD",
    "Adagrad",
    "AdagradOptimizer",
    "Adam",
    "AdamOptimizer",
    "ClipGradByGlobalNorm",
    "ClipGradByNorm",
    "ClipGradByValue",
    "DistributedOptimizer",
    "Ftrl",
    "FtrlOptimizer",
    "GradientClipByGlobalNorm",
    "GradientClipByNorm",
    "GradientClipByValue",
    "L1Decay",
    "L1DecayRegularizer",
    "L2Decay",
    "L2DecayRegularizer",
    "Momentum",
    "MomentumOptimizer",
    "Optimizer",
    "SGDOptimizer",
    "lr",
]
