"""The update rules: each a small file with hyperparameters, state slots and one scalar function."""

from psfleet.errors import ConfigError
from psfleet.rules.adagrad import Adagrad
from psfleet.rules.adam import Adam
from psfleet.rules.base import Rule, Slot
from psfleet.rules.ftrl import Ftrl
from psfleet.rules.momentum import Momentum
from psfleet.rules.sgd import SGD

__all__ = [
    "SGD", "Adagrad", "Adam", "Ftrl", "Momentum", "Rule", "Slot", "make_rule", "rule_class",
]

RULES: dict[str, type[Rule]] = {rule.name: rule for rule in (SGD, Momentum, Adagrad, Adam, Ftrl)}


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
