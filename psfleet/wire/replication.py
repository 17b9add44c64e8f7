"""Records on their way to a standby: FollowReply on the wire, written and read by hand.

As with a Frame: protobuf would copy the body of a record twice on its way and twice at its end.
"""

from collections.abc import Iterator

from psfleet.wire.body import parse
from psfleet.wire.protobuf_fields import ALIGNMENT, BYTES, extent, opened, tag
from psfleet.wire.v1.replica_pb2 import FollowReply

_BODY, _PADDING = 3, 8
_CHUNK_BYTES = 4 << 20  # bytes of a body in one message: gRPC likes them so


def encode(number: int, kind: int, body: bytes) -> Iterator[bytes]:
    """Yield the messages that bring a record, each with a part of its body."""
    view = memoryview(body)
    for start in range(0, max(len(view), 1), _CHUNK_BYTES):
        part = view[start : start + _CHUNK_BYTES]
        head = FollowReply(number=number, kind=kind, more=start + _CHUNK_BYTES < len(view))
        opening = opened(head.SerializeToString(), _BODY, len(part), _PADDING)
        yield b"".join((opening, part))


def decode(message: bytes) -> tuple[FollowReply, memoryview]:
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
