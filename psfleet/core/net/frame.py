"""Writes and reads Frames, the messages that carry tensors, without the copies that protobuf would make.

    header tag | length | Header | padding field | payload tag | length | payload ...
                                                                          ^ a multiple of 8 bytes

`Frame` (protos/psfleet/v1/frame.proto) is an ordinary protobuf message, so that any gRPC client can speak
to a server. protobuf would copy each tensor four times: into the message, twice to serialize it, and at
each access of the field. This module writes the few bytes around the tensors by hand. Then the payload is
copied once, when it is joined to its header, and not at all when it is read. A padding field aligns the
payload to 8 bytes, so that tensors in it can be used without a copy.

segments.py lays out ids, gradients and values in the payload, and protobuf_fields.py has what is written by
hand. Bytes from the network are not trusted: every length is checked against the bytes present before it is
used, and any damage is reported as a FrameError.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from psfleet.core.base.errors import FrameError
from psfleet.core.base.memory import unwritten_bytes
from psfleet.core.net.protobuf_fields import BYTES, field, next_field, opened
from psfleet.core.net.v1.frame_pb2 import Header

__all__ = [
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

MAX_MESSAGE = 2**31 - 1  # gRPC and protobuf count the bytes of a message in an int32
MAX_HEADER = 2**20
"""Longest header in bytes: enough for thousands of tables, and always parsed within a tenth of a second."""
Part = bytes | memoryview | NDArray[Any]
_NOTHING = memoryview(b"")
_MOST_FIELDS = 64  # a frame has three; more may come from later versions, or from split fields
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
