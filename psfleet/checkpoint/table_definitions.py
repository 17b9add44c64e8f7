"""The definition of a table in a document; psfleet/schema/table.py declares what came after version 1."""

from typing import Any

from psfleet.formats.document import exact
from psfleet.rules import make_rule, reference_of
from psfleet.schema.entry import make_entry
from psfleet.schema.later_fields import LaterField, arguments, later_fields, later_values
from psfleet.schema.table import DecaySpec, InitializerSpec, TableSpec

__all__ = ["LATEST", "table_from_json", "table_to_json", "version_of"]

_LATER = [field for field in later_fields(TableSpec) if field.since]
LATEST = max(field.since or 1 for field in _LATER)
"""The version of snapshots that has every field."""


def version_of(said: Any) -> int:
    """Which version of snapshots a definition in a document needs."""
    there = said if isinstance(said, dict) else {}
    return max((field.since or 1 for field in _LATER if field.key in there), default=1)


def table_to_json(spec: TableSpec) -> dict[str, Any]:
    """The definition in a document."""
    start, entry = spec.initializer, spec.entry
    return {
        **_later_to_json(spec),
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
    later = [field for field in _LATER if field.key in said]
    name, kind, shape, rule, hyperparameters, decay, start, seed, every_row, entry, *_ = exact(
        said,
        "table",
        **kinds,
        **more,
        entry=dict | None,
        **{field.key: dict if field.inside else field.kind for field in later},
    )
    if any(type(extent) is not int for extent in shape):
        raise TypeError(f"table {name!r} has the shape {shape!r}")
    number = float | int
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
        **arguments(TableSpec, _later_from_json(said, later)),
    )


def _later_to_json(spec: TableSpec) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field, value in later_values(spec).items():
        if field in _LATER:
            (found.setdefault(field.inside, {}) if field.inside else found)[field.name] = value
    return found


def _later_from_json(said: dict[str, Any], later: list[LaterField]) -> dict[str, Any]:
    found = {field.name: said[field.name] for field in later if not field.inside}
    for key in {field.inside for field in later if field.inside}:
        kinds = {field.name: field.kind for field in later if field.inside == key}
        found |= zip(kinds, exact(said[key], key, **kinds), strict=True)
    return found
