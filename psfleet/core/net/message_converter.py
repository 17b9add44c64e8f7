"""Conversion between dataclasses and protobuf messages by the names of their fields.

A converter is made when its module is imported, and made it refuses a field that only one side has, a
type that the other side cannot hold, and an optional field that is not optional on the other side. So a
new attribute of a dataclass needs a field of its name in protos/, and no code. Files and messages hold
the numbers of the fields, never the names.

How a type of Python is held (T: any of these):

    int, float, str, bytes, bool    the scalar
    T | None                        `optional`, or a message that is unset
    tuple[T, ...], list[T]          `repeated`; set, frozenset: likewise, ascending
    such of tuple[int, int]         `repeated` scalar: pairs, one after the other
    dict[K, T]                      map, read in order of its keys; likewise tuple[tuple[K, T], ...]
    dict[K, T], order kept          `repeated` message: field 1 is the key, the others hold T
    tuple[A, B]                     message: its fields in order of their numbers
    dataclass                       message of the same field names; of one field also that field alone
    T, within a map or an entry     message of one field, which holds T
"""

import dataclasses
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from psfleet.core.base.errors import FrameError

Value = TypeVar("Value")
M = TypeVar("M", bound=Message)

_INTEGERS = (
    FieldDescriptor.CPPTYPE_INT32,
    FieldDescriptor.CPPTYPE_INT64,
    FieldDescriptor.CPPTYPE_UINT32,
    FieldDescriptor.CPPTYPE_UINT64,
)
_SCALARS: dict[Any, tuple[int, ...]] = {
    int: _INTEGERS,
    float: (FieldDescriptor.CPPTYPE_DOUBLE,),
    bool: (FieldDescriptor.CPPTYPE_BOOL,),
    str: (FieldDescriptor.CPPTYPE_STRING,),
    bytes: (FieldDescriptor.CPPTYPE_STRING,),
}


