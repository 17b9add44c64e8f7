"""Fields of a definition that came after version 1 of snapshots, each declared where its attribute is:

    precision: RowPrecision = later("float32", "precision", str, since=3)

Snapshots and messages (logs are made of these) follow: they leave such a field out where the definition has
the default. So what needs no later version stays as it was.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LaterField:
    """Attribute that was added to a stored definition later.

    Attributes:
        name: In snapshots and messages. The attribute may be renamed; this may not.
        kind: Its type there.
        since: The first version of snapshots that may have it; None: only messages have it.
        inside: The object of a snapshot's document that it is a part of, whole or not at all; empty: none.
    """

    name: str
    kind: type
    since: int | None
    inside: str = ""

    @property
    def key(self) -> str:
        """Key in a snapshot's document that has the field."""
        return self.inside or self.name


def later(
    default: Any,
    name: str,
    kind: type,
    *,
    since: int | None,
    inside: str = "",
    compare: bool = True,
) -> Any:
    """An attribute with a default that is stored as LaterField says.

    Its field in messages is `optional` if 0, False or "" is a value of it without being the default.
    """
    field = LaterField(name, kind, since, inside)
    return dataclasses.field(default=default, compare=compare, metadata={"later": field})


def later_fields(definition: Any) -> list[LaterField]:
    """Those of a definition's class, in order."""
    return [field for field, _ in _attributes(definition)]


def later_values(definition: Any) -> dict[LaterField, Any]:
    """Return the fields to store: those that differ from their default, and the rest of their group."""
    values = {field: getattr(definition, of.name) for field, of in _attributes(definition)}
    keys = {field.key for field, of in _attributes(definition) if values[field] != of.default}
    return {field: value for field, value in values.items() if field.key in keys}


def arguments(definition: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constructor's arguments for stored values by name; the others are left alone."""
    return {
        of.name: values[field.name] for field, of in _attributes(definition) if field.name in values
    }


def _attributes(definition: Any) -> Iterable[tuple[LaterField, dataclasses.Field[Any]]]:
    for of in dataclasses.fields(definition):
        if (field := of.metadata.get("later")) is not None:
            yield field, of
