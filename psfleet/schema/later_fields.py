"""Fields of a definition that came after version 1 of snapshots, each declared where its attribute is:

    precision: RowPrecision = later("float32", "precision", str, since=3)

Snapshots and messages (logs are made of these) follow: they leave such a field out where the definition has
the default. So what needs no later version stays as it was.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["LaterField", "arguments", "later", "later_fields", "later_values"]


@dataclass(frozen=True)
class LaterField:
    """How an attribute is stored.

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
        """What a snapshot's document has if it has the field."""
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
    stored = LaterField(name, kind, since, inside)
    return dataclasses.field(default=default, compare=compare, metadata={"later": stored})


def later_fields(definition: Any) -> list[LaterField]:
    """Those of a definition's class, in order."""
    return [stored for stored, _ in _attributes(definition)]


def later_values(definition: Any) -> dict[LaterField, Any]:
    """What is to be stored of a definition: what has not the default, and what is in one object with it."""
    found = {stored: getattr(definition, of.name) for stored, of in _attributes(definition)}
    wanted = {stored.key for stored, of in _attributes(definition) if found[stored] != of.default}
    return {stored: value for stored, value in found.items() if stored.key in wanted}


def arguments(definition: Any, said: Mapping[str, Any]) -> dict[str, Any]:
    """What the constructor of a definition takes of stored values by name; the others are left alone."""
    return {
        of.name: said[stored.name] for stored, of in _attributes(definition) if stored.name in said
    }


def _attributes(definition: Any) -> Iterable[tuple[LaterField, dataclasses.Field[Any]]]:
    for of in dataclasses.fields(definition):
        if (stored := of.metadata.get("later")) is not None:
            yield stored, of
