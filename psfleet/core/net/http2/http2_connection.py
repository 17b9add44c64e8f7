"""Common part of both ends of an HTTP/2 connection: reading frames, flow-control windows and sending.

One thread reads (`read`) and calls the `on_...` methods that each end defines. Any thread may send, under the
lock `sending`. If the other end's windows do not accept a message yet, the message is queued. The reading
thread sends it when a WINDOW_UPDATE or SETTINGS frame has enlarged the windows, so no sender waits.

A window is the number of bytes of DATA frames that a receiver still accepts. There is one for the connection
and one for each stream (RFC 9113, section 5.2). This package announces the largest window possible and
enlarges it again after each GiB, so flow control practically never slows down a peer. Memory is limited by
the length of messages and the number of calls instead (see calls.py).
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

# Bytes received after which this end enlarges a window again: half of the largest window.
RENEW = 1 << 30
PREFIX = 5  # bytes before each gRPC message: 1 if it is compressed, and its length as u32
_DEFAULT_WINDOW = 65_535  # until SETTINGS or WINDOW_UPDATE change it (RFC 9113, section 6.9.2)
# CONTINUATION frames of one header block. A block of MAX_HEADERS bytes fits into a single frame even of the
# smallest MAX_FRAME_SIZE, so a correct client hardly needs any.
_MOST_FRAGMENTS = 64


S = TypeVar("S", bound=StreamState)


@dataclass(slots=True)
class _Unsent:
    """The part of a message that the other end's windows do not accept yet.

    Attributes:
        stream: Call that the message belongs to.
        rest: Bytes that have not been sent.
        trailers: Header block to send after the bytes, or empty.
        end: True if the last DATA frame ends the stream.
    """

    stream: StreamState
    rest: memoryview
    trailers: bytes
    end: bool


class Http2Connection(BufferedReader, Generic[S]):
    """Common base of both ends of a connection. S is the class of its calls.

    Args:
        transport: Transport of the connection.
        most: Longest message accepted from the other end, in bytes.
        streams: Number of calls that the other end may have open at once.
        pseudo: Pseudo-headers that the other end may send.

    Attributes:
        headers: Decoder of the other end's header blocks.
        sending: Lock that a thread holds while it sends frames or changes windows.
        is_limited: True if `limit` is called before each frame is read.
        has_greeted: True once this end has sent its settings.
        streams: Open calls by stream number.
        window: Bytes that the other end accepts now, on all streams together.
        stream_window: Bytes that the other end accepts on a new stream.
        received: Bytes of DATA frames since this end last enlarged the connection's window.
    """

    def __init__(
        self, transport: Transport, most: int, streams: int, pseudo: frozenset[str]
    ) -> None:
        super().__init__(transport)
        self.most = most
        self.headers = HeaderReader(pseudo)
        self.streams: dict[int, S] = {}
        # Reentrant, because code that holds it calls methods that take it, such as `send` and `drop`.
        self.sending = threading.RLock()
        self.is_limited = self.has_greeted = False
        self._streams = streams
        self.window = _DEFAULT_WINDOW
        self.stream_window = _DEFAULT_WINDOW
        self._largest_frame = frames.SMALLEST_FRAME
        self.received = 0
        # Prefix for the next header block, which changes the size of HPACK's table. Empty once it is sent.
        self._table_update = b""
        self._unsent: deque[_Unsent] = deque()

    def greeting(self) -> bytes:
        """Return the first frames that this end sends: its settings, and the largest possible window."""
        settings = {
            frames.MAX_CONCURRENT_STREAMS: self._streams,
            frames.INITIAL_WINDOW: frames.LARGEST_WINDOW,
            frames.MAX_FRAME_SIZE: frames.LARGEST_TAKEN,
            frames.MAX_HEADER_LIST_SIZE: MAX_HEADERS,
        }
        extra_window = frames.LARGEST_WINDOW - _DEFAULT_WINDOW
        return frames.settings(settings) + frames.window_update(0, extra_window)

    def read(self) -> None:
        """Read one frame and handle it. Blocks until a frame has arrived.

        Raises:
            ConnectionBroken: The connection has ended, or the peer has violated the protocol.
        """
        while self._end - self._start < frames.HEAD_SIZE:
            self._fill(frames.HEAD_SIZE)
        length, kind, flags, number = frames.read_head(self._buffer, self._start)
        self._start += frames.HEAD_SIZE
        # The length is checked, and the rate limit applied, before any byte of the payload is read.
        # `greeting` has announced both lengths.
        if length > (MAX_HEADERS if kind == frames.HEADERS else frames.LARGEST_TAKEN):
            raise ProtocolViolation(ErrorCode.FRAME_SIZE_ERROR, f"a frame has {length} bytes")
        # A flag, because a connection is limited only until its first permitted call.
        if self.is_limited:
            self.limit(length, kind in (frames.HEADERS, frames.SETTINGS))
        try:
            if kind == frames.DATA:
                self._data(length, flags, number)
            elif kind != frames.HEADERS:
                self._control(kind, flags, number, length)
            else:
                block = self.read_bytes(length)
                # As almost always: no padding, no priority, no CONTINUATION.
                if flags & ~frames.END_STREAM == frames.END_HEADERS:
                    self.on_headers(number, block, bool(flags & frames.END_STREAM))
                else:
                    self._header_block(block, flags, number)
        except StreamError as error:
            ends = kind in (frames.DATA, frames.HEADERS) and flags & frames.END_STREAM
            self.on_stream_error(number, error, bool(ends))

    @property
    def has_frame(self) -> bool:
        """True if a whole unread frame is in the buffer."""
        here = self._end - self._start - frames.HEAD_SIZE
        return here >= 0 and frames.read_head(self._buffer, self._start)[0] <= here

    def _data(self, length: int, flags: int, number: int) -> None:
        size, padding = length, 0
        if flags & frames.PADDED:
            # An empty frame lacks even the byte with the number. With 1 in its place, the check refuses it.
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
            # A stream that was reset here may still receive frames that the other end had already sent.
            # Their bytes must be read, and subtracted from the connection's window. Otherwise the next
            # frame would begin at the wrong byte.
            self.pass_over(size)
        else:
            try:
                stream.take(size, self)
            except DamagedMessage as error:
                # Handled last: the frame still counts against the windows, and `on_damage` must know whether
                # it ends the stream.
                damage = error
                self.pass_over(error.unread)
        if padding:
            self.pass_over(padding)
        self.took(length)  # padding counts too (RFC 9113, section 6.1)
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
        # A content-length that does not match its DATA frames is malformed (RFC 9113, section 8.1.1).
        if stream.remaining and (stream.ended or stream.remaining < 0):
            raise StreamError(ErrorCode.PROTOCOL_ERROR, "the content-length is another")
        if damage is not None:
            self.on_damage(stream, damage)
        elif stream.ended:
            self.on_end(stream)

    def took(self, length: int) -> None:
        """Note that bytes of DATA frames were read. Enlarges the connection's window after each GiB."""
        self.received += length
        if self.received >= RENEW:
            self.send([frames.window_update(0, self.received)])
            self.received = 0

    def is_idle(self, number: int) -> bool:
        """Return whether a stream was never open. Clients open streams with odd, increasing numbers."""
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
            length, kind, fragment_flags, same = frames.read_head(self.read_bytes(frames.HEAD_SIZE))
            if self.is_limited:
                self.limit(length, True)
            fragments += 1
            if kind != frames.CONTINUATION or same != number:
                raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, "headers go on in the wrong way")
            # Header blocks have no window, so both their length and the number of their frames need a
            # limit.
            if len(payload) + length > MAX_HEADERS or fragments > _MOST_FRAGMENTS:
                raise ProtocolViolation(
                    ErrorCode.ENHANCE_YOUR_CALM, "headers have too many bytes or too many frames"
                )
            payload += self.read_bytes(length)
            flags |= fragment_flags & frames.END_HEADERS
        self.on_headers(number, payload, bool(flags & frames.END_STREAM))

    def _check_priority(self, number: int, payload: bytes) -> None:
        # Only checked: priorities are deprecated (RFC 9113, section 5.3), and calls are served as they come.
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
                elif key == frames.HEADER_TABLE_SIZE:  # this end uses no table: it says so once
                    self._table_update = NO_TABLE
            # Acknowledge before any DATA: from the acknowledgement on, the other end expects its new windows.
            self.send([frames.frame(frames.SETTINGS, frames.ACK, 0, b"")])
            self._send_rest()

    def _resize_windows(self, window: int) -> None:
        # A new INITIAL_WINDOW changes the windows of open streams by the difference, possibly below 0.
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
        increment = int.from_bytes(payload, "big") & frames.LARGEST_WINDOW
        with self.sending:
            stream = self.streams.get(number)
            if not number:
                if not increment:
                    raise ProtocolViolation(
                        ErrorCode.PROTOCOL_ERROR, "a window is opened by nothing"
                    )
                self.window += increment
                self._check_window(self.window)
            elif stream is not None:
                if not increment:
                    raise StreamError(ErrorCode.PROTOCOL_ERROR, "a window is opened by nothing")
                stream.window += increment
                if stream.window > frames.LARGEST_WINDOW:
                    raise StreamError(ErrorCode.FLOW_CONTROL_ERROR, "a window is opened too far")
            self._send_rest()

    def newest(self) -> int:
        """Return the highest stream number that was ever opened."""
        raise NotImplementedError

    def on_headers(self, number: int, block: bytes, ends: bool) -> None:
        """Handle a complete header block of a stream.

        Args:
            number: Number of the stream.
            block: Encoded headers.
            ends: True if the block is the last that the other end sends on the stream.
        """
        raise NotImplementedError

    def limit(self, length: int, is_decoded: bool) -> None:
        """Wait before a frame is read if the other end sends too many. Called only if `is_limited`.

        `is_decoded`: True for headers and settings, whose bytes cost much more processor time than others.
        """

    def is_late(self, number: int, ends: bool) -> bool:
        """Return whether a frame may arrive on a closed stream, because the sender does not know yet.

        `ends`: True if the frame ends the stream, so that no further frame is allowed.
        """
        raise NotImplementedError

    def on_stream_error(self, number: int, error: StreamError, ends: bool) -> None:
        """Handle a violation of the protocol in one stream.

        `ends`: True if the other end has ended the stream with the frame.
        """
        raise NotImplementedError

    def on_damage(self, stream: S, damage: DamagedMessage) -> None:
        """Handle a message that cannot be read. Its unread bytes have already been skipped."""
        raise NotImplementedError

    def on_goaway(self, newest: int) -> None:
        """Handle a GOAWAY frame: the other end serves no streams after `newest`."""
        raise NotImplementedError

    def on_end(self, stream: S) -> None:
        """Handle the end of a stream: the other end sends nothing more on it."""
        raise NotImplementedError

    def on_reset(self, stream: S) -> None:
        """Handle a stream that the other end has cancelled. The stream has already been dropped."""
        raise NotImplementedError

    def drop(self, stream: StreamState) -> None:
        """Close a stream, so that this end sends nothing more on it."""
        with self.sending:
            stream.closed = True
            self.streams.pop(stream.number, None)

    def send(self, parts: list[Part]) -> None:
        """Send whole frames.

        The reading thread may call too. On a server that never stops it from reading, because a server's
        transport (`DeferredSending`) does not wait. A client's connection carries one call, in one thread.
        """
        with self.sending:
            self.transport.send(parts)

    def say_goodbye(self, newest: int, code: ErrorCode, details: str) -> None:
        """Send a GOAWAY frame before the connection ends. Skips it if another thread is sending for long."""
        # Not before the settings, which must be the first frame (RFC 9113, section 3.4). `send_some`, because
        # the other end may be gone or read nothing. For the same reason a second is enough to wait: the
        # connection ends in any case.
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
        """Send headers, a message and trailers. Parts beyond the flow-control windows are queued.

        Args:
            stream: The call. Nothing is sent if it is closed.
            block: Encoded headers.
            message: The message. Its bytes must not change until they are sent.
            trailers: Header block that ends the stream. If it is empty, the message ends the stream.
        """
        with self.sending:
            if stream.closed:
                return
            number, length = stream.number, len(message)
            whole = PREFIX + length
            # Usually everything fits into one frame and one write. The stream is closed before the write,
            # so that no other thread sends on it after its end. Without trailers this is a client's request:
            # its stream stays, because the reply is still to come.
            if self.takes(whole, stream.window):
                stream.window -= whole
                if trailers:
                    stream.closed = True
                    self.streams.pop(number, None)
                self.send_at_once(number, block, message, trailers)
                return
            # Two parts, because joining them would copy the message.
            self.send_apart(stream, block, [b"\0" + length.to_bytes(4, "big"), message], trailers)

    def takes(self, whole: int, window: int) -> bool:
        """Return whether a message of `whole` bytes can be sent now in one frame. The caller holds `sending`.

        False if messages are queued, which it must not overtake. Also False if an update of HPACK's table is
        pending, which only `send_headers` can send.
        """
        sendable_bytes = min(window, self.window, self._largest_frame)
        return whole <= sendable_bytes and not self._unsent and not self._table_update

    def send_at_once(self, number: int, block: bytes, message: bytes, trailers: bytes) -> None:
        """Send headers, message and trailers at once, after `takes` returned True.

        The caller holds `sending`.
        """
        self.window -= PREFIX + len(message)
        opening, closing = around_message(number, len(message), block, trailers)
        self.transport.send([opening, message, closing] if trailers else [opening, message])

    def send_headers(self, number: int, block: bytes, flags: int) -> None:
        """Send a HEADERS frame. The caller holds `sending`."""
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
        """Send the headers, and queue contents beyond the flow-control windows. The caller holds `sending`.

        Args:
            stream: The call.
            block: Encoded headers, or empty to send none.
            contents: Parts of the message.
            trailers: Header block that ends the stream, or empty.
            ends: True if the last part ends the stream when there are no trailers.
        """
        if block:
            self.send_headers(stream.number, block, frames.END_HEADERS)
        *first, last = contents
        self._unsent += [_Unsent(stream, memoryview(content), b"", False) for content in first]
        self._unsent.append(_Unsent(stream, memoryview(last), trailers, ends and not trailers))
        self._send_rest()

    def took_replies(self, stream: StreamState) -> bool:
        """Return whether everything that was to be sent on a stream has been handed to the transport."""
        with self.sending:
            return all(unsent.stream is not stream for unsent in self._unsent)

    def _send_rest(self) -> None:
        """Send as much of the queue as the flow-control windows accept. The caller holds `sending`."""
        waiting: deque[_Unsent] = deque()
        # A stream whose window is full does not delay other streams, but its own parts stay in order.
        full: set[int] = set()
        while self._unsent:
            unsent = self._unsent.popleft()
            if unsent.stream.closed:
                continue
            if unsent.stream.number in full or not self._send_some(unsent):
                full.add(unsent.stream.number)
                waiting.append(unsent)
        self._unsent = waiting

    def _send_some(self, unsent: _Unsent) -> bool:
        """Send as much of one queued part as possible. Returns True if nothing of it is left."""
        parts: list[Part] = []
        number = unsent.stream.number
        while (
            len(unsent.rest)
            and (sendable_bytes := min(self.window, unsent.stream.window, self._largest_frame)) > 0
        ):
            part, unsent.rest = unsent.rest[:sendable_bytes], unsent.rest[sendable_bytes:]
            self.window -= len(part)
            unsent.stream.window -= len(part)
            # END_STREAM only on the last frame, and only if no trailers follow: they end the stream then.
            flags = frames.END_STREAM if unsent.end and not len(unsent.rest) else 0
            parts += [frames.head(len(part), frames.DATA, flags, number), part]
        whole = not len(unsent.rest)
        if whole and unsent.end and not parts:  # an empty message
            parts.append(frames.head(0, frames.DATA, frames.END_STREAM, number))
        if whole and unsent.trailers:
            parts.append(frames.trailing(number, unsent.trailers))
            self.drop(unsent.stream)  # before the write, as in `send_message`
        if parts:
            self.transport.send(parts)
        return whole
