"""Stores values that contain large arrays as bytes: in the log, in snapshots and in messages to a standby.

    length of the head u64 | head | zeros | array | zeros | array | zeros ...

These bytes are called a *body*. The head is the value as MessagePack with the names of its fields (see
message_codec.py), in which each array is replaced by its dtype and shape. The arrays follow the head. Zeros
pad the head and each array to a multiple of 8 bytes. So arrays are neither copied nor parsed: a reader gets
views into the body.

Reading is strict: a body with a field that this version does not know is refused, because an unknown field
could change the meaning of the known ones. The module also writes and reads FollowReply, the message that
carries a record of the log to a standby.
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
from psfleet.core.net.frame import Part
from psfleet.core.net.message_codec import reason_of
from psfleet.core.net.protobuf_fields import ALIGNMENT, BYTES, extent, opened, tag
from psfleet.core.net.v1.replica_pb2 import FollowReply

_LENGTH = struct.Struct("<Q")
_KINDS = "biuf"  # kinds of dtypes that may be stored: bool, signed and unsigned integers, floats

M = TypeVar("M", bound=Message)


_CHUNK_BYTES = 4 << 20  # bytes of a body in one FollowReply


def pack(message: Any) -> list[Part]:
    """Return the body that holds a dataclass or Struct, as parts to be written one after the other.

    The first parts are bytes with the length and the head. Then follow the arrays that the fields contain, at
    any depth, with padding in between. Arrays are not copied: the parts are the arrays of the fields.
    """
    arrays: list[NDArray[Any]] = []
    head = _head_of(message, arrays)
    parts: list[Part] = [_LENGTH.pack(len(head)), head, bytes(-len(head) % ALIGNMENT)]
    for array in arrays:
        parts.append(array)
        if odd := array.nbytes % ALIGNMENT:
            parts.append(bytes(ALIGNMENT - odd))
    return parts


def unpack(kind: Any, body: memoryview, name: str = "") -> Any:
    """Decode a body and return its value. Arrays of the value are views into the body.

    Args:
        kind: Type of the value: a dataclass, a Struct, or a union of subclasses of `Message`.
        body: Bytes as `pack` returns them, joined.
        name: Name of the value for error messages. If it is empty, they use the name of the type.

    Raises:
        FrameError: The body is damaged, or its fields differ from those that this version writes.
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
    # msgspec skips unknown fields of a dataclass and fills in defaults for missing ones. In both cases the
    # value is encoded in a different number of bytes than the head that was read.
    if len(_head_of(value, [])) != length:
        raise FrameError(f"its {name} has other fields than this version of psfleet knows")
    return value


def parse(kind: type[M], data: bytes) -> M:
    """Decode a protobuf message that was stored, and refuse unknown fields.

    Raises:
        FrameError: The bytes are damaged, or have a field that this version does not know, at any depth.
    """
    name = kind.DESCRIPTOR.name
    try:
        message = kind.FromString(data)
    except DecodeError:
        raise FrameError(f"its {name} is damaged") from None
    # protobuf keeps unknown fields of messages until they are discarded here, and drops unknown fields of map
    # entries while parsing. So a message that had an unknown field is now shorter than the bytes read.
    message.DiscardUnknownFields()
    if message.ByteSize() != len(data):
        raise FrameError(f"its {name} has a field that this version of psfleet does not know")
    return message


def flat(part: Part) -> memoryview:
    """Return the bytes of one of the parts that `pack` returns.

    Copies an array only if it is not contiguous.
    """
    if isinstance(part, np.ndarray):
        return np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
    return memoryview(part)


def _head_of(message: Any, arrays: list[NDArray[Any]]) -> bytes:
    """Encode the value with dtype and shape in place of each array. Appends the arrays to `arrays`."""

    def describe(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays.append(value)
            return value.dtype.str, value.shape
        if isinstance(value, np.generic):
            return value.item()
        raise NotImplementedError(f"a message cannot hold {type(value).__name__}")

    return msgspec.msgpack.encode(message, enc_hook=describe)


class _ArrayReader:
    """Reads the arrays that follow a head, in the order in which the head describes them."""

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._at = 0

    def read(self, kind: Any, description: Any) -> NDArray[Any]:
        """Return the next array as a view into the payload. msgspec calls this for each array in the head.

        Args:
            kind: Annotation of the field, such as NDArray[np.int64].
            description: dtype and shape from the head.

        Raises:
            FrameError: The payload is too short, or the dtype is not that of the annotation.
        """
        # A description that is not (dtype, shape) raises a TypeError here, which msgspec reports as damage.
        code, shape = description
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
        """Check that the arrays read so far take up the whole payload.

        Raises:
            FrameError: Bytes are left over.
        """
        if self._at != len(self._payload):
            raise FrameError(f"the arrays take {self._at} bytes of {len(self._payload)}")


@cache
def _dtype_in(annotation: Any) -> np.dtype[Any] | None:
    """Return the dtype in an annotation like NDArray[np.int64], or None if it is Any."""
    [scalar] = get_args(get_args(annotation)[1])
    return None if scalar is Any else np.dtype(scalar)


@lru_cache(64)
def dtype_of(code: str) -> np.dtype[Any]:
    """Return the dtype for a NumPy type code, such as "<f4".

    Raises:
        FrameError: The code is unknown, or its dtype is not numeric.
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
    """Yield the FollowReply messages that carry one record of the log to a standby.

    Args:
        number: Number of the record in the log.
        kind: Kind of the record, as in the log.
        body: Body of the record. Each message carries up to 4 MiB of it.
    """
    view = memoryview(body)
    for start in range(0, max(len(view), 1), _CHUNK_BYTES):
        part = view[start : start + _CHUNK_BYTES]
        head = FollowReply(number=number, kind=kind, more=start + _CHUNK_BYTES < len(view))
        opening = opened(head.SerializeToString(), _BODY, len(part), _PADDING)
        yield b"".join((opening, part))


def read_record(message: bytes) -> tuple[FollowReply, memoryview]:
    """Parse a FollowReply. Returns the message without its body, and the body as a view aligned to 8 bytes.

    The body is copied only if it is not aligned within the message.

    Raises:
        FrameError: The bytes are not a FollowReply, or have a field that this version does not know.
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
