"""Forms of messages beside JSON, for `parse` of a topic.

KafkaTopic(servers, "clicks", features, ["click"], start={0: 0}, parse=avro("click.avsc"))
KafkaTopic(servers, "clicks", features, ["click"], start={0: 0}, parse=protobuf(Click, framed=True))

Frames are those of a schema registry's clients: a zero byte, four bytes of the schema's number, and in
Protobuf the place of the message in its file.
"""

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError, Message

from psfleet.core.base.errors import ConfigError, not_installed
from psfleet.core.base.validation.annotations import checked

Parse = Callable[[bytes], Any]
_HEAD = 5  # bytes of a frame before the message


@checked
def avro(schema: Any) -> Parse:
    """Parse Avro records, each without the head of a file; `pip install '.[avro]'`.

    Args:
        schema: Schema of the messages: a mapping, or the path of an `.avsc` file. A mapping from numbers to
            schemas: messages are framed, and each names its schema.

    Raises:
        ConfigError: fastavro is not installed, or the schema is none.
    """
    try:
        import fastavro
    except ModuleNotFoundError:
        raise not_installed("Avro messages need", "fastavro", "avro") from None

    def parsed(one: Any) -> Any:
        try:
            text = Path(one).read_text() if isinstance(one, str | Path) else None
            return fastavro.parse_schema(one if text is None else json.loads(text))
        except (OSError, ValueError, TypeError, fastavro.schema.SchemaParseException) as error:
            raise ConfigError(f"{one!r:.80} is no Avro schema: {error}") from None

    by_number = isinstance(schema, Mapping) and all(isinstance(key, int) for key in schema)
    schemas = {number: parsed(one) for number, one in schema.items()} if by_number else {}
    single = None if by_number else parsed(schema)

    def parse(value: bytes) -> Any:
        source = io.BytesIO(value)
        try:
            writer = single or schemas[_schema_number(source.read(_HEAD), schemas)]
            record = fastavro.schemaless_reader(source, writer, None)
        except (EOFError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
            raise ValueError(f"it is no such Avro record ({type(error).__name__})") from None
        if source.tell() < len(value):
            raise ValueError(f"{len(value) - source.tell()} bytes follow its Avro record")
        return record

    return parse


@checked
def protobuf(message: type[Message], framed: bool = False) -> Parse:
    """Parse messages of a class that protoc has made.

    Args:
        message: The class. A field that is not set is missing, unless its kind has a default.
    """

    def parse(value: bytes) -> Any:
        if framed:
            _schema_number(value[:_HEAD])
            value = value[_message_start(value) :]
        try:
            fields = message.FromString(value)
        except DecodeError as error:
            raise ValueError(f"it is no {message.DESCRIPTOR.name}: {error}") from None
        return {
            field.name: _field_value(fields, field)
            for field in message.DESCRIPTOR.fields
            if not field.has_presence or fields.HasField(field.name)
        }

    return parse


def _field_value(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    return list(value) if field.is_repeated else value


def _schema_number(head: bytes, schemas: Mapping[int, Any] | None = None) -> int:
    number = int.from_bytes(head[1:], "big")
    if len(head) < _HEAD or head[0]:
        raise ValueError("it has no frame with the number of a schema")
    if schemas is not None and number not in schemas:
        raise ValueError(
            f"its schema has the number {number}, none of {', '.join(map(str, schemas))}"
        )
    return number


def _message_start(value: bytes) -> int:
    """The first byte behind the place in the file: a count and so many numbers, each a zigzag varint."""
    at, remaining = _HEAD, 1
    first = True
    while remaining:
        number = shift = 0
        while True:
            if at >= len(value) or shift > 28:
                raise ValueError("its frame ends too early")
            byte = value[at]
            number |= (byte & 127) << shift
            at, shift = at + 1, shift + 7
            if byte < 128:
                break
        remaining = number >> 1 if first else remaining - 1
        first = False
    return at
