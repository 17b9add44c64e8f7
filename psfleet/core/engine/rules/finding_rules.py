"""Looks up rules and eviction policies by name, and makes them from the contents of messages and files.

Servers, workers and snapshots refer to a rule by a reference and its hyperparameters as numbers:

    "adam", {"beta1": 0.9, ...}                   a rule of psfleet
    "my_sgd@1f0c9a77be52", {"momentum": 0.9}      a user's rule: with a digest of its source, or its version

`reference_of` makes the reference, and `make_rule` makes the rule from it. It refuses a rule whose source in
this process has another digest (rule_digest.py), because processes with different arithmetic would silently
train different models. `import_rules` makes a user's rules known.
"""

import importlib
import sys
from collections.abc import Sequence
from typing import TypeVar

from psfleet.core.base.errors import RuleError
from psfleet.core.engine.rules.named_definition import NamedDefinition, place_of
from psfleet.core.engine.rules.rule import RULES, Rule
from psfleet.core.engine.rules.rule_digest import definition_of, is_own

T = TypeVar("T", bound=NamedDefinition)


def rule_class(name: str) -> type[Rule]:
    """Return the class of the rule with this name.

    Raises:
        RuleError: No rule has this name.
    """
    return find(RULES, "rule", name)


def own_rules() -> list[type[Rule]]:
    """Return the rules that come with psfleet, without those of a user's modules."""
    return [rule for rule in RULES.values() if is_own(rule)]


def find(definitions: dict[str, type[T]], word: str, name: str) -> type[T]:
    """Return the class of the definition with this name.

    Args:
        definitions: RULES, or POLICIES of eviction_policy.py.
        word: Kind of the definitions in error messages: "rule" or "eviction policy".

    Raises:
        RuleError: No definition has this name.
    """
    if name not in definitions:
        raise RuleError(
            f"{word} {name!r} is unknown; use one of {', '.join(sorted(definitions))}, or name the module "
            "that defines it: psfleet-launch --rules MODULE, or PSFLEET_RULES"
        )
    return definitions[name]


def reference_of(rule: NamedDefinition) -> str:
    """Return the reference to a rule in messages and files.

    It is the rule's name and, for a user's rule, @ and the rule's version or digest.
    """
    definition = definition_of(type(rule))
    return f"{rule.name}@{definition}" if definition else rule.name


def make_rule(reference: str, hyperparameters: dict[str, float]) -> Rule:
    """Make the rule that a message or file refers to.

    Raises:
        RuleError: No rule has this name, or the rule is defined differently in this process.
        ConfigError: A hyperparameter is unknown, or its value is out of range.
    """
    return make(RULES, "rule", reference, hyperparameters)


def make(
    definitions: dict[str, type[T]], word: str, reference: str, hyperparameters: dict[str, float]
) -> T:
    """Make a rule or an eviction policy from its reference and hyperparameters.

    Args:
        definitions, word: As for `find`.
        reference, hyperparameters: As for `make_rule`.

    Raises:
        RuleError, ConfigError: As for `make_rule`.
    """
    name, _, definition = reference.partition("@")
    rule = find(definitions, word, name)
    own = definition_of(rule)
    if definition != own:
        raise RuleError(
            f"{word} {name!r} is defined differently here ({place_of(rule)}, {own or 'built in'}) and where "
            f"its table comes from ({definition or 'built in'}); servers, workers and the snapshot that a "
            "job goes on from need the same definition"
        )
    return rule.from_hyperparameters(hyperparameters)


def import_rules(modules: Sequence[str], folder: str = "") -> None:
    """Import the modules that define a user's rules.

    Args:
        folder: Folder to search after the Python path, or empty for none.

    Raises:
        RuleError: A module does not exist or cannot be imported.
    """
    if modules and folder and folder not in sys.path:
        sys.path.append(
            folder
        )  # at the end: a user's file must not replace a library of the same name
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise RuleError(
                f"the module of rules {module!r} cannot be imported ({type(error).__name__}: {error}); "
                "put it on the Python path of every server and worker, or beside the script"
            ) from error
