"""The fields of a protobuf message, found and written by hand where their content is large."""

from psfleet.errors import FrameError

ALIGNMENT = 8

BYTES = 2  # the wire type of a field with a length
_VARINT, _FIXED64, _FIXED32 = 0, 1, 5


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
