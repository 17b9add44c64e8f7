"""The update rules: each a small file with hyperparameters, state slots and scalar functions."""

from psfleet.errors import ConfigError
from psfleet.rules.adadelta import Adadelta
from psfleet.rules.adagrad import Adagrad
from psfleet.rules.adam import Adam
from psfleet.rules.adam_catch_up import AdamCatchUp
from psfleet.rules.adamax import Adamax
from psfleet.rules.adamw import AdamW
from psfleet.rules.amsgrad import AMSGrad
from psfleet.rules.asgd import ASGD
from psfleet.rules.decayed_adagrad import DecayedAdagrad
from psfleet.rules.dgc_momentum import DGCMomentum
from psfleet.rules.ftrl import Ftrl
from psfleet.rules.lamb import Lamb
from psfleet.rules.lars_momentum import LarsMomentum
from psfleet.rules.momentum import Momentum
from psfleet.rules.nadam import NAdam
from psfleet.rules.proximal_gd import ProximalGD
from psfleet.rules.radam import RAdam
from psfleet.rules.rmsprop import RMSProp
from psfleet.rules.rowwise_adagrad import RowwiseAdagrad
from psfleet.rules.rprop import Rprop
from psfleet.rules.rule import Rule, Slot
from psfleet.rules.sgd import SGD
from psfleet.rules.torch_rmsprop import TorchRMSprop
from psfleet.rules.torch_sparse_adam import TorchSparseAdam

__all__ = [
    "ASGD",
    "RULES",
    "SGD",
    "AMSGrad",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamCatchUp",
    "AdamW",
    "Adamax",
    "DGCMomentum",
    "DecayedAdagrad",
    "Ftrl",
    "Lamb",
    "LarsMomentum",
    "Momentum",
    "NAdam",
    "ProximalGD",
    "RAdam",
    "RMSProp",
    "RowwiseAdagrad",
    "Rprop",
    "Rule",
    "Slot",
    "TorchRMSprop",
    "TorchSparseAdam",
    "make_rule",
    "rule_class",
]

_ALL: tuple[type[Rule], ...] = (
    Adadelta,
    Adagrad,
    Adam,
    AdamCatchUp,
    Adamax,
    AdamW,
    AMSGrad,
    ASGD,
    DecayedAdagrad,
    DGCMomentum,
    Ftrl,
    Lamb,
    LarsMomentum,
    Momentum,
    NAdam,
    ProximalGD,
    RAdam,
    RMSProp,
    RowwiseAdagrad,
    Rprop,
    SGD,
    TorchRMSprop,
    TorchSparseAdam,
)
RULES: dict[str, type[Rule]] = {rule.name: rule for rule in _ALL}


def rule_class(name: str) -> type[Rule]:
    """The rule of this name.

    Raises:
        ConfigError: There is none.
    """
    if name not in RULES:
        raise ConfigError(f"rule {name!r} is unknown; use one of {', '.join(sorted(RULES))}")
    return RULES[name]


def make_rule(name: str, hyperparameters: dict[str, float]) -> Rule:
    """The rule of this name with these hyperparameters, the form in which rules travel."""
    return rule_class(name).from_hyperparameters(hyperparameters)
