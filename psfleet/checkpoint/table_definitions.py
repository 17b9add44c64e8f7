"""The definition of a table in a document; LATER lists the fields that came after version 1 of snapshots."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from psfleet.formats.document import exact
from psfleet.rules import make_rule, reference_of
from psfleet.schema.entry import make_entry
from psfleet.schema.table import DecaySpec, InitializerSpec, TableSpec

__all__ = ["LATER", "LATEST", "LaterField", "table_from_json", "table_to_json", "version_of"]


@dataclass(frozen=True)
class LaterField:
    """A field that a document leaves out where the definition has the default.

    Attributes:
        key: Its name in the document.
        kind: Its type there.
        since: The first version of snapshots that may have it.
        write: Its value there; None: the definition has the default.
        read: The arguments of TableSpec that such a value stands for.
    """

    key: str
    kind: type
    since: int
    write: Callable[[TableSpec], Any]
    read: Callable[[Any], dict[str, Any]]


def _group(spec: TableSpec) -> dict[str, int] | None:
    return None if spec.servers is None else {"servers": spec.servers, "first": spec.first}


def _read_group(said: Any) -> dict[str, Any]:
    servers, first = exact(said, "group", servers=int, first=int)
    return {"servers": servers, "first": first}


def _precision(spec: TableSpec) -> str | None:
    return None if spec.precision == "float32" else spec.precision


LATER = (
    LaterField("group", dict, 2, _group, _read_group),
    LaterField("precision", str, 2, _precision, lambda said: {"precision": said}),
)
"""In the order in which documents have them."""

LATEST = max(field.since for field in LATER)
"""The version of snapshots that has them all."""


def version_of(said: Any) -> int:
    """Which version of snapshots a definition in a document needs."""
    there = said if isinstance(said, dict) else {}
    return max((field.since for field in LATER if field.key in there), default=1)


def table_to_json(spec: TableSpec) -> dict[str, Any]:
    """The definition in a document."""
    start, entry = spec.initializer, spec.entry
    later = {field.key: field.write(spec) for field in LATER}
    return {
        **{key: value for key, value in later.items() if value is not None},
        "name": spec.name,
        "kind": spec.kind,
        "shape": spec.shape,
        "rule": reference_of(spec.rule),
        "hyperparameters": spec.rule.hyperparameters(),
        "decay": {"l1": spec.decay.l1, "l2": spec.decay.l2},
        "initializer": {"kind": start.kind, "low": start.low, "high": start.high},
        "seed": spec.seed,
        "every_row": spec.every_row,
        "entry": {"kind": entry.kind, "values": entry.values()} if entry else None,
    }


def table_from_json(said: Any) -> TableSpec:
    """The definition that a document holds.

    Raises:
        ValueError, TypeError, PsfleetError: It is none.
    """
    kinds = {"name": str, "kind": str, "shape": list, "rule": str, "hyperparameters": dict}
    more = {"decay": dict, "initializer": dict, "seed": int, "every_row": bool}
    later = [field for field in LATER if field.key in said]
    name, kind, shape, rule, hyperparameters, decay, start, seed, every_row, entry, *rest = exact(
        said,
        "table",
        **kinds,
        **more,
        entry=dict | None,
        **{field.key: field.kind for field in later},
    )
    if any(type(extent) is not int for extent in shape):
        raise TypeError(f"table {name!r} has the shape {shape!r}")
    number = float | int
    given: dict[str, Any] = {}
    for field, value in zip(later, rest, strict=True):
        given |= field.read(value)
    return TableSpec(
        name,
        kind,
        tuple(shape),
        make_rule(rule, hyperparameters),
        DecaySpec(*exact(decay, "decay", l1=number, l2=number)),
        InitializerSpec(*exact(start, "initializer", kind=str, low=number, high=number)),
        seed,
        every_row,
        None if entry is None else make_entry(*exact(entry, "entry", kind=str, values=dict)),
        **given,
    )
