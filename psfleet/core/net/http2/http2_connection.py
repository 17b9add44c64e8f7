"""Common part of both ends of an HTTP/2 connection: it reads frames, keeps windows, sends messages.

One thread reads (`read`). Messages may be sent by any thread; what the other end's windows do not
take yet is sent by the reading thread when it hears of more room.
"""

import threading
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from psfleet.core.net.http2 import frames
from psfleet.core.net.http2.calls import StreamState
from psfleet.core.net.http2.frames import (
    ConnectionBroken,
    DamagedMessage,
    ErrorCode,
    ProtocolViolation,
    StreamError,
    around_message,
)
from psfleet.core.net.http2.header_blocks import MAX_HEADERS, NO_TABLE, HeaderReader
from psfleet.core.net.http2.socket_transport import BufferedReader, Part, Transport

RENEW = 1 << 30  # bytes received after which the other end's windows are opened again
PREFIX = 5  # bytes before a message: not compressed, and its length
_DEFAULT_WINDOW = 65_535
_MOST_FRAGMENTS = 64  # CONTINUATION frames of one call


S = TypeVar("S", bound=StreamState)


@dataclass(slots=True)
class _Unsent:
    """The rest of a message for which there is no room in a window."""

    stream: StreamState
    rest: memoryview
    trailers: bytes
    end: bool


