"""Base class of update rules and eviction policies, which tables refer to by name.

Servers, workers and snapshots never send code: a table's rule is sent as a name and numbers, and each process
looks the name up in its own registry (finding_rules.py). Python adds a class that derives from `Rule` or
`EvictionPolicy` and has a `name` to the registry when it defines the class.
"""

import dataclasses
import math
import re
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from psfleet.core.base.errors import ConfigError, RuleError
from psfleet.core.base.validation.annotations import check_fields

_NAME = re.compile("[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class NamedDefinition:
    """Base class of rules and eviction policies: a frozen dataclass whose fields are the hyperparameters.

    Each field has a default and is a number or a bool, so that a definition can be sent as a name and
    numbers, never as code. Annotations state the range of a field; the constructor checks it.

    Attributes:
        word: Kind of definition in error messages: "rule" or "eviction policy".
        known: Registry of all rules, or of all policies, by name.
        name: Name that tables use for the definition: lower-case letters, digits and `_`.
        version: Text that the author changes whenever results change. Definitions with equal versions must
            compute the same. If empty, processes compare a digest of the source instead (rule_digest.py).
    """

    word: ClassVar[str]
    known: ClassVar[dict[str, Any]]
    name: ClassVar[str]
    version: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            _register(cls)

    def __post_init__(self) -> None:
        check_fields(type(self).__name__, self)

    def hyperparameters(self) -> dict[str, float]:
        """Return the fields as plain numbers, the form that messages and files contain."""
        return {f.name: float(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_hyperparameters(cls, values: dict[str, float]) -> Self:
        """Make a definition with these fields, each converted back to the type of its default.

        Args:
            values: Numbers from `hyperparameters`. Missing fields get their defaults.

        Raises:
            ConfigError: A field is unknown, or a value is out of the field's range.
        """
        fields = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - set(fields))
        if unknown:
            raise ConfigError(
                f"{cls.word} {cls.name!r} has no hyperparameter {unknown[0]!r}; "
                f"it has {', '.join(fields) or 'none'}"
            )
        kinds: dict[str, Any] = {name: type(field.default) for name, field in fields.items()}
        # int(nan) would fail without a helpful message, and bool(nan) would be True. Float fields are left to
        # the constructor, which checks their ranges and has better messages.
        for name, value in values.items():
            if kinds[name] is not float and not math.isfinite(value):
                raise ConfigError(
                    f"{cls.word} {cls.name!r}: {name} is {value!r}, it must be finite"
                )
        return cls(**{name: kinds[name](value) for name, value in values.items()})


def _register(rule: type[NamedDefinition]) -> None:
    """Add a rule or policy to its registry.

    A class that is defined again, as when a module is reloaded, replaces its first definition.

    Raises:
        RuleError: The name is malformed, or a class of another module or class name already uses it.
    """
    registered = rule.known.get(rule.name)
    if not _NAME.fullmatch(rule.name):
        raise RuleError(
            f"the {rule.word} {rule.__name__} has the name {rule.name!r}; a name has lower-case letters, "
            "digits and _, and begins with a letter"
        )
    if registered is not None and place_of(registered) != place_of(rule):
        raise RuleError(
            f"the {rule.word} {place_of(rule)} has the name {rule.name!r}, which is that of "
            f"{place_of(registered)}; give it another"
        )
    rule.known[rule.name] = rule


def place_of(rule: type[NamedDefinition]) -> str:
    """Return the module and name of a definition's class, for messages."""
    return f"{rule.__module__}.{rule.__qualname__}"
