"""What a script names: optimizers, clips, regularizers and `lr`, the learning-rate schedules."""

from psfleet.optimizer import lr
from psfleet.optimizer.adadelta import Adadelta
from psfleet.optimizer.adagrad import Adagrad, DecayedAdagrad, RowWiseAdagrad
from psfleet.optimizer.adam import Adam, Adamax, AdamW, AMSGrad, NAdam, RAdam
from psfleet.optimizer.asgd import ASGD
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
from psfleet.optimizer.ftrl import Ftrl
from psfleet.optimizer.lars import Lamb, LarsMomentum
from psfleet.optimizer.lookahead import LookAhead
from psfleet.optimizer.optimizer import Optimizer
from psfleet.optimizer.pipeline_optimizer import PipelineOptimizer
from psfleet.optimizer.proximal import ProximalGD
from psfleet.optimizer.recompute_optimizer import RecomputeOptimizer
from psfleet.optimizer.rmsprop import RMSProp
from psfleet.optimizer.rprop import Rprop
from psfleet.optimizer.sgd import SGD, Momentum
from psfleet.parameters.regularizer import L1Decay, L1DecayRegularizer, L2Decay, L2DecayRegularizer

AMSGradOptimizer = AMSGrad
ASGDOptimizer = ASGD
AdadeltaOptimizer = Adadelta
AdagradOptimizer = Adagrad
AdamOptimizer = Adam
AdamWOptimizer = AdamW
AdamaxOptimizer = Adamax
DecayedAdagradOptimizer = DecayedAdagrad
FtrlOptimizer = Ftrl
DGCMomentumOptimizer = DGCMomentum
LookAheadOptimizer = LookAhead
LookaheadOptimizer = LookAhead
LambOptimizer = Lamb
LarsMomentumOptimizer = LarsMomentum
MomentumOptimizer = Momentum
NAdamOptimizer = NAdam
ProximalGDOptimizer = ProximalGD
RAdamOptimizer = RAdam
RMSPropOptimizer = RMSProp
RowWiseAdagradOptimizer = RowWiseAdagrad
RpropOptimizer = Rprop
SGDOptimizer = SGD

__all__ = [
    "ASGD",
    "SGD",
    "AMSGrad",
    "AMSGradOptimizer",
    "ASGDOptimizer",
    "Adadelta",
    "AdadeltaOptimizer",
    "Adagrad",
    "AdagradOptimizer",
    "Adam",
    "AdamOptimizer",
    "AdamW",
    "AdamWOptimizer",
    "Adamax",
    "AdamaxOptimizer",
    "ClipGradByGlobalNorm",
    "ClipGradByNorm",
    "ClipGradByValue",
    "DGCMomentum",
    "DGCMomentumOptimizer",
    "DecayedAdagrad",
    "DecayedAdagradOptimizer",
    "DistributedOptimizer",
    "ExponentialMovingAverage",
    "Ftrl",
    "FtrlOptimizer",
    "GradientClipByGlobalNorm",
    "GradientClipByNorm",
    "GradientClipByValue",
    "L1Decay",
    "L1DecayRegularizer",
    "L2Decay",
    "L2DecayRegularizer",
    "Lamb",
    "LambOptimizer",
    "LarsMomentum",
    "LarsMomentumOptimizer",
    "LookAhead",
    "LookAheadOptimizer",
    "LookaheadOptimizer",
    "ModelAverage",
    "Momentum",
    "MomentumOptimizer",
    "NAdam",
    "NAdamOptimizer",
    "Optimizer",
    "PipelineOptimizer",
    "ProximalGD",
    "ProximalGDOptimizer",
    "RAdam",
    "RAdamOptimizer",
    "RMSProp",
    "RMSPropOptimizer",
    "RecomputeOptimizer",
    "RowWiseAdagrad",
    "RowWiseAdagradOptimizer",
    "Rprop",
    "RpropOptimizer",
    "SGDOptimizer",
    "lr",
]