class Codec(NamedTuple):
    """A pair of functions: to what the constructor of a message takes, and back."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


@dataclass(frozen=True)
class MessageCodec:
    """A message that is written and read by hand, wherever it occurs."""

    message: type[Message]
    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


@dataclass(frozen=True)
class SpreadCodec:
    """A class whose values several fields of a message hold together."""

    held: type
    fields: Set[str]
    write: Callable[[Any], dict[str, Any]]
    read: Callable[[Any], Any]


Exceptions = tuple[MessageCodec | SpreadCodec, ...]


class Converter(Generic[Value, M]):
    """A converter between a dataclass and a message.

    Args:
        value: The dataclass.
        message: The message.
        exceptions: Parts of it, at any depth, that are converted by hand.
        omitted: Attributes that are not stored; `read` takes those without a default.
        others: Fields of the message that `write` takes beside the value; None: any, see `check_shared`.

    Attributes:
        message: The message's class.
        fields: Names of the fields of the message that hold the value.

    Raises:
        TypeError: The two do not fit.
    """

    def __init__(
        self,
        value: type[Value],
        message: type[M],
        *exceptions: MessageCodec | SpreadCodec,
        omitted: Collection[str] = (),
        others: Collection[str] | None = (),
    ) -> None:
        self._value, self.message = value, message
        self._spread: dict[str, SpreadCodec] = {}
        self._codecs: list[tuple[str, bool, Codec]] = []
        descriptors: Any = message.DESCRIPTOR.fields_by_name
        spread_codecs = {each.held: each for each in exceptions if isinstance(each, SpreadCodec)}
        for name, hint in _attributes(value).items():
            if name in omitted:
                continue
            if hint in spread_codecs:
                self._spread[name] = spread_codecs[hint]
            elif name in descriptors:
                codec, optional = _attribute(hint, descriptors[name], exceptions)
                self._codecs.append((name, optional, codec))
            else:
                raise TypeError(f"{value.__name__}.{name} has no field in {message.__name__}")
        spread_fields = [name for spread in self._spread.values() for name in spread.fields]
        self.fields = frozenset({name for name, *_ in self._codecs}.union(spread_fields))
        if others is not None:
            _check_whole(value.__name__, message, {*self.fields, *others})

    def write(self, value: Value, **others: Any) -> M:
        """Make the message of a value, with these other fields."""
        return self.message(**self.stored(value), **others)

    def stored(self, value: Value) -> dict[str, Any]:
        """Make the fields of the message that hold a value."""
        fields: dict[str, Any] = {}
        for name, optional, codec in self._codecs:
            attribute = getattr(value, name)
            fields[name] = None if optional and attribute is None else codec.write(attribute)
        for name, spread in self._spread.items():
            fields |= spread.write(getattr(value, name))
        return fields

    def read(self, message: M, **omitted: Any) -> Value:
        """Make the value that a message holds, with these other attributes.

        Raises:
            FrameError: The message cannot be one of a value.
        """
        attributes = omitted
        for name, optional, codec in self._codecs:
            there = not optional or message.HasField(name)
            attributes[name] = codec.read(getattr(message, name)) if there else None
        for name, spread in self._spread.items():
            attributes[name] = spread.read(message)
        return self._value(**attributes)


def check_shared(
    message: type[Message], converters: Iterable[Converter[Any, Any]], by_hand: Set[str]
) -> None:
    """Check that converters and the fields named here have each field of a message once.

    Raises:
        TypeError: They do not.
    """
    names = [*by_hand, *(name for converter in converters for name in converter.fields)]
    if len(names) != len(set(names)):
        raise TypeError(f"a field of {message.__name__} is held twice: {sorted(names)}")
    _check_whole("nothing", message, set(names))


def write_pairs(pairs: Iterable[tuple[int, int]]) -> list[int]:
    """Make one list of pairs, one after the other."""
    return [number for pair in pairs for number in pair]


def read_pairs(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Make the pairs that `write_pairs` wrote.

    Raises:
        FrameError: One has no second number.
    """
    if len(numbers) % 2:
        raise FrameError(f"ranges are pairs of positions; there are {len(numbers)} of them")
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def codec_of(hint: Any, field: FieldDescriptor, exceptions: Exceptions = ()) -> Codec:
    """Make the codec between a type and a field of a message.

    Raises:
        TypeError: The field cannot hold it.
    """
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return _map(hint, field.message_type, exceptions)
    if not field.has_presence and field.default_value == []:
        return _repeated(hint, field, exceptions)
    return _single(hint, field, exceptions)


def _attributes(value: type) -> dict[str, Any]:
    """Return the types of what the constructor of a dataclass takes, by name."""
    hints = get_type_hints(value)
    return {field.name: hints[field.name] for field in dataclasses.fields(value) if field.init}


def _check_whole(holder: str, message: type[Message], names: Set[str]) -> None:
    fields = {*message.DESCRIPTOR.fields_by_name}
    if names != fields:
        raise TypeError(f"{holder} and {message.__name__} differ in {sorted(names ^ fields)}")


def _attribute(hint: Any, field: FieldDescriptor, exceptions: Exceptions) -> tuple[Codec, bool]:
    """Return the codec of an attribute, and whether it may be None."""
    optional = get_origin(hint) in (Union, types.UnionType) and type(None) in get_args(hint)
    if optional:
        [hint] = [each for each in get_args(hint) if each is not type(None)]
    if optional != field.has_presence and (optional or field.message_type is None):
        raise TypeError(f"{field.full_name} is optional on one side only")
    return codec_of(hint, field, exceptions), optional


def _map(hint: Any, entry: Descriptor, exceptions: Exceptions) -> Codec:
    origin, hints = get_origin(hint), get_args(hint)
    pairs = origin is tuple
    key, item = get_args(hints[0]) if pairs else hints
    _single(key, entry.fields_by_name["key"], ())  # checks it
    write, read = _single(item, entry.fields_by_name["value"], exceptions)

    def read_map(entries: Mapping[Any, Any]) -> Any:
        values = [(at, read(value)) for at, value in sorted(entries.items())]
        return tuple(values) if pairs else dict(values)

    def write_map(values: Any) -> dict[Any, Any]:
        items = values if pairs else values.items()
        return {at: write(value) for at, value in items}

    return Codec(write_map, read_map)


