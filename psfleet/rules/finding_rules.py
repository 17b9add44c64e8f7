"""Rules and eviction policies by name: psfleet's own, and those of modules that a user names."""

import importlib
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from psfleet.errors import RuleError
from psfleet.rules.definition_digest import definition_of, is_own

if TYPE_CHECKING:
    from psfleet.rules.eviction_policy import EvictionPolicy
    from psfleet.rules.named_definition import NamedDefinition
    from psfleet.rules.rule import Rule

__all__ = [
    "POLICIES",
    "RULES",
    "find",
    "import_rules",
    "make",
    "make_rule",
    "own_rules",
    "reference_of",
    "register",
    "rule_class",
]

T = TypeVar("T", bound="NamedDefinition")

RULES: dict[str, type["Rule"]] = {}
"""Every rule that this process knows, by name. A class joins when Python defines it."""
POLICIES: dict[str, type["EvictionPolicy"]] = {}
"""Every eviction policy that this process knows, likewise."""

_NAME = re.compile("[a-z][a-z0-9_]*")


def register(rule: type["NamedDefinition"]) -> None:
    """Make a rule known by its name. A class that is defined again replaces the earlier one.

    Raises:
        RuleError: The name is not one, or another rule has it.
    """
    known = rule.known.get(rule.name)
    if not _NAME.fullmatch(rule.name):
        raise RuleError(
            f"the {rule.word} {rule.__name__} has the name {rule.name!r}; a name has lower-case letters, "
            "digits and _, and begins with a letter"
        )
    if known is not None and _place(known) != _place(rule):
        raise RuleError(
            f"the {rule.word} {_place(rule)} has the name {rule.name!r}, which is that of {_place(known)}; "
            "give it another"
        )
    rule.known[rule.name] = rule


def rule_class(name: str) -> type["Rule"]:
    """The rule of this name.

    Raises:
        RuleError: There is none.
    """
    return find(RULES, "rule", name)


def own_rules() -> list[type["Rule"]]:
    """The rules that come with psfleet, without those of modules that a user names."""
    return [rule for rule in RULES.values() if is_own(rule)]


def find(known: dict[str, type[T]], word: str, name: str) -> type[T]:
    """The definition of this name.

    Args:
        known: RULES or POLICIES.
        word: What the error calls them.
        name: Of the definition.

    Raises:
        RuleError: There is none.
    """
    if name not in known:
        raise RuleError(
            f"{word} {name!r} is unknown; use one of {', '.join(sorted(known))}, or name the module "
            "that defines it: psfleet-launch --rules MODULE, or PSFLEET_RULES"
        )
    return known[name]


def reference_of(rule: "NamedDefinition") -> str:
    """How messages and files refer to a rule: its name, then for a user's rule @ and its definition."""
    definition = definition_of(type(rule))
    return f"{rule.name}@{definition}" if definition else rule.name


def make_rule(reference: str, hyperparameters: dict[str, float]) -> "Rule":
    """The rule that a message or file refers to.

    Args:
        reference: As from `reference_of`.
        hyperparameters: As from Rule.hyperparameters.

    Raises:
        RuleError: There is no such rule, it has another definition here, or a value is wrong.
    """
    return make(RULES, "rule", reference, hyperparameters)


def make(
    known: dict[str, type[T]], word: str, reference: str, hyperparameters: dict[str, float]
) -> T:
    """As `make_rule`, of these definitions; `known` and `word` as for `find`."""
    name, _, definition = reference.partition("@")
    rule = find(known, word, name)
    own = definition_of(rule)
    if definition != own:
        raise RuleError(
            f"{word} {name!r} is defined differently here ({_place(rule)}, {own or 'built in'}) and where "
            f"its table comes from ({definition or 'built in'}); servers, workers and the snapshot that a "
            "job goes on from need the same definition"
        )
    return rule.from_hyperparameters(hyperparameters)


def import_rules(modules: Sequence[str], folder: str = "") -> None:
    """Import the modules that define a user's rules.

    Args:
        modules: Their names, as for `import`.
        folder: Where they may be besides the Python path; empty: nowhere.

    Raises:
        RuleError: A module is not there or cannot be imported.
    """
    if modules and folder and folder not in sys.path:
        sys.path.append(folder)  # the end: a file of the user must not stand for a library
    for module in modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            raise RuleError(
                f"the module of rules {module!r} cannot be imported ({type(error).__name__}: {error}); "
                "put it on the Python path of every server and worker, or beside the script"
            ) from error


def _place(rule: type["NamedDefinition"]) -> str:
    return f"{rule.__module__}.{rule.__qualname__}"
