"""Messages of a Kafka topic in Avro and Protobuf, bare and framed."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from psfleet import fleet
from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.data.message_formats import avro, protobuf
from psfleet.features import Feature, FeatureSet, Table

pytest.importorskip(
    "confluent_kafka", reason="confluent-kafka is not installed: pip install psfleet[kafka]"
)

from psfleet.data.kafka import KafkaTopic  # after the check for confluent-kafka
from tests.datasets.broker import Broker

pytestmark = pytest.mark.quick

TABLE = Table("t", 4)
FEATURES = FeatureSet(
    [Feature("user", TABLE), Feature("tags", TABLE), Feature("city", TABLE, hashed=True)]
)
SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "Click",
    "fields": [
        {"name": "user", "type": "long"},
        {"name": "tags", "type": {"type": "array", "items": "long"}},
        {"name": "city", "type": ["null", "string"], "default": None},
        {"name": "click", "type": "float"},
    ],
}


def rows() -> list[dict[str, Any]]:
    """Samples, of which one has no city."""
    return [
        {"user": row, "tags": [row] * row, "city": "x" if row else None, "click": float(row)}
        for row in range(3)
    ]


def check(name: str, values: list[bytes], parse: Any) -> None:
    """The messages, sent through a broker, are the samples; one that is cut off is named."""
    with Broker() as broker:
        broker.send(name, 0, [*values, values[-1][:1]])
        options: dict[str, Any] = {"start": {0: 0}, "parse": parse}
        topic = KafkaTopic(broker.servers, name, FEATURES, ["click"], end={0: 3}, **options)
        (batch,) = fleet.dataset(topic, 8)
        topic.close()
        assert batch.labels["click"].tolist() == [0, 1, 2]
        assert batch.features["user"].values.tolist() == [0, 1, 2]
        assert batch.features["tags"].lengths.tolist() == [0, 1, 2]
        assert batch.features["city"].values.tolist() == ["x", "x"]
        topic = KafkaTopic(broker.servers, name, FEATURES, ["click"], end={0: 4}, **options)
        with pytest.raises(
            UsageError, match=rf"{name} partition 0 offset 3: it .*; the message is b'"
        ):
            list(fleet.dataset(topic, 8))
        topic.close()


def framed(number: int, *place: int) -> bytes:
    """The head of a schema registry's client."""
    return bytes([0, *number.to_bytes(4, "big"), *place])


def test_avro(tmp_path: Path) -> None:
    """Records of one schema, from a file, and framed ones that each name theirs."""
    fastavro = pytest.importorskip(
        "fastavro", reason="fastavro is not installed: pip install psfleet[avro]"
    )
    values = []
    for row in rows():
        out = io.BytesIO()
        fastavro.schemaless_writer(out, fastavro.parse_schema(SCHEMA), row)
        values.append(out.getvalue())
    (tmp_path / "click.avsc").write_text(json.dumps(SCHEMA))
    check("avro", values, avro(str(tmp_path / "click.avsc")))
    parse = avro({7: SCHEMA, 9: SCHEMA})
    check("framed", [framed(9) + value for value in values], parse)
    with pytest.raises(ValueError, match=r"its schema has the number 8, none of 7, 9"):
        parse(framed(8) + values[0])
    with pytest.raises(ValueError, match=r"1 bytes follow its Avro record"):
        parse(framed(7) + values[0] + b"\0")
    with pytest.raises(ConfigError, match=r"none.avsc' is no Avro schema: .*No such file"):
        avro("none.avsc")
    with pytest.raises(ConfigError, match=r"is no Avro schema"):
        avro({"type": "strange"})


def click_class() -> Any:
    """A message class as protoc makes it."""
    kinds = FieldDescriptorProto
    optional, repeated = kinds.LABEL_OPTIONAL, kinds.LABEL_REPEATED
    message = DescriptorProto(name="Click")
    for number, (name, kind, label) in enumerate(
        [
            ("user", kinds.TYPE_INT64, optional),
            ("tags", kinds.TYPE_INT64, repeated),
            ("city", kinds.TYPE_STRING, optional),
            ("click", kinds.TYPE_FLOAT, optional),
        ],
        1,
    ):
        message.field.add(name=name, number=number, type=kind, label=label)
    message.oneof_decl.add(name="_city")
    message.field[2].proto3_optional, message.field[2].oneof_index = True, 0
    pool = DescriptorPool()
    file = pool.Add
    file(FileDescriptorProto(name="click.proto", syntax="proto3", message_type=[message]))
    return GetMessageClass(pool.FindMessageTypeByName("Click"))


def test_protobuf() -> None:
    """Messages of a class, bare and framed: defaults are values, and a field that is not set is missing."""
    kind = click_class()
    values = [kind(**row).SerializeToString() for row in rows()]
    check("protobuf", values, protobuf(kind))
    parse = protobuf(kind, framed=True)
    check("framed", [framed(3, 0) + value for value in values], parse)
    assert parse(framed(3, 4, 2, 0) + values[1]) == rows()[1]
    with pytest.raises(ValueError, match=r"it has no frame with the number of a schema"):
        parse(values[1])
    with pytest.raises(ValueError, match=r"its frame ends too early"):
        parse(framed(3, 4, 2))
