"""HTTP/2 frames (RFC 9113, sections 4 and 6) as bytes, and the errors that end calls and connections.

    length u24 | type u8 | flags u8 | stream u32 | payload ...        9 bytes before each payload

Pure functions without state. They build and parse the heads of frames, settings and the few control frames,
and check the frames that a peer sends. `around_message` builds all bytes around a gRPC message at once,
because most of the cost of a small call is building frames.
"""

import struct
from enum import IntEnum
from functools import lru_cache

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_SIZE = 9
# Longest frame that this package accepts, in bytes. The protocol allows 16 MiB. Other limits have not been
# measured: a longer frame saves only 9 bytes for each 4 MiB.
LARGEST_TAKEN = 2**22
LARGEST_WINDOW = 2**31 - 1
_HEAD = struct.Struct(">HBBBI")  # length (upper 16 bits, lower 8), type, flags, stream
_MESSAGE_HEAD = struct.Struct(">HBBBIBI")  # the same, then gRPC's prefix: compressed, length
MESSAGE_HEAD_SIZE = _MESSAGE_HEAD.size
_SETTING = struct.Struct(">HI")
_WORD = struct.Struct(">I")
# Longest frame of settings, or of a GOAWAY frame, in bytes. No peer has reason to send as many: settings are
# 6 bytes each, and only the first 4 bytes of a GOAWAY are used. A reader's buffer must hold such a frame.
LONGEST_CONTROL = 16 << 10
_SETTING_SIZE = 6
_GOAWAY_SIZE = 8


class ErrorCode(IntEnum):
    """Error code of a RST_STREAM or GOAWAY frame (RFC 9113, section 7)."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    FLOW_CONTROL_ERROR = 0x3
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    COMPRESSION_ERROR = 0x9
    ENHANCE_YOUR_CALM = 0xB


class ConnectionBroken(Exception):
    """The connection is lost, or the peer has violated the HTTP/2 protocol."""


class CodedError(Exception):
    """The peer has violated the HTTP/2 protocol. Base of errors that have an error code.

    Attributes:
        code: Error code to report to the peer.
    """

    def __init__(self, code: ErrorCode, details: str) -> None:
        super().__init__(details)
        self.code = code


class ProtocolViolation(CodedError, ConnectionBroken):
    """A violation of the protocol that ends the whole connection."""


class StreamError(CodedError):
    """A violation of the protocol within one call. It ends only that call."""


class DamagedMessage(Exception):
    """The message of a call cannot be read, for example because it is too long.

    Attributes:
        status: gRPC status code that the call ends with.
        details: Explanation for a person.
        unread: Bytes of the current frame that have not been read and must be skipped.
    """

    def __init__(self, status: int, details: str, unread: int) -> None:
        super().__init__(details)
        self.status = status
        self.details = details
        self.unread = unread


class DeadlinePassed(Exception):
    """No reply to a call has arrived before its timeout."""


class CallFailed(Exception):
    """The server has replied with an error status.

    Attributes:
        code: gRPC status code, as a number.
        details: Explanation for a person.
        metadata: Trailing headers, with names in lower case.
    """

    def __init__(self, code: int, details: str, metadata: dict[str, str]) -> None:
        super().__init__(f"status {code}: {details}")
        self.code = code
        self.details = details
        self.metadata = metadata


DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS = 0, 1, 2, 3, 4
PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 5, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY_FLAG = 0x1, 0x1, 0x4, 0x8, 0x20
ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW, MAX_FRAME_SIZE = 2, 3, 4, 5
HEADER_TABLE_SIZE, MAX_HEADER_LIST_SIZE = 1, 6

SMALLEST_FRAME, LARGEST_FRAME = 2**14, 2**24 - 1  # bounds of MAX_FRAME_SIZE

unpack_head, pack_message_head = _HEAD.unpack_from, _MESSAGE_HEAD.pack
"""The head of a frame.

The head of a DATA frame that holds one gRPC message, including the message's prefix.
"""


def head(length: int, kind: int, flags: int, stream: int) -> bytes:
    """Return the 9 bytes before a frame's payload."""
    return _HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream)


def read_head(data: bytes | bytearray, at: int = 0) -> tuple[int, int, int, int]:
    """Parse the head of the frame that begins at `at`. Returns the frame's length, type, flags and stream."""
    high, low, kind, flags, stream = _HEAD.unpack_from(data, at)
    return high << 8 | low, kind, flags, stream & LARGEST_WINDOW


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """Return a whole frame with this payload."""
    length = len(payload)
    return _HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream) + payload


