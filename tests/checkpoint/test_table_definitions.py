"""Whatever is declared in a table's definition is in snapshots and messages, under names of its own."""

import dataclasses
import json
from typing import Any

import pytest

from psfleet.checkpoint.manifest import table_from_json, table_to_json, version_of
from psfleet.core.base.json_documents import Misfit
from psfleet.core.engine.rules.adam import Adam
from psfleet.core.engine.rules.momentum import SGD
from psfleet.core.engine.schema.entry import CountFilterEntry
from psfleet.core.engine.schema.table import (
    DecaySpec,
    InitializerSpec,
    TableSpec,
    arguments,
    later,
    later_fields,
    later_values,
)
from psfleet.core.net.table_messages import read_spec, write_spec
from psfleet.core.net.v1 import shard_pb2

pytestmark = pytest.mark.quick

PLAIN = TableSpec("rows", "sparse", (2,), SGD())
OTHER: dict[str, Any] = {
    "name": "others",
    "kind": "dense",
    "shape": (3,),
    "rule": Adam(beta1=0.5),
    "decay": DecaySpec(0.25, 0.5),
    "initializer": InitializerSpec("normal", 0.5, 0.25),
    "seed": 2**62,
    "every_row": True,
    "entry": CountFilterEntry(3),
    "device": "cuda",
    "servers": 2,
    "first": 5,
    "precision": "bfloat16",
}
"""For each attribute a value that PLAIN has not."""
IN_MESSAGES_ALONE = {"device"}  # which memory holds a table is the servers' matter


def values(spec: TableSpec) -> dict[str, Any]:
    """Its attributes, those too that do not count when definitions are compared."""
    return {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(TableSpec)])
def test_every_attribute_is_stored(name: str) -> None:
    """Each comes back from a message and from a snapshot's document; a new one cannot be forgotten."""
    # Of all servers none is the first.
    among: dict[str, Any] = {"servers": 2} if name == "first" else {}
    spec = dataclasses.replace(PLAIN, **among, **{name: OTHER[name]})
    assert values(read_spec(write_spec(spec))) == values(spec)
    document = json.loads(json.dumps(table_to_json(spec)))
    kept = dataclasses.replace(spec, device=None) if name in IN_MESSAGES_ALONE else spec
    assert values(table_from_json(document)) == values(kept)


def test_defaults_are_left_out() -> None:
    """A definition that has nothing later is of version 1, and its message has no later field."""
    assert version_of(table_to_json(PLAIN)) == 1
    names = {field.name for field in later_fields(TableSpec)}
    assert names <= set(shard_pb2.TableSpec.DESCRIPTOR.fields_by_name)
    assert not names & {field.name for field, _ in write_spec(PLAIN).ListFields()}
    grouped = table_to_json(dataclasses.replace(PLAIN, servers=2))
    assert (version_of(grouped), grouped["group"]) == (2, {"servers": 2, "first": 0})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"device": "cuda"}, "unknown field 'device' in its table"),
        ({"first": 1}, "unknown field 'first' in its table"),
        ({"precision": 16}, "16 as precision in its table, which must be of type str"),
        ({"group": 2}, "2 as group in its table, which must be of type dict"),
        ({"group": {"servers": 2}}, "lacks the field 'first' in its group"),
        ({"group": {"servers": 2, "first": 0, "last": 1}}, "unknown field 'last' in its group"),
    ],
)
def test_a_later_field_is_checked(change: dict[str, Any], words: str) -> None:
    """What no version has, or has in another form, is refused in a sentence."""
    document = json.loads(json.dumps(table_to_json(PLAIN))) | change
    with pytest.raises(Misfit, match=words):
        table_from_json(document)


@dataclasses.dataclass(frozen=True)
class Wider(TableSpec):
    """A definition with one attribute more, as a next version might declare it."""

    replicas: int = later(0, "copies", int, since=3)


def test_a_new_attribute_is_one_declaration() -> None:
    """It is stored under the name that it declares, whatever the attribute is called."""
    wide = Wider("rows", "sparse", (2,), SGD(), precision="bfloat16", replicas=4)
    stored = {field.name: (field.since, value) for field, value in later_values(wide).items()}
    assert stored == {"precision": (2, "bfloat16"), "copies": (3, 4)}
    assert arguments(Wider, {"copies": 4, "seed": 1}) == {"replicas": 4}
