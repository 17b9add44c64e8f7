"""Writes and reads Frames, the messages that carry tensors, without the copies that protobuf would make.

    header tag | length | Header | padding field | payload tag | length | payload ...
                                                                          ^ a multiple of 8 bytes

`Frame` (protos/psfleet/v1/frame.proto) is an ordinary protobuf message, so that any gRPC client can speak
to a server. protobuf would copy each tensor four times: into the message, twice to serialize it, and at
each access of the field. This module writes the few bytes around the tensors by hand. Then the payload is
copied once, when it is joined to its header, and not at all when it is read. A padding field aligns the
payload to 8 bytes, so that tensors in it can be used without a copy.

Functions for single fields (`field`, `begun`, `next_field` ...) are also used for other messages with large
content, see body.py and table_messages.py. Bytes from the network are not trusted: every length is checked
against the bytes present before it is used, and any damage is reported as a FrameError.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from psfleet.core.base.errors import FrameError
from psfleet.core.base.memory import unwritten_bytes
from psfleet.core.net.v1.frame_pb2 import Header

ALIGNMENT = 8

BYTES = 2  # wire type of a field that begins with its length
_VARINT, _FIXED64, _FIXED32 = 0, 1, 5


MAX_MESSAGE = 2**31 - 1  # gRPC and protobuf count the bytes of a message in an int32
MAX_HEADER = 2**20
"""Longest header in bytes: enough for thousands of tables, and always parsed within a tenth of a second."""
Part = bytes | memoryview | NDArray[Any]
_NOTHING = memoryview(b"")
_MOST_FIELDS = 64  # a frame has three; more may come from later versions, or from split fields


def field(number: int, content: bytes) -> bytes:
    """Return the protobuf field with this number and content: tag, length and content."""
    length = len(content)
    if length < 128:  # the usual case
        return bytes((number << 3 | BYTES, length)) + content
    return begun(number, length) + content


def begun(number: int, length: int) -> bytes:
    """Return the tag and length that precede the content of a protobuf field of `length` bytes."""
    return bytes((number << 3 | BYTES,)) + _varint(length)


def opened(head: bytes, number: int, length: int, padding: int) -> bytes:
    """Return the bytes of a message up to the content of its last field, which the caller appends.

    A padding field is inserted so that the content will begin at a multiple of ALIGNMENT.

    Args:
        head: Encoded fields that come first.
        number: Number of the last field.
        length: Length of the last field's content in bytes.
        padding: Number of the padding field.
    """
    opening = begun(number, length)
    return head + _filling(len(head) + len(opening), padding) + opening


def next_field(view: bytes | memoryview, at: int) -> tuple[int, int, int, int]:
    """Parse the field that begins at `at`.

    Returns its number, its wire type, and its content's start and end.

    Raises:
        FrameError: The field is damaged, or longer than the message.
    """
    size = len(view)
    # Fast path for a field of wire type BYTES with a number below 16 and a length of one or two bytes.
    # Any other field, and any damage, is left to the general code below. 0x87 selects the wire type, and the
    # bit that says that the tag has further bytes.
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
    """Parse the tag that begins at `at`.

    Returns the field's number, its wire type, and the offset after the tag.

    Raises:
        FrameError: The message ends within the tag, or the tag is not a valid number.
    """
    key, at = _read_varint(view, at)
    return key >> 3, key & 7, at


def extent(view: bytes | memoryview, at: int, kind: int) -> tuple[int, int]:
    """Return the start and end of a field's content, given the offset after the field's tag.

    Raises:
        FrameError: The field is longer than the message, or of an unknown wire type.
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
    """Return a field of 2 to 9 bytes that pads `length` to a multiple of ALIGNMENT, or b"" if it is one."""
    missing = -length % ALIGNMENT
    if missing == 0:
        return b""
    # Tag and length take 2 bytes, so a single missing byte is filled by a field of 9 bytes.
    return field(number, bytes((missing - 2) % ALIGNMENT))


def _varint(value: int) -> bytes:
    if value < 128:  # the usual case
        return bytes((value,))
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(view: bytes | memoryview, at: int) -> tuple[int, int]:
    if at < len(view) and view[at] < 128:  # the usual case
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
# Tag and length of a short header.
_SHORT_FIELDS = [bytes((_HEADER_TAG, size)) for size in range(128)]


