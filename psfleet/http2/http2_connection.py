"""What both ends of an HTTP/2 connection do: read frames, keep windows, send messages.

One thread reads (`read`). Messages may be sent by any thread; what the other end's windows do not
take yet is sent by the reading thread when it hears of more room.
"""

import threading
from collections import deque
from dataclasses import dataclass, field

from psfleet.http2 import frames
from psfleet.http2.call_errors import ConnectionBroken
from psfleet.http2.header_blocks import MAX_HEADERS, HeaderReader
from psfleet.http2.message_frames import around_message, trailing
from psfleet.http2.socket_transport import Part, Transport
from psfleet.platform.unwritten_bytes import unwritten_bytes

__all__ = ["Http2Connection", "StreamState"]

_BUFFER = 64 << 10
_RENEW = 1 << 30  # bytes received after which the other end's windows are opened again
_PREFIX = 5  # bytes before a message: not compressed, and its length
_DEFAULT_WINDOW = 65_535
_SHORT = 1 << 10  # bytes of a message that is read at once


class StreamState:
    """One call: where it stands, and the message that comes in.

    Args:
        number: Of the stream.
        window: Bytes that the other end takes now.
        most: Bytes that the message may have.

    Attributes:
        received: Bytes of the frames of the message, since its window was opened last.
        closed: Nothing is sent on it any more.
        content: The bytes of the message, once it `is_whole`.
        length: What its prefix says; -1: not yet known.
    """

    __slots__ = (
        "_filled",
        "_most",
        "_place",
        "_prefix",
        "closed",
        "content",
        "length",
        "number",
        "received",
        "window",
    )

    def __init__(self, number: int, window: int, most: int) -> None:
        self.number = number
        self.window = window
        self.received = 0
        self.closed = False
        self.content = b""
        self.length = -1
        self._most = most
        self._prefix = b""
        self._place: memoryview | None = None
        self._filled = 0

    @property
    def is_whole(self) -> bool:
        """Whether all bytes are here."""
        return self.length >= 0 and self._filled == self.length

    def took_whole(self, length: int) -> None:
        """All bytes of the message are read, by somebody else."""
        self.length = self._filled = length

    def take(self, size: int, connection: "Http2Connection") -> None:
        """Take so many bytes, the next ones of the connection.

        Raises:
            ConnectionBroken: They are more than the message, or it is compressed or too long.
        """
        missing = _PREFIX - len(self._prefix)
        if missing == _PREFIX <= size <= _SHORT:  # mostly all of a small message
            piece = connection.read_bytes(size)
            self._prefix = piece[:_PREFIX]
            self._begin()
            if size == _PREFIX + self.length:
                self.content, self._filled = piece[_PREFIX:], self.length
            elif size > _PREFIX:
                self._next(size - _PREFIX)[:] = piece[_PREFIX:]
            return
        if missing and size:
            first = min(missing, size)
            self._prefix += connection.read_bytes(first)
            size -= first
            if len(self._prefix) == _PREFIX:
                self._begin()
        if size:
            connection.read_into(self._next(size))

    def _next(self, size: int) -> memoryview:
        """The place of the next bytes, which are taken."""
        start, self._filled = self._filled, self._filled + size
        if self._filled > self.length:
            raise ConnectionBroken(f"a message of {self.length} bytes has more")
        if self._place is None:
            self.content, place = unwritten_bytes(self.length)
            self._place = memoryview(place).cast("B")
        return self._place[start : self._filled]

    def _begin(self) -> None:
        if self._prefix[0]:
            raise ConnectionBroken("a message is compressed, which nobody has offered to read")
        length = int.from_bytes(self._prefix[1:], "big")
        if length > self._most:
            raise ConnectionBroken(f"a message has {length} bytes, the limit is {self._most}")
        self.length = length


@dataclass(slots=True)
class _Unsent:
    """The rest of a message for which there is no room in a window."""

    stream: StreamState
    rest: memoryview
    trailers: bytes
    end: bool = field(default=False)


