"""The frames of headers around a message, for calls that are made again and again."""

from functools import lru_cache

from psfleet.http2 import frames

__all__ = ["around_message", "trailing"]


def around_message(number: int, length: int, block: bytes, trailers: bytes) -> tuple[bytes, bytes]:
    """What comes before a message that has a frame for itself, and behind it.

    Args:
        number: Of the stream.
        length: Of the message.
        block: The headers before it.
        trailers: A block that ends the stream; empty: the message ends it.
    """
    stream, flags = number.to_bytes(4, "big"), 0 if trailers else frames.END_STREAM
    opening = _headers_of(len(block)) + stream + block
    opening += frames.message_head(length, flags, number)
    return opening, trailing(number, trailers) if trailers else b""


@lru_cache(64)
def _headers_of(size: int) -> bytes:
    """The head of a frame of headers up to the number of the stream."""
    return frames.head(size, frames.HEADERS, frames.END_HEADERS, 0)[:-4]


@lru_cache(64)
def _trailers_of(size: int) -> bytes:
    """Likewise, of headers that end a stream."""
    return frames.head(size, frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 0)[:-4]


def trailing(number: int, block: bytes) -> bytes:
    """The frame of a block that ends a stream."""
    return _trailers_of(len(block)) + number.to_bytes(4, "big") + block
