"""What a user may define and servers compute: referred to by its name, a digest and its numbers."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from psfleet.errors import ConfigError
from psfleet.rules.finding_rules import register
from psfleet.validation.annotations import check_fields

__all__ = ["NamedDefinition"]


@dataclass(frozen=True)
class NamedDefinition:
    """A rule or an eviction policy: a frozen dataclass whose fields are its hyperparameters.

    Each field has a default and is a number or a bool, so that a definition travels as a name and a list
    of numbers, never as code. Annotations state the range; the constructor checks them.

    Attributes:
        word: What errors call it.
        known: All of them, by name.
        name: Lower-case letters, digits and `_`. Tables refer to the definition by it.
        version: States that two definitions with equal versions compute the same. Empty: a digest of the
            source text takes its place, see psfleet.rules.definition_digest.
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
        known = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - set(known))
        if unknown:
            raise ConfigError(
                f"{cls.word} {cls.name!r} has no hyperparameter {unknown[0]!r}; "
                f"it has {', '.join(known) or 'none'}"
            )
        kinds: dict[str, Any] = {name: type(field.default) for name, field in known.items()}
        for name, value in values.items():  # a float's own range says more
            if kinds[name] is not float and not math.isfinite(value):
                raise ConfigError(
                    f"{cls.word} {cls.name!r}: {name} is {value!r}, it must be finite"
                )
        return cls(**{name: kinds[name](value) for name, value in values.items()})
