"""A Frame on the wire, written and read by hand.

`Frame` (protos/psfleet/v1/frame.proto) is an ordinary protobuf message, so that any gRPC client can
speak to a server. protobuf would copy every tensor four times on its way: into the message, twice
to serialize it, and at each access of the field. Here the payload is copied once when it is joined
to its header, and not at all when it is read.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from psfleet.errors import FrameError
from psfleet.wire.v1.frame_pb2 import Header

__all__ = ["ALIGNMENT", "MAX_MESSAGE", "decode", "encode", "reserve"]

ALIGNMENT = 8
MAX_MESSAGE = 2**31 - 1  # gRPC and protobuf count message bytes in an int32

Part = bytes | memoryview | NDArray[Any]

# A bytes object whose content is not yet written: what CPython itself does in bytes.join().
_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = (ctypes.c_char_p, ctypes.c_ssize_t)
_BYTES_HEAD = bytes.__basicsize__ - 1  # bytes of the object before its content

_HEADER, _PAYLOAD, _PADDING = 1, 2, 3
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def encode(header: Header, parts: Sequence[Part] = ()) -> bytes:
    """The message with this header and, as payload, the parts one after the other.

    Raises:
        FrameError: The message would be longer than gRPC can carry.
    """
    views = [part.data if isinstance(part, np.ndarray) else memoryview(part) for part in parts]
    return b"".join((_head(header, sum(view.nbytes for view in views)), *views))


def reserve(header: Header, length: int) -> tuple[bytes, NDArray[np.uint8]]:
    """A message with this header whose payload is still to be written, and the place to write it.

    Whoever asks must fill the whole payload before anybody else sees the message. So a tensor goes
    from where it lies into the message without a copy between.

    Raises:
        FrameError: The message would be longer than gRPC can carry.
    """
    head = _head(header, length)
    message = _new_bytes(None, len(head) + length)
    whole = np.ctypeslib.as_array(
        (ctypes.c_uint8 * len(message)).from_address(id(message) + _BYTES_HEAD)
    )
    whole[: len(head)] = np.frombuffer(head, np.uint8)
    return message, whole[len(head) :]


def decode(message: bytes) -> tuple[Header, memoryview]:
    """The header and the payload of a message; the payload is a view into it.

    Unknown fields are skipped and fields may come in any order, as protobuf demands.

    Raises:
        FrameError: The bytes are not a whole Frame.
    """
    view = memoryview(message)
    head = b""
    payload = view[:0]
    at = 0
    while at < len(view):
        number, kind, at = _tag(view, at)
        start, at = _extent(view, at, kind)
        if number == _HEADER and kind == _BYTES:
            head += bytes(view[start:at])  # protobuf: a field given twice is merged
        elif number == _PAYLOAD and kind == _BYTES:
            payload = view[start:at]
    try:
        return Header.FromString(head), payload
    except DecodeError:
        raise FrameError(f"the frame's header of {len(head)} bytes is damaged") from None


def _head(header: Header, length: int) -> bytes:
    """Everything of a message that comes before a payload of `length` bytes."""
    if length > MAX_MESSAGE:
        raise FrameError(
            f"a message of {length} bytes is longer than the limit of {MAX_MESSAGE}; "
            "use more servers or smaller batches"
        )
    head = _field(_HEADER, header.SerializeToString())
    payload = bytes([_PAYLOAD << 3 | _BYTES]) + _varint(length)
    return head + _padding(len(head) + len(payload)) + payload


def _field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | _BYTES]) + _varint(len(content)) + content


def _padding(length: int) -> bytes:
    """A padding field that makes `length` a multiple of ALIGNMENT; it takes 0 or 2 to 9 bytes."""
    missing = -length % ALIGNMENT
    if missing == 0:
        return b""
    return _field(_PADDING, bytes((missing - 2) % ALIGNMENT))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _tag(view: memoryview, at: int) -> tuple[int, int, int]:
    tag, at = _read_varint(view, at)
    return tag >> 3, tag & 7, at


def _extent(view: memoryview, at: int, kind: int) -> tuple[int, int]:
    """Where the content of a field starts and ends."""
    if kind == _BYTES:
        length, at = _read_varint(view, at)
    elif kind == _VARINT:
        length = _read_varint(view, at)[1] - at
    elif kind in (_FIXED32, _FIXED64):
        length = 4 if kind == _FIXED32 else 8
    else:
        raise FrameError(f"the frame has a field of wire type {kind} at byte {at}")
    if length > len(view) - at:
        raise FrameError(
            f"the frame announces a field of {length} bytes, but only {len(view) - at} follow"
        )
    return at, at + length


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    if at < len(view) and view[at] < 128:  # as most are
        return view[at], at + 1
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(view):
            raise FrameError(f"the frame ends within a number at byte {at}")
        byte = view[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise FrameError(f"the frame has a number of more than 10 bytes before byte {at}")
