"""HTTP/2 frames (RFC 9113, sections 4 and 6): their heads, and the few that are always the same."""

import struct

from psfleet.http2.call_errors import ConnectionBroken

__all__ = [
    "ACK",
    "CONTINUATION",
    "DATA",
    "END_HEADERS",
    "END_STREAM",
    "GOAWAY",
    "HEADERS",
    "HEAD_SIZE",
    "INITIAL_WINDOW",
    "LARGEST_FRAME",
    "LARGEST_WINDOW",
    "MAX_CONCURRENT_STREAMS",
    "MAX_FRAME_SIZE",
    "MAX_HEADER_LIST_SIZE",
    "MESSAGE_HEAD_SIZE",
    "PADDED",
    "PING",
    "PREFACE",
    "PRIORITY",
    "PRIORITY_FLAG",
    "PUSH_PROMISE",
    "RST_STREAM",
    "SETTINGS",
    "SMALLEST_FRAME",
    "WINDOW_UPDATE",
    "frame",
    "head",
    "message_head",
    "read_head",
    "read_message_head",
    "read_settings",
    "reset",
    "settings",
    "window_update",
]

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0, 1, 2, 3, 4
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 5, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY_FLAG = 0x1, 0x1, 0x4, 0x8, 0x20
MAX_CONCURRENT_STREAMS, INITIAL_WINDOW, MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 3, 4, 5, 6

HEAD_SIZE = 9
SMALLEST_FRAME, LARGEST_FRAME = 2**14, 2**24 - 1  # bounds of MAX_FRAME_SIZE
LARGEST_WINDOW = 2**31 - 1

_HEAD = struct.Struct(">HBBBI")  # length in 16 and 8 bits, type, flags, stream
_MESSAGE_HEAD = struct.Struct(">HBBBIBI")
MESSAGE_HEAD_SIZE = _MESSAGE_HEAD.size
_SETTING = struct.Struct(">HI")
_WORD = struct.Struct(">I")


def head(length: int, kind: int, flags: int, stream: int) -> bytes:
    """The 9 bytes before a frame's payload."""
    return _HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream)


def read_head(data: bytes | bytearray, at: int = 0) -> tuple[int, int, int, int]:
    """Length, type, flags and stream of the frame that begins at `at`."""
    high, low, kind, flags, stream = _HEAD.unpack_from(data, at)
    return high << 8 | low, kind, flags, stream & LARGEST_WINDOW


def message_head(length: int, flags: int, stream: int) -> bytes:
    """What comes before a message of gRPC that is not compressed and has a frame for itself."""
    size = length + 5
    return _MESSAGE_HEAD.pack(size >> 8, size & 0xFF, DATA, flags, stream, 0, length)


def read_message_head(data: bytes, at: int) -> tuple[int, int, int, int, int, int]:
    """Length, type, flags and stream of the frame of a message, then its compression and its length."""
    high, low, kind, flags, stream, packed, length = _MESSAGE_HEAD.unpack_from(data, at)
    return high << 8 | low, kind, flags, stream, packed, length


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """A whole frame."""
    length = len(payload)
    return _HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream) + payload


def settings(values: dict[int, int]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*pair) for pair in values.items()))


def read_settings(payload: bytes) -> dict[int, int]:
    """The settings of a SETTINGS frame; of one given twice the last counts."""
    if len(payload) % _SETTING.size:
        raise ConnectionBroken(f"a SETTINGS frame has {len(payload)} bytes")
    return dict(_SETTING.iter_unpack(payload))


def reset(stream: int, code: int) -> bytes:
    """A RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream, _WORD.pack(code))


def window_update(stream: int, size: int) -> bytes:
    """A WINDOW_UPDATE frame; stream 0: of the connection."""
    return frame(WINDOW_UPDATE, 0, stream, _WORD.pack(size))
