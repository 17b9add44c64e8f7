"""The definition of a rule: a digest of the source text on which its results depend."""

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
"""Every rule that this process knows, by name. A class joins when Python defines it."""
POLICIES: dict[str, type["EvictionPolicy"]] = {}
"""Every eviction policy that this process knows, likewise."""

_NAME = re.compile("[a-z][a-z0-9_]*")


def register(rule: type["NamedDefinition"]) -> None:
    """Make a rule known by its name. A class that is defined again replaces the earlier one.

    Raises:
        RuleError: The name is not one, or another rule has it.
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
    """The rule of this name.

    Raises:
        RuleError: There is none.
    """
    return find(RULES, "rule", name)


def own_rules() -> list[type["Rule"]]:
    """The rules that come with psfleet, without those of modules that a user names."""
    return [rule for rule in RULES.values() if is_own(rule)]


def find(definitions: dict[str, type[T]], word: str, name: str) -> type[T]:
    """The definition of this name.

    Args:
        known: RULES or POLICIES.
        word: Name of the definitions in errors.
        name: Name of the definition.

    Raises:
        RuleError: There is none.
    """
    if name not in definitions:
        raise RuleError(
            f"{word} {name!r} is unknown; use one of {', '.join(sorted(definitions))}, or name the module "
            "that defines it: psfleet-launch --rules MODULE, or PSFLEET_RULES"
        )
    return definitions[name]


def reference_of(rule: "NamedDefinition") -> str:
    """Return the name of a rule in messages and files; a user's rule has @ and its digest behind it."""
    definition = definition_of(type(rule))
    return f"{rule.name}@{definition}" if definition else rule.name


def make_rule(reference: str, hyperparameters: dict[str, float]) -> "Rule":
    """The rule that a message or file refers to.

    Args:
        reference: Result of `reference_of`.
        hyperparameters: Value of Rule.hyperparameters.

    Raises:
        RuleError: There is no such rule, it has another definition here, or a value is wrong.
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
        modules: Their names, as for `import`.
        folder: Folder of modules besides the Python path; empty: none.

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


@dataclass(frozen=True)
class NamedDefinition:
    """A rule or an eviction policy: a frozen dataclass whose fields are its hyperparameters.

    Each field has a default and is a number or a bool, so that a definition travels as a name and a list
    of numbers, never as code. Annotations state the range; the constructor checks them.

    Attributes:
        word: Name of the kind in errors.
        known: All of them, by name.
        name: Lower-case letters, digits and `_`. Tables refer to the definition by it.
        version: States that two definitions with equal versions compute the same. Empty: a digest of the
            source text takes its place, see psfleet.core.engine.rules.finding_rules.
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
        """The fields as plain numbers, the form in which it travels."""
        return {f.name: float(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_hyperparameters(cls, values: dict[str, float]) -> Self:
        """The definition with these fields, each brought back to the field's own type."""
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
