"""One call of a connection, and the message that comes in for it."""

from typing import Protocol

from psfleet.http2.call_errors import DamagedMessage
from psfleet.platform.memory import unwritten_bytes

_PREFIX = 5  # bytes before a message: not compressed, and its length
_INVALID, _EXHAUSTED, _UNIMPLEMENTED = 3, 8, 12  # statuses of gRPC
_SHORT = 1 << 10  # bytes of a message that is read at once


class ByteSource(Protocol):
    """Source of a message's bytes."""

    def read_bytes(self, size: int) -> bytes:
        """Return the next bytes, as many as a small frame has at most."""

    def read_into(self, target: memoryview) -> None:
        """Return the next bytes, as many as the target holds."""


class StreamState:
    """One call: where it stands, and the message that comes in.

    Args:
        number: Number of the stream.
        window: Bytes that the other end takes now.
        most: Bytes that the message may have.

    Attributes:
        received: Bytes of the frames of the message, since its window was opened last.
        remaining: Bytes that its headers have promised and that are not here; None: they say nothing of it.
        ended: The other end has sent all of it.
        unwanted: True if the bytes that come in are no message, and are skipped.
        closed: Nothing is sent on it any more.
        content: The bytes of the message, once it `is_whole`.
        length: Length in the message's prefix; -1: not yet known.
    """

    received = 0
    remaining: int | None = None
    ended = unwanted = closed = False
    content = b""
    length = -1
    _prefix = b""
    _place: memoryview | None = None
    _filled = 0

    def __init__(self, number: int, window: int, most: int) -> None:
        self.number = number
        self.window = window
        self._most = most

    @property
    def is_whole(self) -> bool:
        """True if all bytes are here."""
        return self.length >= 0 and self._filled == self.length

    @property
    def missing(self) -> int:
        """Bytes up to the end of the message, or of what says its length; at least 1 if it is not whole."""
        return _PREFIX - len(self._prefix) or self.length - self._filled

    def begin_next(self) -> None:
        """Take another message."""
        self.content, self.length, self._prefix, self._place, self._filled = b"", -1, b"", None, 0

    def take(self, size: int, source: ByteSource) -> None:
        """Take so many bytes, the next ones of the source.

        Raises:
            DamagedMessage: They are more than the message, or it is compressed or too long.
        """
        missing = _PREFIX - len(self._prefix)
        if missing == _PREFIX <= size <= _SHORT:  # mostly all of a small message
            part = source.read_bytes(size)
            self._prefix = part[:_PREFIX]
            self._begin(0)
            if size == _PREFIX + self.length:
                self.content, self._filled = part[_PREFIX:], self.length
            elif size > _PREFIX:
                self._next(size - _PREFIX, 0)[:] = part[_PREFIX:]
            return
        if missing and size:
            first = min(missing, size)
            self._prefix += source.read_bytes(first)
            size -= first
            if len(self._prefix) == _PREFIX:
                self._begin(size)
        if size:
            source.read_into(self._next(size, size))

    def _next(self, size: int, unread: int) -> memoryview:
        """Return the place of the next bytes, which are taken; `unread`: those that are not read yet."""
        start, self._filled = self._filled, self._filled + size
        if self._filled > self.length:
            raise DamagedMessage(_INVALID, f"a message of {self.length} bytes has more", unread)
        if self._place is None:
            self.content, place = unwritten_bytes(self.length)
            self._place = memoryview(place).cast("B")
        return self._place[start : self._filled]

    def _begin(self, unread: int) -> None:
        length = int.from_bytes(self._prefix[1:], "big")
        if self._prefix[0]:
            raise DamagedMessage(
                _UNIMPLEMENTED, "the message is compressed, or is none of gRPC", unread
            )
        if length > self._most:
            raise DamagedMessage(
                _EXHAUSTED, f"the message has {length} bytes, the limit is {self._most}", unread
            )
        self.length = length
