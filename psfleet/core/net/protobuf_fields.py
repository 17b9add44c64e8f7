"""Writes and reads single fields of protobuf messages by hand, for messages with large content.

protobuf itself would copy the content several times. frame.py uses these functions for pushes and pulls,
body.py and table_messages.py for records, snapshots and tables. Bytes from the network are not trusted: every
length is checked against the bytes present before it is used.
"""

from psfleet.core.base.errors import FrameError

ALIGNMENT = 8  # bytes; last fields begin at a multiple, so that arrays need no copy
BYTES = 2  # wire type of a field that begins with its length
_VARINT, _FIXED64, _FIXED32 = 0, 1, 5


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
