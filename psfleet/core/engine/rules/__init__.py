"""Update rules of optimizers and eviction policies: small files with hyperparameters and scalar functions.

Read rule.py first, then momentum.py, which has the shortest rules.

    rule.py                                              base class of rules; declarations of a rule
    momentum.py, adagrad.py, adam.py, adam_catch_up.py,
    rmsprop.py, layer_wise.py                            the rules
    eviction_policy.py                                   choice of the rows that a full table removes
    named_definition.py, finding_rules.py                registry of rules and policies, look-up by name
    rule_digest.py                                       notices that a user's rule has changed

To add a rule, add a file to this folder: all modules here are imported, and a rule is known as soon as its
class is defined. The names below are those that other packages import.
"""

import importlib
import pkgutil

from psfleet.core.engine.rules.adagrad import Adadelta as Adadelta
from psfleet.core.engine.rules.adagrad import Adagrad as Adagrad
from psfleet.core.engine.rules.adagrad import DecayedAdagrad as DecayedAdagrad
from psfleet.core.engine.rules.adagrad import Ftrl as Ftrl
from psfleet.core.engine.rules.adagrad import ProximalGD as ProximalGD
from psfleet.core.engine.rules.adagrad import RowWiseAdagrad as RowWiseAdagrad
from psfleet.core.engine.rules.adam import Adam as Adam
from psfleet.core.engine.rules.adam import Adamax as Adamax
from psfleet.core.engine.rules.adam import AdamW as AdamW
from psfleet.core.engine.rules.adam import AMSGrad as AMSGrad
from psfleet.core.engine.rules.adam import NAdam as NAdam
from psfleet.core.engine.rules.adam import RAdam as RAdam
from psfleet.core.engine.rules.adam import TorchSparseAdam as TorchSparseAdam
from psfleet.core.engine.rules.adam_catch_up import AdamCatchUp as AdamCatchUp
from psfleet.core.engine.rules.eviction_policy import LFU as LFU
from psfleet.core.engine.rules.eviction_policy import LRU as LRU
from psfleet.core.engine.rules.eviction_policy import DecayedFrequency as DecayedFrequency
from psfleet.core.engine.rules.eviction_policy import EvictionPolicy as EvictionPolicy
from psfleet.core.engine.rules.finding_rules import import_rules as import_rules
from psfleet.core.engine.rules.finding_rules import make_rule as make_rule
from psfleet.core.engine.rules.finding_rules import own_rules as own_rules
from psfleet.core.engine.rules.finding_rules import reference_of as reference_of
from psfleet.core.engine.rules.finding_rules import rule_class as rule_class
from psfleet.core.engine.rules.layer_wise import Lamb as Lamb
from psfleet.core.engine.rules.layer_wise import LarsMomentum as LarsMomentum
from psfleet.core.engine.rules.momentum import ASGD as ASGD
from psfleet.core.engine.rules.momentum import SGD as SGD
from psfleet.core.engine.rules.momentum import DGCMomentum as DGCMomentum
from psfleet.core.engine.rules.momentum import ExactSum as ExactSum
from psfleet.core.engine.rules.momentum import Momentum as Momentum
from psfleet.core.engine.rules.rmsprop import RMSProp as RMSProp
from psfleet.core.engine.rules.rmsprop import Rprop as Rprop
from psfleet.core.engine.rules.rmsprop import TorchRMSprop as TorchRMSprop
from psfleet.core.engine.rules.rule import RULES as RULES
from psfleet.core.engine.rules.rule import DecayRate as DecayRate
from psfleet.core.engine.rules.rule import OptimizerSpec as OptimizerSpec
from psfleet.core.engine.rules.rule import Rule as Rule
from psfleet.core.engine.rules.rule import Slot as Slot
from psfleet.core.engine.rules.rule import TorchSpec as TorchSpec
from psfleet.core.engine.rules.rule import UnitInterval as UnitInterval

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
