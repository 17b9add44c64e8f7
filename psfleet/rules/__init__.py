"""The update rules and eviction policies: small files with hyperparameters and scalar functions.

A new rule is a new file, which is found; the names below are those that others import.
"""

import importlib
import pkgutil

from psfleet.rules.adadelta import Adadelta as Adadelta
from psfleet.rules.adagrad import Adagrad as Adagrad
from psfleet.rules.adam import Adam as Adam
from psfleet.rules.adam_catch_up import AdamCatchUp as AdamCatchUp
from psfleet.rules.adamax import Adamax as Adamax
from psfleet.rules.adamw import AdamW as AdamW
from psfleet.rules.amsgrad import AMSGrad as AMSGrad
from psfleet.rules.asgd import ASGD as ASGD
from psfleet.rules.decayed_adagrad import DecayedAdagrad as DecayedAdagrad
from psfleet.rules.dgc_momentum import DGCMomentum as DGCMomentum
from psfleet.rules.eviction_policy import LFU as LFU
from psfleet.rules.eviction_policy import LRU as LRU
from psfleet.rules.eviction_policy import DecayedFrequency as DecayedFrequency
from psfleet.rules.eviction_policy import EvictionPolicy as EvictionPolicy
from psfleet.rules.exact_sum import ExactSum as ExactSum
from psfleet.rules.finding_rules import RULES as RULES
from psfleet.rules.finding_rules import import_rules as import_rules
from psfleet.rules.finding_rules import make_rule as make_rule
from psfleet.rules.finding_rules import own_rules as own_rules
from psfleet.rules.finding_rules import reference_of as reference_of
from psfleet.rules.finding_rules import rule_class as rule_class
from psfleet.rules.ftrl import Ftrl as Ftrl
from psfleet.rules.lamb import Lamb as Lamb
from psfleet.rules.lars_momentum import LarsMomentum as LarsMomentum
from psfleet.rules.momentum import Momentum as Momentum
from psfleet.rules.nadam import NAdam as NAdam
from psfleet.rules.optimizer_spec import OptimizerSpec as OptimizerSpec
from psfleet.rules.optimizer_spec import TorchSpec as TorchSpec
from psfleet.rules.proximal_gd import ProximalGD as ProximalGD
from psfleet.rules.radam import RAdam as RAdam
from psfleet.rules.rmsprop import RMSProp as RMSProp
from psfleet.rules.row_wise_adagrad import RowWiseAdagrad as RowWiseAdagrad
from psfleet.rules.rprop import Rprop as Rprop
from psfleet.rules.rule import DecayRate as DecayRate
from psfleet.rules.rule import Rule as Rule
from psfleet.rules.rule import Slot as Slot
from psfleet.rules.rule import UnitInterval as UnitInterval
from psfleet.rules.sgd import SGD as SGD
from psfleet.rules.torch_rmsprop import TorchRMSprop as TorchRMSprop
from psfleet.rules.torch_sparse_adam import TorchSparseAdam as TorchSparseAdam

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