def settings(values: dict[int, int]) -> bytes:
    """Return a SETTINGS frame with these values by setting number."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*pair) for pair in values.items()))


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Return the settings in a SETTINGS frame's payload, as pairs of number and value in their order."""
    return list(_SETTING.iter_unpack(payload))


def reset(stream: int, code: int) -> bytes:
    """Return a RST_STREAM frame, which cancels a stream."""
    return frame(RST_STREAM, 0, stream, _WORD.pack(code))


def goaway(newest: int, code: int, details: str) -> bytes:
    """Return a GOAWAY frame. `newest` is the number of the last stream that may have been processed."""
    return frame(GOAWAY, 0, 0, _WORD.pack(newest) + _WORD.pack(code) + details.encode())


def window_update(stream: int, size: int) -> bytes:
    """Return a WINDOW_UPDATE frame. Stream 0 enlarges the window of the whole connection."""
    return frame(WINDOW_UPDATE, 0, stream, _WORD.pack(size))


def around_message(number: int, length: int, block: bytes, trailers: bytes) -> tuple[bytes, bytes]:
    """Return the bytes before and after a gRPC message that is sent in one DATA frame.

        HEADERS head | block | DATA head | prefix | (message) | HEADERS head | trailers

    Args:
        number: Number of the stream.
        length: Length of the message in bytes.
        block: Header block to send before the message.
        trailers: Header block that ends the stream. If it is empty, the message itself ends the stream.
    """
    stream, flags = number.to_bytes(4, "big"), 0 if trailers else END_STREAM
    size = length + 5  # the prefix of a gRPC message belongs to the DATA frame
    opening = pack_message_head(size >> 8, size & 0xFF, DATA, flags, number, 0, length)
    closing = _trailers_of(len(trailers)) + stream + trailers if trailers else b""
    return _headers_of(len(block)) + stream + block + opening, closing


@lru_cache(64)
def _headers_of(size: int) -> bytes:
    """Return the head of a HEADERS frame without its stream number."""
    return head(size, HEADERS, END_HEADERS, 0)[:-4]


@lru_cache(64)
def _trailers_of(size: int) -> bytes:
    """Return the head of a HEADERS frame that ends its stream, without its stream number."""
    return head(size, HEADERS, END_HEADERS | END_STREAM, 0)[:-4]


def trailing(number: int, block: bytes) -> bytes:
    """Return a HEADERS frame with a block of trailers, which ends the stream."""
    return _trailers_of(len(block)) + number.to_bytes(4, "big") + block


_SIZES = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
_OF_CONNECTION = {SETTINGS, PING, GOAWAY}
_OF_STREAM = {PRIORITY, RST_STREAM}
_NOWHERE = {PUSH_PROMISE, CONTINUATION}  # CONTINUATION is read only right behind unfinished headers


def check_frame(kind: int, flags: int, number: int, length: int) -> None:
    """Check the head of a frame of any type but DATA and HEADERS.

    Raises:
        ProtocolViolation: The frame is not allowed on this stream, or has a wrong length.
    """
    if (
        kind in _NOWHERE
        or (number and kind in _OF_CONNECTION)
        or (not number and kind in _OF_STREAM)
    ):
        raise ProtocolViolation(
            ErrorCode.PROTOCOL_ERROR,
            f"a frame of type {kind} comes on stream {number}, where none may be",
        )
    if not _is_size(kind, flags, length):
        raise ProtocolViolation(
            ErrorCode.FRAME_SIZE_ERROR, f"a frame of type {kind} has {length} bytes"
        )


def _is_size(kind: int, flags: int, length: int) -> bool:
    """Return whether a frame of this kind may have this length."""
    if kind == SETTINGS:
        if flags & ACK:
            return length == 0
        return length % _SETTING_SIZE == 0 and length <= LONGEST_CONTROL
    if kind == GOAWAY:
        return _GOAWAY_SIZE <= length <= LONGEST_CONTROL
    return length == _SIZES.get(kind, length)


def check_setting(key: int, value: int) -> None:
    """Check the value of a setting that the peer has sent.

    Raises:
        ProtocolViolation: The value is out of range.
    """
    code = ErrorCode.PROTOCOL_ERROR
    if key == ENABLE_PUSH:
        right = value <= 1
    elif key == INITIAL_WINDOW:
        right, code = value <= LARGEST_WINDOW, ErrorCode.FLOW_CONTROL_ERROR
    elif key == MAX_FRAME_SIZE:
        right = SMALLEST_FRAME <= value <= LARGEST_FRAME
    else:
        right = True
    if not right:
        raise ProtocolViolation(code, f"setting {key} of the other end is {value}")
