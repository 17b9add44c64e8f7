"""Bodies: a protobuf message with large arrays behind it, as a log, a snapshot and a standby get it.

    length of the message u64, the message, zeros up to a multiple of 8 bytes, the arrays

Arrays are used where they are read. What is stored is read strictly: a field that this version does not
know could change the meaning of all others.
"""

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from psfleet.core.base.errors import FrameError
from psfleet.core.net.frame import ALIGNMENT, BYTES, Part, extent, opened, tag
from psfleet.core.net.v1.replica_pb2 import FollowReply
from psfleet.core.net.v1.state_pb2 import Array

_LENGTH = struct.Struct("<Q")
_KINDS = "biuf"  # of dtypes: bool, int, unsigned, float

M = TypeVar("M", bound=Message)


_CHUNK_BYTES = 4 << 20  # bytes of a body in one message: gRPC likes them so


def pack(message: Message, groups: Iterable[Sequence[NDArray[Any]]] = ()) -> list[Part]:
    """Return the body in parts; each group of arrays is followed by zeros up to a multiple of 8 bytes."""
    head = message.SerializeToString(deterministic=True)
    parts: list[Part] = [_LENGTH.pack(len(head)), head, bytes(-len(head) % ALIGNMENT)]
    for arrays in groups:
        parts += [*arrays, bytes(-sum(array.nbytes for array in arrays) % ALIGNMENT)]
    return parts


def unpack(kind: type[M], body: memoryview) -> tuple[M, memoryview]:
    """Return the message of a body, and the bytes of the arrays behind it.

    Raises:
        FrameError: It is no such message, or has a field that this version does not know.
    """
    if len(body) < _LENGTH.size:
        raise FrameError(f"a body has {len(body)} bytes, which is too few")
    (length,) = _LENGTH.unpack_from(body)
    end = _LENGTH.size + length
    if end > len(body):
        raise FrameError(f"a body of {len(body)} bytes announces a message of {length}")
    return parse(kind, bytes(body[_LENGTH.size : end])), body[end + -length % ALIGNMENT :]


def read_alone(kind: type[M], body: memoryview) -> M:
    """Return the message of a body without arrays.

    Raises:
        FrameError: Errors of `unpack`, or there are bytes after the message.
    """
    message, payload = unpack(kind, body)
    read_arrays((), payload)
    return message


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


def described(array: NDArray[Any], name: str = "") -> Array:
    """Return the message that describes an array behind it."""
    return Array(name=name, dtype=array.dtype.str, shape=array.shape)


def read_arrays(descriptions: Iterable[Array], payload: memoryview) -> list[NDArray[Any]]:
    """Return the arrays behind a message, as views into the payload.

    Raises:
        FrameError: They are not as described, or something follows them.
    """
    arrays, at = [], 0
    for each in descriptions:
        dtype, count = dtype_of(each.dtype), math.prod(each.shape)
        if count * dtype.itemsize > len(payload) - at:
            raise FrameError(
                f"an array of {count} {dtype.name} is announced, but {len(payload) - at} bytes follow"
            )
        arrays.append(np.frombuffer(payload, dtype, count, at).reshape(tuple(each.shape)))
        at += arrays[-1].nbytes
        at += -at % ALIGNMENT
    if at != len(payload):
        raise FrameError(f"the arrays take {at} bytes of {len(payload)}")
    return arrays


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
