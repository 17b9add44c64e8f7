"""Rules by name: psfleet's own, and those of modules that a user names."""

import importlib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from psfleet.errors import ConfigError
from psfleet.rules.definition import definition_of

if TYPE_CHECKING:
    from psfleet.rules.rule import Rule

__all__ = ["RULES", "import_rules", "make_rule", "reference_of", "register", "rule_class"]

RULES: dict[str, type["Rule"]] = {}
"""Every rule that this process knows, by name. A class joins when Python defines it."""

_NAME = re.compile("[a-z][a-z0-9_]*")


def register(rule: type["Rule"]) -> None:
    """Make a rule known by its name. A class that is defined again replaces the earlier one.

    Raises:
        ConfigError: The name is not one, or another rule has it.
    """
    known = RULES.get(rule.name)
    if not _NAME.fullmatch(rule.name):
        raise ConfigError(
            f"the rule {rule.__name__} has the name {rule.name!r}; a name has lower-case letters, "
            "digits and _, and begins with a letter"
        )
    if known is not None and _place(known) != _place(rule):
        raise ConfigError(
            f"the rule {_place(rule)} has the name {rule.name!r}, which is that of {_place(known)}; "
            "give it another"
        )
    RULES[rule.name] = rule


def rule_class(name: str) -> type["Rule"]:
    """The rule of this name.

    Raises:
        ConfigError: There is none.
    """
    if name not in RULES:
        raise ConfigError(
            f"rule {name!r} is unknown; use one of {', '.join(sorted(RULES))}, or name the module "
            "that defines it: psfleet-launch --rules MODULE, or PSFLEET_RULES"
        )
    return RULES[name]


def reference_of(rule: type["Rule"]) -> str:
    """How messages and files refer to a rule: its name, then for a user's rule @ and its definition."""
    definition = definition_of(rule)
    return f"{rule.name}@{definition}" if definition else rule.name


def make_rule(reference: str, hyperparameters: dict[str, float]) -> "Rule":
    """The rule that a message or file refers to.

    Args:
        reference: As from `reference_of`.
        hyperparameters: As from Rule.hyperparameters.

    Raises:
        ConfigError: There is no such rule, it has another definition here, or a value is wrong.
    """
    name, _, definition = reference.partition("@")
    rule = rule_class(name)
    own = definition_of(rule)
    if definition != own:
        raise ConfigError(
            f"rule {name!r} has the definition {own or 'of psfleet'!r} in this process ({_place(rule)}) and "
            f"{definition or 'of psfleet'!r} in the one that made the table; servers, workers and the "
            "snapshot from which they start need the same version of its module"
        )
    return rule.from_hyperparameters(hyperparameters)


def import_rules(modules: Iterable[str]) -> None:
    """Import the modules that define a user's rules.

    Raises:
        ConfigError: A module is not there or cannot be imported.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise ConfigError(
                f"the module of rules {module!r} cannot be imported: {type(error).__name__}: {error}; "
                "it must be on the Python path of every server and worker"
            ) from error


def _place(rule: type["Rule"]) -> str:
    return f"{rule.__module__}.{rule.__qualname__}"