def _repeated(hint: Any, field: FieldDescriptor, exceptions: Exceptions) -> Codec:
    origin: Any = get_origin(hint)
    if origin in (dict, Mapping):
        key, item = get_args(hint)
        return _entries(key, item, field.message_type, exceptions)
    if origin not in (tuple, list, set, frozenset):
        raise TypeError(f"{field.full_name} cannot hold {hint}")
    item = get_args(hint)[0]
    order: Callable[[Any], Any] = sorted if origin in (set, frozenset) else list
    if item == tuple[int, int] and field.cpp_type in _INTEGERS:
        return Codec(
            lambda values: write_pairs(order(values)), lambda elements: origin(read_pairs(elements))
        )
    write, read = _single(item, field, exceptions)
    return Codec(
        lambda values: [write(value) for value in order(values)],
        lambda elements: origin(map(read, elements)),
    )


def _entries(key: Any, item: Any, entry: Any, exceptions: Exceptions) -> Codec:
    """Return the codec of a dictionary whose entries are messages, in order."""
    first, *others = entry.fields
    _single(key, first, ())  # checks it
    kind: Any = GetMessageClass(entry)
    if len(others) == 1:
        name, (write, read) = others[0].name, _single(item, others[0], exceptions)
        return Codec(
            lambda values: [
                kind(**{first.name: at, name: write(value)}) for at, value in values.items()
            ],
            lambda entries: {getattr(it, first.name): read(getattr(it, name)) for it in entries},
        )
    converter = Converter(item, kind, *exceptions, others=(first.name,))
    return Codec(
        lambda values: [converter.write(value, **{first.name: at}) for at, value in values.items()],
        lambda entries: {getattr(it, first.name): converter.read(it) for it in entries},
    )


def _single(hint: Any, field: FieldDescriptor, exceptions: Exceptions) -> Codec:
    """Return the codec of one value, of a field that may be repeated."""
    if field.message_type is not None:
        return _message(hint, field.message_type, exceptions)
    if dataclasses.is_dataclass(hint):
        constructor: Any = hint
        [(name, inner)] = _attributes(constructor).items()
        write, read = _single(inner, field, exceptions)
        return Codec(
            lambda value: write(getattr(value, name)), lambda content: constructor(read(content))
        )
    if field.cpp_type not in _SCALARS.get(hint, ()):
        raise TypeError(f"{field.full_name} cannot hold {hint}")
    return Codec(_same, _same)


def _message(hint: Any, message: Descriptor, exceptions: Exceptions) -> Codec:
    for each in exceptions:
        if isinstance(each, MessageCodec) and each.message.DESCRIPTOR is message:
            return Codec(each.write, each.read)
    kind: Any = GetMessageClass(message)
    if dataclasses.is_dataclass(hint):
        converter = Converter(hint, kind, *exceptions)  # type: ignore[arg-type]
        return Codec(converter.write, converter.read)
    single = len(message.fields) == 1
    hints = (hint,) if single else get_args(hint)
    if len(hints) != len(message.fields) or Ellipsis in hints:
        raise TypeError(f"{message.full_name} cannot hold {hint}")
    fields = sorted(message.fields, key=lambda field: field.number)
    codecs = [
        (field.name, codec_of(each, field, exceptions))
        for field, each in zip(fields, hints, strict=True)
    ]

    def write(value: Any) -> Any:
        values = (value,) if single else value
        parts = zip(codecs, values, strict=True)
        return kind(**{name: codec.write(part) for (name, codec), part in parts})

    def read(content: Any) -> Any:
        parts = [codec.read(getattr(content, name)) for name, codec in codecs]
        return parts[0] if single else tuple(parts)

    return Codec(write, read)


def _same(value: Any) -> Any:
    return value
