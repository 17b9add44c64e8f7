"""A Frame on the wire, and other messages whose content is large: written and read by hand.

`Frame` (protos/psfleet/v1/frame.proto) is an ordinary protobuf message, so that any gRPC client can
speak to a server. protobuf would copy every tensor four times on its way: into the message, twice
to serialize it, and at each access of the field. Here the payload is copied once when it is joined
to its header, and not at all when it is read."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from psfleet.core.base.errors import FrameError
from psfleet.core.base.memory import unwritten_bytes
from psfleet.core.net.v1.frame_pb2 import Header

ALIGNMENT = 8

BYTES = 2  # the wire type of a field with a length
_VARINT, _FIXED64, _FIXED32 = 0, 1, 5


MAX_MESSAGE = 2**31 - 1  # gRPC and protobuf count message bytes in an int32
MAX_HEADER = 2**20
"""Bytes of a header: enough for thousands of tables, and read in a tenth of a second whatever it holds."""
Part = bytes | memoryview | NDArray[Any]
_NOTHING = memoryview(b"")
_MOST_FIELDS = 64  # of a frame, which has three; some may be of a later version, or given in parts


def field(number: int, content: bytes) -> bytes:
    """Return a whole field of bytes."""
    length = len(content)
    if length < 128:  # as in most
        return bytes((number << 3 | BYTES, length)) + content
    return begun(number, length) + content


def begun(number: int, length: int) -> bytes:
    """Return what comes before the content of a field of so many bytes."""
    return bytes((number << 3 | BYTES,)) + _varint(length)


def opened(head: bytes, number: int, length: int, padding: int) -> bytes:
    """Return a message up to the content of field `number`, which has `length` bytes.

    Args:
        head: The fields before it.
        padding: Number of a field that is filled up, so that the content lies at a multiple of ALIGNMENT.
    """
    opening = begun(number, length)
    return head + _filling(len(head) + len(opening), padding) + opening


def next_field(view: bytes | memoryview, at: int) -> tuple[int, int, int, int]:
    """Return number and wire type of the field that begins at `at`, and where its content starts and ends.

    Raises:
        FrameError: It is damaged, or longer than the message.
    """
    size = len(view)
    if at + 3 <= size and view[at] & 0x87 == BYTES:  # a field of bytes, as most are
        length, start = view[at + 1], at + 2
        if length > 127 and view[start] < 128:
            length, start = length & 127 | view[start] << 7, at + 3
        if length < 128 or start > at + 2:
            end = start + length
            if end <= size:
                return view[at] >> 3, BYTES, start, end
    number, kind, at = tag(view, at)
    return number, kind, *extent(view, at, kind)


def tag(view: bytes | memoryview, at: int) -> tuple[int, int, int]:
    """Return number and wire type of the field that begins at `at`, and where its content begins.

    Raises:
        FrameError: The message ends before, or it is no number.
    """
    key, at = _read_varint(view, at)
    return key >> 3, key & 7, at


def extent(view: bytes | memoryview, at: int, kind: int) -> tuple[int, int]:
    """Find the start and the end of a field's content.

    Raises:
        FrameError: It is longer than the message, or of an unknown wire type.
    """
    if kind == BYTES:
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


def _filling(length: int, number: int) -> bytes:
    """Return a field that makes `length` a multiple of ALIGNMENT; it takes 0 or 2 to 9 bytes."""
    missing = -length % ALIGNMENT
    if missing == 0:
        return b""
    return field(number, bytes((missing - 2) % ALIGNMENT))


def _varint(value: int) -> bytes:
    if value < 128:  # as most are
        return bytes((value,))
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(view: bytes | memoryview, at: int) -> tuple[int, int]:
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


__all__ = [
    "ALIGNMENT",
    "MAX_HEADER",
    "MAX_MESSAGE",
    "decode",
    "encode",
    "encode_header",
    "opening",
    "read_header",
    "reserve",
    "reserve_behind",
    "split",
]


_HEADER, _PAYLOAD, _PADDING = 1, 2, 3
_HEADER_TAG = _HEADER << 3 | BYTES
_SHORT_FIELDS = [bytes((_HEADER_TAG, size)) for size in range(128)]  # what comes before a header


def encode(header: Header, parts: Sequence[Part] = (), layout: bytes = b"") -> bytes:
    """Return the message with this header and, as payload, the parts one after the other.

    `layout`: What the header says besides, already written: it comes first, as a header of its own. To
    protobuf both are one; a reader may know the first from an earlier message (see `split`).

    Raises:
        FrameError: The message would be longer than gRPC can carry.
    """
    if not parts:  # an empty payload is left out, as protobuf does
        return encode_header(header, layout)
    views = [part.data if isinstance(part, np.ndarray) else memoryview(part) for part in parts]
    return b"".join((opening(header, sum(view.nbytes for view in views), layout), *views))


def reserve(header: Header, length: int, layout: bytes = b"") -> tuple[bytes, NDArray[np.uint8]]:
    """Return a message with this header whose payload is still to be written, and the place to write it.

    The caller must fill the whole payload before the message is used elsewhere. So a tensor goes
    from where it lies into the message without a copy between.

    Raises:
        FrameError: The message would be longer than gRPC can carry.
    """
    return reserve_behind(opening(header, length, layout), length)


def reserve_behind(head: bytes, length: int) -> tuple[bytes, NDArray[np.uint8]]:
    """Do what `reserve` does, behind what `opening` has returned for such a payload."""
    message, content = unwritten_bytes(len(head) + length)
    whole = np.frombuffer(memoryview(content), np.uint8)
    whole[: len(head)] = np.frombuffer(head, np.uint8)
    return message, whole[len(head) :]


def decode(message: bytes) -> tuple[Header, memoryview]:
    """Return the header and the payload of a message; the payload is a view into it.

    Unknown fields are skipped and fields may come in any order, as protobuf demands.

    Raises:
        FrameError: The bytes are not a whole Frame, or its header is longer than MAX_HEADER.
    """
    layout, head, payload = split(message)
    return read_header(layout + head), payload


def split(message: bytes) -> tuple[bytes, bytes, memoryview]:
    """Return the header in two parts, first the layout that `encode` was given, if any, and the payload.

    Raises:
        FrameError: Errors of `decode`, of which `read_header` does the rest.
    """
    layout = head = b""
    payload = _NOTHING
    at = fields = 0
    end = len(message)
    while at < end:
        fields += 1
        if fields > _MOST_FIELDS:
            raise FrameError(f"the frame has more than {_MOST_FIELDS} fields; it needs two")
        start = at + 2
        if message[at] == _HEADER_TAG and start <= end and message[at + 1] < min(128, end - at - 1):
            number, kind, at = _HEADER, BYTES, start + message[at + 1]  # a short one
        else:
            number, kind, start, at = next_field(message, at)
        if number == _HEADER and kind == BYTES:
            if len(layout) + len(head) + at - start > MAX_HEADER:
                raise _too_long(len(layout) + len(head) + at - start)
            layout += head  # protobuf: a field given twice is merged
            head = message[start:at]
        elif number == _PAYLOAD and kind == BYTES:
            payload = memoryview(message)[start:at]
    return layout, head, payload


def read_header(head: bytes) -> Header:
    """Return the header of these bytes.

    Raises:
        FrameError: They are none.
    """
    try:
        return Header.FromString(head)
    except DecodeError:
        raise FrameError(f"the frame's header of {len(head)} bytes is damaged") from None


def opening(header: Header, length: int, layout: bytes = b"") -> bytes:
    """Return everything of a message that comes before a payload of `length` bytes.

    Raises:
        FrameError: The message would be longer than gRPC can carry.
    """
    if length > MAX_MESSAGE:
        raise FrameError(
            f"a message of {length} bytes is longer than the limit of {MAX_MESSAGE}; "
            "use more servers or smaller batches"
        )
    return opened(encode_header(header, layout), _PAYLOAD, length, _PADDING)


def encode_header(header: Header, layout: bytes) -> bytes:
    """Return the message with this header and an empty payload; see `encode`."""
    content: bytes = header.SerializeToString()
    if len(layout) + len(content) > MAX_HEADER:
        raise _too_long(len(layout) + len(content))
    size, layout_size = len(content), len(layout)
    head = _SHORT_FIELDS[size] + content if size < 128 else field(_HEADER, content)
    if not layout:
        return head
    if layout_size < 128:
        return _SHORT_FIELDS[layout_size] + layout + head
    return field(_HEADER, layout) + head


def _too_long(length: int) -> FrameError:
    return FrameError(
        f"the frame's header has {length} bytes, the limit is {MAX_HEADER}; "
        "name fewer tables in one call"
    )
