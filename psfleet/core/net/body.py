"""Bodies: a value with large arrays behind it, as a log, a snapshot and a standby get it.

    length of the head u64 | head | zeros | array | zeros | array | zeros ...

The zeros fill up to a multiple of 8 bytes. The head is the value as MessagePack, with the names of fields
(see message_codec.py); for each array it has the dtype and the shape alone. So arrays are neither copied nor
parsed, and a reader uses them where they lie. What is stored is read strictly: a field that this version does
not know could change the meaning of all others.
"""

import math
import struct
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any, TypeVar, get_args

import msgspec
import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from psfleet.core.base.errors import FrameError
from psfleet.core.net.frame import ALIGNMENT, BYTES, Part, extent, opened, tag
from psfleet.core.net.message_codec import reason_of
from psfleet.core.net.v1.replica_pb2 import FollowReply

_LENGTH = struct.Struct("<Q")
_KINDS = "biuf"  # of dtypes: bool, int, unsigned, float

M = TypeVar("M", bound=Message)


_CHUNK_BYTES = 4 << 20  # bytes of a body in one message: gRPC likes them so


def pack(message: Any) -> list[Part]:
    """Return the body of a dataclass or Struct in parts, with the arrays that it holds at any depth."""
    arrays: list[NDArray[Any]] = []
    head = _head_of(message, arrays)
    parts: list[Part] = [_LENGTH.pack(len(head)), head, bytes(-len(head) % ALIGNMENT)]
    for array in arrays:
        parts.append(array)
        if odd := array.nbytes % ALIGNMENT:
            parts.append(bytes(ALIGNMENT - odd))
    return parts


def unpack(kind: Any, body: memoryview, name: str = "") -> Any:
    """Return the value of a body; its arrays are views into the body.

    Args:
        kind: Type of the value: a dataclass, a Struct, or a union of subclasses of `Message`.
        body: The body.
        name: Name of the value in errors, or empty for the name of its type.

    Raises:
        FrameError: The body holds no such value, or not as this version writes it.
    """
    if len(body) < _LENGTH.size:
        raise FrameError(f"a body has {len(body)} bytes, which is too few")
    (length,) = _LENGTH.unpack_from(body)
    end = _LENGTH.size + length
    if end > len(body):
        raise FrameError(f"a body of {len(body)} bytes announces a message of {length}")
    head, name = body[_LENGTH.size : end], name or kind.__name__
    arrays = _ArrayReader(body[end + -length % ALIGNMENT :])
    try:
        value = msgspec.msgpack.decode(head, type=kind, dec_hook=arrays.read)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
        raise FrameError(f"its {name} is damaged: {reason_of(error)}") from None
    arrays.finish()
    # msgspec passes over fields of a dataclass that it does not know, and fills in those that are missing.
    # Both change the size of what is written again.
    if len(_head_of(value, [])) != length:
        raise FrameError(f"its {name} has other fields than this version of psfleet knows")
    return value


def parse(kind: type[M], data: bytes) -> M:
    """Return a stored message.

    Raises:
        FrameError: It is none, or has a field that this version does not know, at any depth.
    """
    name = kind.DESCRIPTOR.name
    try:
        message = kind.FromString(data)
    except DecodeError:
        raise FrameError(f"its {name} is damaged") from None
    # protobuf keeps unknown fields of messages and drops those of map entries: both change the size.
    message.DiscardUnknownFields()
    if message.ByteSize() != len(data):
        raise FrameError(f"its {name} has a field that this version of psfleet does not know")
    return message


def flat(part: Part) -> memoryview:
    """Return the bytes of a part, of an array without values too; not copied if they lie side by side."""
    if isinstance(part, np.ndarray):
        return np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
    return memoryview(part)


def _head_of(message: Any, arrays: list[NDArray[Any]]) -> bytes:
    """Return the message without the content of its arrays, which are appended to `arrays`."""

    def describe(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays.append(value)
            return value.dtype.str, value.shape
        if isinstance(value, np.generic):
            return value.item()
        raise NotImplementedError(f"a message cannot hold {type(value).__name__}")

    return msgspec.msgpack.encode(message, enc_hook=describe)


class _ArrayReader:
    """Gives the arrays behind a head, in the order in which the head describes them."""

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._at = 0

    def read(self, kind: Any, description: Any) -> NDArray[Any]:
        """Return the next array, which an attribute of the type `kind` holds, as a view into the payload.

        Raises:
            FrameError: It is not as described, or of another dtype than the attribute.
        """
        code, shape = description  # what is something else is refused by its use, as a TypeError
        dtype, count = dtype_of(code), math.prod(shape)
        if (expected := _dtype_in(kind)) not in (None, dtype):
            raise FrameError(f"an array is of {dtype.name}, expected {expected}")
        size = count * dtype.itemsize
        if size > len(self._payload) - self._at or min(shape, default=0) < 0:
            raise FrameError(
                f"an array of {count} {dtype.name} is announced, but "
                f"{len(self._payload) - self._at} bytes follow"
            )
        array = np.frombuffer(self._payload, dtype, count, self._at)
        self._at += size + -size % ALIGNMENT
        return array if len(shape) == 1 else array.reshape(shape)

    def finish(self) -> None:
        """Refuse bytes that belong to no array.

        Raises:
            FrameError: There are some.
        """
        if self._at != len(self._payload):
            raise FrameError(f"the arrays take {self._at} bytes of {len(self._payload)}")


@cache
def _dtype_in(annotation: Any) -> np.dtype[Any] | None:
    """Return the dtype of an annotation like NDArray[np.int64], or None for any."""
    [scalar] = get_args(get_args(annotation)[1])
    return None if scalar is Any else np.dtype(scalar)


@lru_cache(64)
def dtype_of(code: str) -> np.dtype[Any]:
    """Return the dtype of NumPy's code, which is one of numbers.

    Raises:
        FrameError: It is none.
    """
    try:
        dtype = np.dtype(code)
    except (TypeError, ValueError, SyntaxError):
        raise FrameError(f"dtype {code!r} is unknown") from None
    if dtype.kind not in _KINDS or dtype.str != code:
        raise FrameError(f"dtype {code!r} is not one of numbers")
    return dtype


_BODY, _PADDING = 3, 8


def write_record(number: int, kind: int, body: bytes) -> Iterator[bytes]:
    """Yield the messages (FollowReply) that bring a standby a record, each with a part of its body."""
    view = memoryview(body)
    for start in range(0, max(len(view), 1), _CHUNK_BYTES):
        part = view[start : start + _CHUNK_BYTES]
        head = FollowReply(number=number, kind=kind, more=start + _CHUNK_BYTES < len(view))
        opening = opened(head.SerializeToString(), _BODY, len(part), _PADDING)
        yield b"".join((opening, part))


def read_record(message: bytes) -> tuple[FollowReply, memoryview]:
    """Return a message without its body, and the body: a view into it that begins at a multiple of 8 bytes.

    Raises:
        FrameError: The bytes are no FollowReply, or it has a field that this version does not know.
    """
    view = memoryview(message)
    head = b""
    body = view[:0]
    at = 0
    while at < len(view):
        begin = at
        number, kind, at = tag(view, at)
        start, at = extent(view, at, kind)
        if number == _PADDING:
            continue
        if number == _BODY and kind == BYTES:
            body = view[start:at]
            if start % ALIGNMENT:
                body = memoryview(bytes(body))
        else:
            head += bytes(view[begin:at])
    return parse(FollowReply, head), body
