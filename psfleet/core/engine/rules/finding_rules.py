"""Registry of rules and eviction policies: definitions by name, and how they travel in messages and files.

A class that derives from `Rule` or `EvictionPolicy` and has a name joins the registry when Python defines it.
Servers, workers and snapshots refer to it by a reference, `name` or `name@digest`, and its hyperparameters as
numbers. `make_rule` turns these into a rule, and refuses a rule whose definition here has another digest
(rule_digest.py). A user's rules are known after `import_rules`.
"""

import dataclasses
import importlib
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from psfleet.core.base.errors import ConfigError, RuleError
from psfleet.core.base.validation.annotations import check_fields
from psfleet.core.engine.rules.rule_digest import definition_of, is_own

if TYPE_CHECKING:
    from psfleet.core.engine.rules.eviction_policy import EvictionPolicy
    from psfleet.core.engine.rules.rule import Rule


T = TypeVar("T", bound="NamedDefinition")

RULES: dict[str, type["Rule"]] = {}
"""All rules that this process knows, by name. A class joins when Python defines it."""
POLICIES: dict[str, type["EvictionPolicy"]] = {}
"""All eviction policies that this process knows, by name."""

_NAME = re.compile("[a-z][a-z0-9_]*")


def register(rule: type["NamedDefinition"]) -> None:
    """Add a rule or policy to its registry. A class that is defined a second time replaces the first.

    Raises:
        RuleError: The name is malformed, or another class has it.
    """
    other = rule.known.get(rule.name)
    if not _NAME.fullmatch(rule.name):
        raise RuleError(
            f"the {rule.word} {rule.__name__} has the name {rule.name!r}; a name has lower-case letters, "
            "digits and _, and begins with a letter"
        )
    if other is not None and _place(other) != _place(rule):
        raise RuleError(
            f"the {rule.word} {_place(rule)} has the name {rule.name!r}, which is that of {_place(other)}; "
            "give it another"
        )
    rule.known[rule.name] = rule


def rule_class(name: str) -> type["Rule"]:
    """Return the rule with this name.

    Raises:
        RuleError: No rule has this name.
    """
    return find(RULES, "rule", name)


def own_rules() -> list[type["Rule"]]:
    """Return the rules that come with psfleet, without those of a user's modules."""
    return [rule for rule in RULES.values() if is_own(rule)]


def find(definitions: dict[str, type[T]], word: str, name: str) -> type[T]:
    """Return the definition with this name.

    Args:
        definitions: RULES or POLICIES.
        word: Kind of the definitions in error messages: "rule" or "eviction policy".
        name: Name of the definition.

    Raises:
        RuleError: No definition has this name.
    """
    if name not in definitions:
        raise RuleError(
            f"{word} {name!r} is unknown; use one of {', '.join(sorted(definitions))}, or name the module "
            "that defines it: psfleet-launch --rules MODULE, or PSFLEET_RULES"
        )
    return definitions[name]


def reference_of(rule: "NamedDefinition") -> str:
    """Return the reference to a rule in messages and files: its name, with @ and a digest for a user's."""
    definition = definition_of(type(rule))
    return f"{rule.name}@{definition}" if definition else rule.name


def make_rule(reference: str, hyperparameters: dict[str, float]) -> "Rule":
    """Make the rule that a message or file refers to.

    Args:
        reference: Result of `reference_of`.
        hyperparameters: Value of Rule.hyperparameters.

    Raises:
        RuleError: No rule has this name, the rule is defined differently here, or a value is wrong.
    """
    return make(RULES, "rule", reference, hyperparameters)


def make(
    definitions: dict[str, type[T]], word: str, reference: str, hyperparameters: dict[str, float]
) -> T:
    """Make one of these definitions as `make_rule` does; `definitions` and `word` as for `find`."""
    name, _, definition = reference.partition("@")
    rule = find(definitions, word, name)
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
        modules: Names of modules, as for `import`.
        folder: Folder to search after the Python path, or empty for none.

    Raises:
        RuleError: A module does not exist or cannot be imported.
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


@dataclass(frozen=True)
class NamedDefinition:
    """Base class of rules and eviction policies: a frozen dataclass whose fields are the hyperparameters.

    Each field has a default and is a number or a bool, so that a definition travels as a name and a list
    of numbers, never as code. Annotations state the range; the constructor checks it.

    Attributes:
        word: Kind in error messages: "rule" or "eviction policy".
        known: Registry of the kind, by name.
        name: Name by which tables refer to the definition: lower-case letters, digits and `_`.
        version: Text that its author changes whenever results change: definitions with equal versions compute
            the same. If it is empty, a digest of the source text is used, see rule_digest.py.
    """

    word: ClassVar[str]
    known: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    version: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            register(cls)

    def __post_init__(self) -> None:
        check_fields(type(self).__name__, self)

    def hyperparameters(self) -> dict[str, float]:
        """Return the fields as plain numbers, the form that messages and files have."""
        return {f.name: float(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_hyperparameters(cls, values: dict[str, float]) -> Self:
        """Make a definition with these fields, each converted back to the field's own type."""
        fields = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - set(fields))
        if unknown:
            raise ConfigError(
                f"{cls.word} {cls.name!r} has no hyperparameter {unknown[0]!r}; "
                f"it has {', '.join(fields) or 'none'}"
            )
        kinds: dict[str, Any] = {name: type(field.default) for name, field in fields.items()}
        for name, value in values.items():  # a float's own range says more
            if kinds[name] is not float and not math.isfinite(value):
                raise ConfigError(
                    f"{cls.word} {cls.name!r}: {name} is {value!r}, it must be finite"
                )
        return cls(**{name: kinds[name](value) for name, value in values.items()})
