"""Flow control of an HTTP/2 connection: how many bytes each end may send, and messages that have to wait.

A window is the number of bytes of DATA frames that a receiver still accepts. There is one for the connection
and one for each stream (RFC 9113, section 5.2). A message that does not fit is queued. The reading thread
sends it when a WINDOW_UPDATE or SETTINGS frame has enlarged the windows, so no sender waits.

This package announces the largest window possible and enlarges it again after each GiB, so flow control
practically never slows down a peer. Memory is limited by the length of messages and the number of calls
instead (see calls.py).
"""

import threading
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from psfleet.core.net.http2 import frames
from psfleet.core.net.http2.calls import StreamState
from psfleet.core.net.http2.frames import ErrorCode, ProtocolViolation, StreamError, around_message
from psfleet.core.net.http2.socket_transport import BufferedReader, Part, Transport

# Bytes received after which this end enlarges a window again: half of the largest window.
RENEW = 1 << 30
PREFIX = 5  # bytes before each gRPC message: 1 if it is compressed, and its length as u32
DEFAULT_WINDOW = 65_535  # until SETTINGS or WINDOW_UPDATE change it (RFC 9113, section 6.9.2)

S = TypeVar("S", bound=StreamState)


@dataclass(slots=True)
class _Unsent:
    """The part of a message that the other end's windows do not accept yet.

    Attributes:
        stream: Call that the message belongs to.
        remaining: Bytes that have not been sent.
        trailers: Header block to send after the bytes, or empty.
        end: True if the last DATA frame ends the stream.
    """

    stream: StreamState
    remaining: memoryview
    trailers: bytes
    end: bool


class FlowControl(BufferedReader, Generic[S]):
    """Sending on a connection within the other end's windows. Any thread may send, under the lock `sending`.

    Args:
        transport: Transport of the connection.

    Attributes:
        sending: Lock that a thread holds while it sends frames or changes windows.
        streams: Open calls by stream number.
        window: Bytes that the other end accepts now, on all streams together.
        stream_window: Bytes that the other end accepts on a new stream.
        received: Bytes of DATA frames since this end last enlarged the connection's window.
    """

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        # Reentrant, because code that holds it calls methods that take it, such as `send` and `drop`.
        self.sending = threading.RLock()
        self.streams: dict[int, S] = {}
        self.window = DEFAULT_WINDOW
        self.stream_window = DEFAULT_WINDOW
        self.received = 0
        self._largest_frame = frames.SMALLEST_FRAME
        # Prefix for the next header block, which changes the size of HPACK's table. Empty once it is sent.
        self._table_update = b""
        self._unsent: deque[_Unsent] = deque()

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
            len(unsent.remaining)
            and (sendable_bytes := min(self.window, unsent.stream.window, self._largest_frame)) > 0
        ):
            part, unsent.remaining = (
                unsent.remaining[:sendable_bytes],
                unsent.remaining[sendable_bytes:],
            )
            self.window -= len(part)
            unsent.stream.window -= len(part)
            # END_STREAM only on the last frame, and only if no trailers follow: they end the stream then.
            flags = frames.END_STREAM if unsent.end and not len(unsent.remaining) else 0
            parts += [frames.head(len(part), frames.DATA, flags, number), part]
        whole = not len(unsent.remaining)
        if whole and unsent.end and not parts:  # an empty message
            parts.append(frames.head(0, frames.DATA, frames.END_STREAM, number))
        if whole and unsent.trailers:
            parts.append(frames.trailing(number, unsent.trailers))
            self.drop(unsent.stream)  # before the write, as in `send_message`
        if parts:
            self.transport.send(parts)
        return whole

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

    def took(self, length: int) -> None:
        """Note that bytes of DATA frames were read. Enlarges the connection's window after each GiB."""
        self.received += length
        if self.received >= RENEW:
            self.send([frames.window_update(0, self.received)])
            self.received = 0
