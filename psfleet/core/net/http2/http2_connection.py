"""Common part of both ends of an HTTP/2 connection: reading frames and checking them.

One thread reads (`read`) and calls the `on_...` methods that each end defines. flow_control.py sends
messages, also from other threads.
"""

from psfleet.core.net.http2 import frames
from psfleet.core.net.http2.flow_control import DEFAULT_WINDOW, RENEW, FlowControl, S
from psfleet.core.net.http2.frames import (
    ConnectionBroken,
    DamagedMessage,
    ErrorCode,
    ProtocolViolation,
    StreamError,
)
from psfleet.core.net.http2.header_blocks import MAX_HEADERS, NO_TABLE, HeaderReader
from psfleet.core.net.http2.socket_transport import BUFFER, Transport

# `read_bytes` returns a whole control frame, or the headers in one frame, which the buffer must hold.
assert max(frames.LONGEST_CONTROL, MAX_HEADERS) <= BUFFER
# CONTINUATION frames of one header block. A block of MAX_HEADERS bytes fits into a single frame even of the
# smallest MAX_FRAME_SIZE, so a correct client hardly needs any.
_MOST_FRAGMENTS = 64


class Http2Connection(FlowControl[S]):
    """Common base of both ends of a connection. S is the class of its calls.

    Args:
        transport: Transport of the connection.
        most: Longest message accepted from the other end, in bytes.
        streams: Number of calls that the other end may have open at once.
        pseudo: Pseudo-headers that the other end may send.

    Attributes:
        headers: Decoder of the other end's header blocks.
        is_limited: True if `limit` is called before each frame is read.
        has_greeted: True once this end has sent its settings.
    """

    def __init__(
        self, transport: Transport, most: int, streams: int, pseudo: frozenset[str]
    ) -> None:
        super().__init__(transport)
        self.most = most
        self.headers = HeaderReader(pseudo)
        self.is_limited = self.has_greeted = False
        self._streams = streams

    def greeting(self) -> bytes:
        """Return the first frames that this end sends: its settings, and the largest possible window."""
        # Without ENABLE_PUSH, which only a client sends: psfleet's servers never push, and `check_frame` ends
        # the connection to a server that does.
        settings = {
            frames.MAX_CONCURRENT_STREAMS: self._streams,
            frames.INITIAL_WINDOW: frames.LARGEST_WINDOW,
            frames.MAX_FRAME_SIZE: frames.LARGEST_TAKEN,
            frames.MAX_HEADER_LIST_SIZE: MAX_HEADERS,
        }
        extra_window = frames.LARGEST_WINDOW - DEFAULT_WINDOW
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
            # `send` takes `sending` again, which is reentrant.
            self.send([frames.frame(frames.SETTINGS, frames.ACK, 0, b"")])
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