class Http2Connection(BufferedReader, Generic[S]):
    """One end of a connection, whose calls are of type S.

    Args:
        transport: Its bytes.
        most: Bytes that a message from the other end may have.
        streams: Calls that the other end may have open.
        pseudo: The pseudo-headers that it sends.

    Attributes:
        is_limited: True if `limit` is asked before a frame is read.
        has_greeted: True if this end has sent its settings.
        streams: The open calls.
        window: Bytes that the other end takes now, of all calls together.
        stream_window: Bytes that it takes of a new call.
        received: Bytes of messages that were read since the window of this end was opened last.
    """

    def __init__(
        self, transport: Transport, most: int, streams: int, pseudo: frozenset[str]
    ) -> None:
        super().__init__(transport)
        self.most = most
        self.headers = HeaderReader(pseudo)
        self.streams: dict[int, S] = {}
        self.sending = threading.RLock()
        self.is_limited = self.has_greeted = False
        self._streams = streams
        self.window = _DEFAULT_WINDOW
        self.stream_window = _DEFAULT_WINDOW
        self._largest_frame = frames.SMALLEST_FRAME
        self.received = 0
        self._table_update = b""  # what the next header block begins with
        self._unsent: deque[_Unsent] = deque()

    # -- reading -------------------------------------------------------------------------------

    def greeting(self) -> bytes:
        """Return the first bytes of each end: its settings, with how much it takes."""
        settings = {
            frames.MAX_CONCURRENT_STREAMS: self._streams,
            frames.INITIAL_WINDOW: frames.LARGEST_WINDOW,
            frames.MAX_FRAME_SIZE: frames.LARGEST_TAKEN,
            frames.MAX_HEADER_LIST_SIZE: MAX_HEADERS,
        }
        more = frames.LARGEST_WINDOW - _DEFAULT_WINDOW
        return frames.settings(settings) + frames.window_update(0, more)

    def read(self) -> None:
        """Read one frame and do what it says.

        Raises:
            ConnectionBroken: The connection has ended, or the other end breaks the protocol.
        """
        while self._end - self._start < frames.HEAD_SIZE:
            self._fill(frames.HEAD_SIZE)
        length, kind, flags, number = frames.read_head(self._buffer, self._start)
        self._start += frames.HEAD_SIZE
        if length > (MAX_HEADERS if kind == frames.HEADERS else frames.LARGEST_TAKEN):
            raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, f"a frame has {length} bytes")
        if self.is_limited:
            self.limit(length, kind in (frames.HEADERS, frames.SETTINGS))
        try:
            if kind == frames.DATA:
                self._data(length, flags, number)
            elif kind != frames.HEADERS:
                self._control(kind, flags, number, length)
            else:
                block = self.read_bytes(length)
                if flags & ~frames.END_STREAM == frames.END_HEADERS:  # whole and plain, as mostly
                    self.on_headers(number, block, bool(flags & frames.END_STREAM))
                else:
                    self._header_block(block, flags, number)
        except StreamError as error:
            ends = kind in (frames.DATA, frames.HEADERS) and flags & frames.END_STREAM
            self.on_stream_error(number, error, bool(ends))

    @property
    def has_frame(self) -> bool:
        """True if a whole frame is here that is not read yet."""
        here = self._end - self._start - frames.HEAD_SIZE
        return here >= 0 and frames.read_head(self._buffer, self._start)[0] <= here

    def _data(self, length: int, flags: int, number: int) -> None:
        size, padding = length, 0
        if flags & frames.PADDED:
            padding = self.read_bytes(1)[0] if length else 1
            size -= 1 + padding
            if size < 0:
                raise ProtocolViolation(
                    ErrorCode.PROTOCOL_ERROR, "a frame has more padding than bytes"
                )
        stream, damage = self.streams.get(number), None
        if stream is None or stream.ended or stream.unwanted:
            if stream is None and not self.is_late(number, bool(flags & frames.END_STREAM)):
                code = ErrorCode.PROTOCOL_ERROR if self.is_idle(number) else ErrorCode.STREAM_CLOSED
                raise ProtocolViolation(
                    code, f"a message comes on stream {number}, which is not open"
                )
            self.pass_over(size)
        else:
            try:
                stream.take(size, self)
            except DamagedMessage as error:
                damage = error
                self.pass_over(error.unread)
        if padding:
            self.pass_over(padding)
        self.took(length)
        if stream is None:
            return
        if stream.ended:
            raise StreamError(ErrorCode.STREAM_CLOSED, "a message comes after its end")
        stream.received += length
        if stream.received >= RENEW:
            self.send([frames.window_update(stream.number, stream.received)])
            stream.received = 0
        if stream.remaining is not None:
            stream.remaining -= size
        if flags & frames.END_STREAM:
            stream.ended = True
        if stream.remaining and (stream.ended or stream.remaining < 0):
            raise StreamError(ErrorCode.PROTOCOL_ERROR, "the content-length is another")
        if damage is not None:
            self.on_damage(stream, damage)
        elif stream.ended:
            self.on_end(stream)

    def took(self, length: int) -> None:
        """Count bytes of messages that are read; open the connection's window again, from time to time."""
        self.received += length
        if self.received >= RENEW:
            self.send([frames.window_update(0, self.received)])
            self.received = 0

    def is_idle(self, number: int) -> bool:
        """Return whether the stream was never open."""
        return number > self.newest() or not number % 2

    def _header_block(self, payload: bytes, flags: int, number: int) -> None:
        if flags & frames.PADDED:
            if not payload or payload[0] >= len(payload):
                raise ProtocolViolation(
                    ErrorCode.PROTOCOL_ERROR, "a frame has more padding than bytes"
                )
            payload = payload[1 : len(payload) - payload[0]]
        if flags & frames.PRIORITY_FLAG:
            self._check_priority(number, payload)
            payload = payload[5:]
        fragments = 0
        while not flags & frames.END_HEADERS:
            length, kind, more, same = frames.read_head(self.read_bytes(frames.HEAD_SIZE))
            if self.is_limited:
                self.limit(length, True)
            fragments += 1
            if kind != frames.CONTINUATION or same != number:
                raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "headers go on in the wrong way")
            if len(payload) + length > MAX_HEADERS or fragments > _MOST_FRAGMENTS:
                raise ProtocolViolation(
                    ErrorCode.ENHANCE_YOUR_CALM, "headers have too many bytes or too many frames"
                )
            payload += self.read_bytes(length)
            flags |= more & frames.END_HEADERS
        self.on_headers(number, payload, bool(flags & frames.END_STREAM))

    def _check_priority(self, number: int, payload: bytes) -> None:
        if len(payload) < 5:
            raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, "a priority is cut off")
        if int.from_bytes(payload[:4], "big") & frames.LARGEST_WINDOW == number:
            raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, f"stream {number} depends on itself")

    def _control(self, kind: int, flags: int, number: int, length: int) -> None:
        frames.check_frame(kind, flags, number, length)
        if kind > frames.CONTINUATION:  # of an extension
            self.pass_over(length)
            return
        payload = self.read_bytes(length)
        if kind == frames.PRIORITY:
            self._check_priority(number, payload)
        elif kind == frames.GOAWAY:
            self.on_goaway(int.from_bytes(payload[:4], "big") & frames.LARGEST_WINDOW)
        elif number and self.is_idle(number):
            raise ProtocolViolation(
                ErrorCode.PROTOCOL_ERROR,
                f"a frame of type {kind} comes on stream {number}, which is not open",
            )
        elif kind == frames.WINDOW_UPDATE:
            self._open_window(number, payload)
        elif kind == frames.RST_STREAM:
            stream = self.streams.get(number)
            if stream is not None:
                self.drop(stream)
                self.on_reset(stream)
        elif not flags & frames.ACK:
            if kind == frames.SETTINGS:
                self._settings(payload)
            else:
                self.send([frames.frame(frames.PING, frames.ACK, 0, payload)])

    def _settings(self, payload: bytes) -> None:
        with self.sending:
            for key, value in frames.read_settings(payload):
                frames.check_setting(key, value)
                if key == frames.MAX_FRAME_SIZE:
                    self._largest_frame = value
                elif key == frames.INITIAL_WINDOW:
                    self._resize_windows(value)
                elif key == frames.HEADER_TABLE_SIZE:  # this end has no table, and says so once
                    self._table_update = NO_TABLE
            # The other end counts by its new windows once it has the acknowledgement, so that goes first.
            self.send([frames.frame(frames.SETTINGS, frames.ACK, 0, b"")])
            self._send_rest()

    def _resize_windows(self, window: int) -> None:
        for stream in self.streams.values():
            stream.window += window - self.stream_window
            self._check_window(stream.window)
        self.stream_window = window

    def _check_window(self, window: int) -> None:
        if window > frames.LARGEST_WINDOW:
            raise ProtocolViolation(
                ErrorCode.FLOW_CONTROL_ERROR, f"a window is opened to {window} bytes"
            )

    def _open_window(self, number: int, payload: bytes) -> None:
        more = int.from_bytes(payload, "big") & frames.LARGEST_WINDOW
        with self.sending:
            stream = self.streams.get(number)
            if not number:
                if not more:
                    raise ProtocolViolation(
                        ErrorCode.PROTOCOL_ERROR, "a window is opened by nothing"
                    )
                self.window += more
                self._check_window(self.window)
            elif stream is not None:
                if not more:
                    raise StreamError(ErrorCode.PROTOCOL_ERROR, "a window is opened by nothing")
                stream.window += more
                if stream.window > frames.LARGEST_WINDOW:
                    raise StreamError(ErrorCode.FLOW_CONTROL_ERROR, "a window is opened too far")
            self._send_rest()

    # -- for each end --------------------------------------------------------------------------

    def newest(self) -> int:
        """Return the highest number of a stream that was open."""
        raise NotImplementedError

    def on_headers(self, number: int, block: bytes, ends: bool) -> None:
        """Take headers that have come."""
        raise NotImplementedError

    def limit(self, length: int, is_decoded: bool) -> None:
        """Wait before a frame is read whose other end sends too many; see `is_limited`."""

    def is_late(self, number: int, ends: bool) -> bool:
        """Return whether a frame for a stream that is closed was on its way when it was closed.

        `ends`: With it the other end closes the stream too.
        """
        raise NotImplementedError

    def on_stream_error(self, number: int, error: StreamError, ends: bool) -> None:
        """Handle an error of the other end in one stream; `ends`: it sends no more on it."""
        raise NotImplementedError

    def on_damage(self, stream: S, damage: DamagedMessage) -> None:
        """Refuse the message of a stream."""
        raise NotImplementedError

    def on_goaway(self, newest: int) -> None:
        """Note that the other end takes no more streams; `newest`: the last one that it has taken."""
        raise NotImplementedError

    def on_end(self, stream: S) -> None:
        """Handle a stream of which the other end has sent all."""
        raise NotImplementedError

    def on_reset(self, stream: S) -> None:
        """Handle a stream that the other end has given up."""
        raise NotImplementedError

    # -- writing -------------------------------------------------------------------------------

    def drop(self, stream: StreamState) -> None:
        """End a stream: nothing is sent on it any more."""
        with self.sending:
            stream.closed = True
            self.streams.pop(stream.number, None)

    def send(self, parts: list[Part]) -> None:
        """Send whole frames."""
        with self.sending:
            self.transport.send(parts)

    def say_goodbye(self, newest: int, code: ErrorCode, details: str) -> None:
        """Send a GOAWAY frame, if it leaves without waiting. The connection is about to end."""
        if self.has_greeted and self.sending.acquire(timeout=1.0):
            try:
                self.transport.send_some([frames.goaway(newest, code, details)])
            except ConnectionBroken:
                pass  # it has ended
            finally:
                self.sending.release()

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
            whole = PREFIX + length
            if self.takes(whole, stream.window):
                stream.window -= whole
                if trailers:
                    stream.closed = True
                    self.streams.pop(number, None)
                self.send_at_once(number, block, message, trailers)
                return
            self.send_apart(stream, block, [b"\0" + length.to_bytes(4, "big"), message], trailers)

    def takes(self, whole: int, window: int) -> bool:
        """Return whether a message of so many bytes can leave now, in one frame. The lock is held."""
        room = min(window, self.window, self._largest_frame)
        return whole <= room and not self._unsent and not self._table_update

    def send_at_once(self, number: int, block: bytes, message: bytes, trailers: bytes) -> None:
        """Send what this end `takes`. The lock is held."""
        self.window -= PREFIX + len(message)
        opening, closing = around_message(number, len(message), block, trailers)
        self.transport.send([opening, message, closing] if trailers else [opening, message])

    def send_headers(self, number: int, block: bytes, flags: int) -> None:
        """Send a frame of headers. The lock is held."""
        block, self._table_update = self._table_update + block, b""
        self.transport.send([frames.frame(frames.HEADERS, flags, number, block)])

    def send_apart(
        self,
        stream: StreamState,
        block: bytes,
        contents: list[bytes],
        trailers: bytes,
        *,
        ends: bool = True,
    ) -> None:
        """Send headers, if there are any, and the rest as the windows allow. The lock is held.

        See `send_message`; `ends`: with the contents the stream ends, if there are no trailers.
        """
        if block:
            self.send_headers(stream.number, block, frames.END_HEADERS)
        *first, last = contents
        self._unsent += [_Unsent(stream, memoryview(one), b"", False) for one in first]
        self._unsent.append(_Unsent(stream, memoryview(last), trailers, ends and not trailers))
        self._send_rest()

    def took_replies(self, stream: StreamState) -> bool:
        """Return whether the other end has taken all that was sent on a stream."""
        with self.sending:
            return all(one.stream is not stream for one in self._unsent)

    def _send_rest(self) -> None:
        """Send what the windows take of what is unsent. The lock is held."""
        waiting: deque[_Unsent] = deque()
        full: set[int] = set()
        while self._unsent:
            one = self._unsent.popleft()
            if one.stream.closed:
                continue
            if one.stream.number in full or not self._send_some(one):
                full.add(one.stream.number)
                waiting.append(one)
        self._unsent = waiting

    def _send_some(self, one: _Unsent) -> bool:
        """Send as much as possible; return whether that was all."""
        parts: list[Part] = []
        number = one.stream.number
        while (
            len(one.rest) and (room := min(self.window, one.stream.window, self._largest_frame)) > 0
        ):
            part, one.rest = one.rest[:room], one.rest[room:]
            self.window -= len(part)
            one.stream.window -= len(part)
            flags = frames.END_STREAM if one.end and not len(one.rest) else 0
            parts += [frames.head(len(part), frames.DATA, flags, number), part]
        whole = not len(one.rest)
        if whole and one.end and not parts:  # an empty message
            parts.append(frames.head(0, frames.DATA, frames.END_STREAM, number))
        if whole and one.trailers:
            parts.append(frames.trailing(number, one.trailers))
            self.drop(one.stream)
        if parts:
            self.transport.send(parts)
        return whole