def encode(header: Header, parts: Sequence[Part] = (), layout: bytes = b"") -> bytes:
    """Return the frame with this header. Its payload is the parts joined together.

    Args:
        layout: Further fields of the header, already encoded. They are written first, as a Header field of
            their own. protobuf merges both fields into one header. A psfleet server that has seen the same
            layout before need not parse it again (see `split`).

    Raises:
        FrameError: The frame would be longer than gRPC can carry.
    """
    if not parts:  # an empty payload is left out, as protobuf does
        return encode_header(header, layout)
    views = [part.data if isinstance(part, np.ndarray) else memoryview(part) for part in parts]
    return b"".join((opening(header, sum(view.nbytes for view in views), layout), *views))


def reserve(header: Header, length: int, layout: bytes = b"") -> tuple[bytes, NDArray[np.uint8]]:
    """Return a frame with an unwritten payload of `length` bytes, and a writable view of the payload.

    The frame is a `bytes` object that the caller changes through the view. So write the whole payload before
    any other code sees the frame. This saves the copy that joining parts would make.

    Raises:
        FrameError: The frame would be longer than gRPC can carry.
    """
    return reserve_behind(opening(header, length, layout), length)


def reserve_behind(head: bytes, length: int) -> tuple[bytes, NDArray[np.uint8]]:
    """Return the same as `reserve`, for a frame whose first bytes are `head`, the result of `opening`."""
    message, content = unwritten_bytes(len(head) + length)
    whole = np.frombuffer(memoryview(content), np.uint8)
    whole[: len(head)] = np.frombuffer(head, np.uint8)
    return message, whole[len(head) :]


def decode(message: bytes) -> tuple[Header, memoryview]:
    """Parse a frame. Returns its header, and its payload as a view into the message.

    Skips unknown fields and accepts fields in any order, as protobuf requires.

    Raises:
        FrameError: The bytes are not a whole Frame, or its header is longer than MAX_HEADER.
    """
    layout, head, payload = split(message)
    return read_header(layout + head), payload


def split(message: bytes) -> tuple[bytes, bytes, memoryview]:
    """Return layout, header and payload of a frame, all still encoded.

    A frame that `encode` wrote with a layout has two Header fields; the first one is the layout. Otherwise
    the layout is empty. Layout and header joined are the whole encoded header.

    Raises:
        FrameError: The bytes are not a whole Frame. Damage within the header is found by `read_header`.
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
        # The last condition checks that the length is one byte, and that the content ends within the message.
        if message[at] == _HEADER_TAG and start <= end and message[at + 1] < min(128, end - at - 1):
            number, kind, at = _HEADER, BYTES, start + message[at + 1]  # a short header
        else:
            number, kind, start, at = next_field(message, at)
        if number == _HEADER and kind == BYTES:
            if len(layout) + len(head) + at - start > MAX_HEADER:
                raise _too_long(len(layout) + len(head) + at - start)
            layout += head  # protobuf merges a message field that occurs twice
            head = message[start:at]
        elif number == _PAYLOAD and kind == BYTES:
            payload = memoryview(message)[start:at]
    return layout, head, payload


def read_header(head: bytes) -> Header:
    """Parse an encoded header.

    Raises:
        FrameError: The bytes are damaged.
    """
    try:
        return Header.FromString(head)
    except DecodeError:
        raise FrameError(f"the frame's header of {len(head)} bytes is damaged") from None


def opening(header: Header, length: int, layout: bytes = b"") -> bytes:
    """Return the bytes of a frame that precede its payload of `length` bytes.

    Raises:
        FrameError: The frame would be longer than gRPC can carry.
    """
    if length > MAX_MESSAGE:
        raise FrameError(
            f"a message of {length} bytes is longer than the limit of {MAX_MESSAGE}; "
            "use more servers or smaller batches"
        )
    return opened(encode_header(header, layout), _PAYLOAD, length, _PADDING)


def encode_header(header: Header, layout: bytes) -> bytes:
    """Return a frame that has this header and layout but no payload. `encode` explains the layout.

    Raises:
        FrameError: The header is longer than MAX_HEADER.
    """
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