class Http2Connection:
    """One end of a connection.

    Args:
        transport: Its bytes.
        most: Bytes that a message from the other end may have.
        streams: Calls that the other end may have open.
    """

    def __init__(self, transport: Transport, most: int, streams: int) -> None:
        self.transport = transport
        self.most = most
        self.headers = HeaderReader()
        self.streams: dict[int, StreamState] = {}
        self.sending = threading.RLock()
        self._streams = streams
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0
        self._window = _DEFAULT_WINDOW
        self._stream_window = _DEFAULT_WINDOW
        self._largest_frame = frames.SMALLEST_FRAME
        self._received = 0
        self._unsent: deque[_Unsent] = deque()

    # -- reading -------------------------------------------------------------------------------

    def greeting(self) -> bytes:
        """What each end says first: how much it takes."""
        said = {
            frames.MAX_CONCURRENT_STREAMS: self._streams,
            frames.INITIAL_WINDOW: frames.LARGEST_WINDOW,
            frames.MAX_FRAME_SIZE: frames.LARGEST_FRAME,
            frames.MAX_HEADER_LIST_SIZE: MAX_HEADERS,
        }
        more = frames.LARGEST_WINDOW - _DEFAULT_WINDOW
        return frames.settings(said) + frames.window_update(0, more)

    def read_bytes(self, size: int) -> bytes:
        """The next bytes, as many as a small frame has at most."""
        while self._end - self._start < size:
            self._fill(size)
        start = self._start
        self._start = end = start + size
        return bytes(self._view[start:end])

    def arrived(self, most: int) -> bytes:
        """What is here and not read yet, at least one byte, which stays; empty if it is more than `most`."""
        if self._start == self._end:
            self._fill(1)
        return b"" if self._end - self._start > most else bytes(self._view[self._start : self._end])

    def skip(self, size: int) -> None:
        """Pass over so many bytes that have arrived."""
        self._start += size

    def read_into(self, target: memoryview) -> None:
        """The next bytes, as many as the target holds."""
        here = min(len(target), self._end - self._start)
        target[:here] = self._view[self._start : self._start + here]
        self._start += here
        while here < len(target):
            if len(target) - here < _BUFFER // 4:  # with what follows it, in one call
                self._fill(len(target) - here)
                self.read_into(target[here:])
                return
            here += self.transport.receive(target[here:], self.tick)

    def _fill(self, size: int) -> None:
        """Read more into the buffer, in which there is to be room for `size` bytes."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start + size > _BUFFER:
            rest = self._end - self._start
            self._view[:rest] = bytes(self._view[self._start : self._end])
            self._start, self._end = 0, rest
        self._end += self.transport.receive(self._view[self._end :], self.tick)

    def read(self) -> None:
        """Read one frame and do what it says.

        Raises:
            ConnectionBroken: The connection has ended, or the other end breaks the protocol.
        """
        while self._end - self._start < frames.HEAD_SIZE:
            self._fill(frames.HEAD_SIZE)
        length, kind, flags, number = frames.read_head(self._buffer, self._start)
        self._start += frames.HEAD_SIZE
        if kind == frames.DATA:
            self._data(length, flags, number)
        elif length > MAX_HEADERS:
            raise ConnectionBroken(f"a frame of type {kind} has {length} bytes")
        elif kind == frames.HEADERS:
            block = self.read_bytes(length)
            if flags & ~frames.END_STREAM == frames.END_HEADERS:  # whole and plain, as mostly
                self.on_headers(number, block, bool(flags & frames.END_STREAM))
            else:
                self._header_block(block, flags, number)
        else:
            self._control(kind, flags, number, self.read_bytes(length))

    def _data(self, length: int, flags: int, number: int) -> None:
        size, padding = length, 0
        if flags & frames.PADDED:
            padding = self.read_bytes(1)[0] if length else 1
            size -= 1 + padding
            if size < 0:
                raise ConnectionBroken("a frame has more padding than bytes")
        stream = self.streams.get(number)
        if stream is None:
            self._skip(number, size)
        else:
            stream.take(size, self)
        if padding:
            self._skip(number, padding)
        self.took(length)
        if stream is not None:
            stream.received += length
            if stream.received >= _RENEW:
                self.send([frames.window_update(stream.number, stream.received)])
                stream.received = 0
            if flags & frames.END_STREAM:
                self.on_end(stream)

    def took(self, length: int) -> None:
        """So many bytes of messages are read: open the connection's window again, from time to time."""
        self._received += length
        if self._received >= _RENEW:
            self.send([frames.window_update(0, self._received)])
            self._received = 0

    def _skip(self, number: int, size: int) -> None:
        """Pass over bytes of a call that has ended here."""
        if number > self.newest():
            raise ConnectionBroken(f"a message comes on stream {number}, which is not open")
        while size:
            size -= len(self.read_bytes(min(size, _BUFFER // 2)))

    def _header_block(self, payload: bytes, flags: int, number: int) -> None:
        if flags & frames.PADDED:
            if not payload or payload[0] >= len(payload):
                raise ConnectionBroken("a frame has more padding than bytes")
            payload = payload[1 : len(payload) - payload[0]]
        if flags & frames.PRIORITY_FLAG:
            payload = payload[5:]
        while not flags & frames.END_HEADERS:
            length, kind, more, same = frames.read_head(self.read_bytes(frames.HEAD_SIZE))
            if kind != frames.CONTINUATION or same != number or len(payload) + length > MAX_HEADERS:
                raise ConnectionBroken("headers go on in the wrong way, or have too many bytes")
            payload += self.read_bytes(length)
            flags |= more & frames.END_HEADERS
        self.on_headers(number, payload, bool(flags & frames.END_STREAM))

    def _control(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == frames.SETTINGS and not flags & frames.ACK:
            self._settings(frames.read_settings(payload))
        elif kind == frames.WINDOW_UPDATE:
            self._open_window(number, payload)
        elif kind == frames.PING and not flags & frames.ACK:
            if len(payload) != 8:
                raise ConnectionBroken(f"a PING has {len(payload)} bytes")
            self.send([frames.frame(frames.PING, frames.ACK, 0, payload)])
        elif kind == frames.RST_STREAM:
            stream = self.streams.get(number)
            if stream is not None:
                self.drop(stream)
                self.on_reset(stream)
        elif kind == frames.GOAWAY:
            raise ConnectionBroken("the other end takes no more calls")
        elif kind in (frames.PUSH_PROMISE, frames.CONTINUATION):
            raise ConnectionBroken(f"a frame of type {kind} where none may be")

    def _settings(self, said: dict[int, int]) -> None:
        largest = said.get(frames.MAX_FRAME_SIZE, self._largest_frame)
        window = said.get(frames.INITIAL_WINDOW, self._stream_window)
        if not frames.SMALLEST_FRAME <= largest <= frames.LARGEST_FRAME:
            raise ConnectionBroken(f"the other end takes frames of {largest} bytes")
        if window > frames.LARGEST_WINDOW:
            raise ConnectionBroken(f"the other end has a window of {window} bytes")
        with self.sending:
            self._largest_frame = largest
            for stream in self.streams.values():
                stream.window += window - self._stream_window
            self._stream_window = window
            # The other end counts by its new windows once it has the acknowledgement, so that goes first.
            self.send([frames.frame(frames.SETTINGS, frames.ACK, 0, b"")])
            self._send_rest()

    def _open_window(self, number: int, payload: bytes) -> None:
        more = int.from_bytes(payload, "big") & frames.LARGEST_WINDOW
        if len(payload) != 4 or not more:
            raise ConnectionBroken("a window is opened by nothing")
        with self.sending:
            if not number:
                self._window += more
            elif number in self.streams:
                self.streams[number].window += more
            if self._window > frames.LARGEST_WINDOW:
                raise ConnectionBroken("a window is opened too far")
            self._send_rest()

    # -- for each end --------------------------------------------------------------------------

    def tick(self) -> None:
        """Called about twice a second while nothing comes; raises when the wait is over."""
        raise NotImplementedError

    def newest(self) -> int:
        """The highest number of a stream that was open."""
        raise NotImplementedError

    def on_headers(self, number: int, block: bytes, ends: bool) -> None:
        """Headers have come."""
        raise NotImplementedError

    def on_end(self, stream: StreamState) -> None:
        """The other end has sent all of a stream."""
        raise NotImplementedError

    def on_reset(self, stream: StreamState) -> None:
        """The other end has given up a stream."""
        raise NotImplementedError

    # -- writing -------------------------------------------------------------------------------

    def open(self, number: int) -> StreamState:
        """A stream begins."""
        stream = self.streams[number] = StreamState(number, self._stream_window, self.most)
        return stream

    def drop(self, stream: StreamState) -> None:
        """A stream has ended: nothing is sent on it any more."""
        with self.sending:
            stream.closed = True
            self.streams.pop(stream.number, None)

    def send(self, parts: list[Part]) -> None:
        """Send whole frames."""
        with self.sending:
            self.transport.send(parts)

    def send_message(
        self, stream: StreamState, block: bytes, message: bytes, trailers: bytes
    ) -> None:
        """Send headers, a message and, unless they are empty, trailers.

        Args:
            stream: The call.
            block: Its headers.
            message: The bytes; they must not change until they are sent.
            trailers: A block that ends the stream; empty: the message ends it.
        """
        with self.sending:
            if stream.closed:
                return
            number, length = stream.number, len(message)
            whole = _PREFIX + length
            if (
                not self._unsent
                and whole <= self._window
                and whole <= stream.window
                and whole <= self._largest_frame
            ):
                self._window -= whole
                stream.window -= whole
                opening, closing = around_message(number, length, block, trailers)
                if trailers:
                    stream.closed = True
                    self.streams.pop(number, None)
                    self.transport.send([opening, message, closing])
                else:
                    self.transport.send([opening, message])
                return
            self.transport.send([frames.frame(frames.HEADERS, frames.END_HEADERS, number, block)])
            prefix, end = b"\0" + length.to_bytes(4, "big"), not trailers
            self._unsent.append(_Unsent(stream, memoryview(prefix), b"", False))
            self._unsent.append(_Unsent(stream, memoryview(message), trailers, end))
            self._send_rest()

    def _send_rest(self) -> None:
        """Send what the windows take of what is unsent. The lock is held."""
        waiting: deque[_Unsent] = deque()
        blocked: set[int] = set()
        while self._unsent:
            one = self._unsent.popleft()
            if one.stream.closed:
                continue
            if one.stream.number in blocked or not self._send_some(one):
                blocked.add(one.stream.number)
                waiting.append(one)
        self._unsent = waiting

    def _send_some(self, one: _Unsent) -> bool:
        """Whether all of it is sent."""
        parts: list[Part] = []
        number = one.stream.number
        while (
            len(one.rest)
            and (room := min(self._window, one.stream.window, self._largest_frame)) > 0
        ):
            piece, one.rest = one.rest[:room], one.rest[room:]
            self._window -= len(piece)
            one.stream.window -= len(piece)
            flags = frames.END_STREAM if one.end and not len(one.rest) else 0
            parts += [frames.head(len(piece), frames.DATA, flags, number), piece]
        whole = not len(one.rest)
        if whole and one.end and not parts:  # an empty message
            parts.append(frames.head(0, frames.DATA, frames.END_STREAM, number))
        if whole and one.trailers:
            parts.append(trailing(number, one.trailers))
            self.drop(one.stream)
        if parts:
            self.transport.send(parts)
        return whole
