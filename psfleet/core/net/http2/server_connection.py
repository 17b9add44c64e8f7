"""Server's end of an HTTP/2 connection: reads calls, checks them, runs their handlers and sends replies.

One thread per connection runs `run`. Handlers may reply from any thread. The checks of a call are ordered by
cost: framing and headers, number of open calls, token, method and timeout. Its message is read only if
it passes. Encoded headers that have passed the checks are remembered, so the same client's next call skips
them.

A small call of a psfleet client takes an even shorter path (`_take_plain`). It usually arrives in one read,
with known headers, and is recognized by comparing two frame heads. A call that differs in any way is read
frame by frame, with the same result. docs/decisions/0015-small-calls.md has the measurements.
"""

import select
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from typing_extensions import override

from psfleet.core.base.errors import LimitExceeded
from psfleet.core.net.http2 import frames
from psfleet.core.net.http2.calls import (
    Behavior,
    InboundMessages,
    IncomingCall,
    RateLimit,
    Streaming,
)
from psfleet.core.net.http2.flow_control import PREFIX, RENEW
from psfleet.core.net.http2.frames import DamagedMessage, ErrorCode, ProtocolViolation, StreamError
from psfleet.core.net.http2.header_blocks import (
    OK_HEADERS,
    OK_TRAILERS,
    REQUEST,
    TEXT_HEADERS,
    TEXT_TRAILERS,
    check_request,
    failure_trailers,
    has_pseudo,
    seconds_of,
    split_timeout,
)
from psfleet.core.net.http2.http2_connection import Http2Connection
from psfleet.core.net.http2.socket_transport import Transport

_UNAUTHENTICATED, _UNIMPLEMENTED, _EXHAUSTED = 16, 12, 8  # statuses of gRPC
_INVALID, _UNKNOWN = 3, 2
# Longest call that is compared as a whole. For a longer one, the second pass over the bytes costs too much.
_LONGEST_PLAIN = 4 << 10
_SHORTEST_PLAIN = frames.HEAD_SIZE + frames.MESSAGE_HEAD_SIZE
_MOST_KNOWN = 16  # header blocks that a connection remembers
_TICK = 0.5  # longest wait in seconds
_MOST_LATE = 1024  # streams remembered for frames that are still on their way
_PENALTY = 48 << 16  # bytes that a violation of the protocol is charged as: 48 units of 64 KiB
_NO_GRPC = b"This port answers calls of gRPC alone: POST with content-type application/grpc.\n"


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server.

    Attributes:
        message: Longest message in bytes.
        connections: Largest number of open connections. A further connection is closed at once.
        handshakes: Largest number of connections of one address that have made no permitted call yet. If
            there are more, some are closed.
        streams: Largest number of open calls on one connection.
        incoming: Largest number of calls of one connection whose message is partly received.
        handshake: Seconds within which a new connection must make a permitted call.
        refuse: Called with a call's path and `authorization` header. Returns the reason to refuse the call,
            or "" to permit it.
        at_once: Functions by path that reply to simple calls directly. A function returns None to leave the
            call to the method's handler.
    """

    message: int
    connections: int
    handshakes: int
    streams: int
    incoming: int
    handshake: float
    refuse: Callable[[str, str], str] = lambda path, authorization: ""
    at_once: Mapping[str, Callable[[bytes], bytes | None]] = field(default_factory=dict)


class ServerConnection(Http2Connection[IncomingCall]):
    """Server's end of a connection.

    Args:
        transport: Transport of the connection.
        since: Time at which the connection was accepted (time.monotonic).
        behaviors: Handlers by path.
        settings: Settings of the server.
        messages: Limit on partly received messages.

    Attributes:
        is_authenticated: True once the client has made a permitted call.
        later: Functions that the connection's thread calls once its buffer has no further whole frame.
    """

    def __init__(
        self,
        transport: Transport,
        since: float,
        behaviors: Mapping[str, Behavior | Streaming],
        settings: ServerSettings,
        messages: InboundMessages,
    ) -> None:
        super().__init__(transport, settings.message, settings.streams, REQUEST)
        self.is_authenticated = False
        self.is_limited = True
        self._rate = RateLimit(since)
        self._behaviors = behaviors
        self._limits = settings
        self._newest = 0
        self._messages = messages
        self._late: dict[
            int, None
        ] = {}  # streams that this end closed and the client has not ended, oldest first
        # Keys are encoded headers without timeouts, of calls that passed all checks.
        self._known: dict[bytes, Behavior] = {}
        self._at_once: dict[bytes, Callable[[bytes], bytes | None]] = {}
        self._is_answering = False
        self.later: list[Callable[[], None]] = []

    def run(self) -> None:
        """Serve calls until the connection ends, then raise ConnectionBroken."""
        try:
            self.send([self.greeting()])
            self.has_greeted = True
            if self.read_bytes(len(frames.PREFACE)) != frames.PREFACE:
                raise ProtocolViolation(
                    ErrorCode.PROTOCOL_ERROR, "the other end does not speak HTTP/2"
                )
            while True:
                # When no further call has arrived, so that one batch serves all calls that have.
                if self.later and not self.has_frame:
                    self._do_later()
                if self.streams or not self._take_plain():
                    self.read()
        except ProtocolViolation as error:
            self.say_goodbye(self._newest, error.code, str(error))
            if self.is_limited:  # otherwise it would be cheaper to break a rule and reconnect
                self.limit(_PENALTY, False)
            raise
        finally:
            self._lose_all()
            self._do_later()

    def _do_later(self) -> None:
        later, self.later = self.later, []
        for function in later:
            function()

    def _lose_all(self) -> None:
        # All calls are dropped first, so that nothing that a callback leads to is sent on the connection.
        calls = [*self.streams.values()]
        for call in calls:
            self.drop(call)
        for call in calls:
            self.on_reset(call)

    def _take_plain(self) -> bool:
        """Serve a small call that our client has sent in one piece with known headers.

        Otherwise return False.

        If it returns False, nothing has been read from the buffer. If it returns True, the effect is that
        of reading the call frame by frame. `run` tries this only when no other call is open on the
        connection, so the limits on calls need no check.
        """
        part = self.arrived(_LONGEST_PLAIN)
        if len(part) < _SHORTEST_PLAIN:
            return False
        high, size, kind, flags, number = frames.unpack_head(part)
        start = frames.HEAD_SIZE + (high << 8 | size)
        if kind != frames.HEADERS or flags != frames.END_HEADERS:
            return False
        block, timeout = split_timeout(part[frames.HEAD_SIZE : start])
        behavior = self._known.get(block)
        body = start + frames.MESSAGE_HEAD_SIZE
        length = len(part) - body
        if behavior is None or not timeout or not 0 <= length <= self.most:
            return False
        whole = PREFIX + length
        head = frames.pack_message_head(
            whole >> 8, whole & 0xFF, frames.DATA, frames.END_STREAM, number, 0, length
        )
        if part[start:body] != head:
            return False

        # A wrong stream number is an error of the protocol, which reading frame by frame reports.
        if not number % 2 or not self._newest < number <= frames.LARGEST_WINDOW:
            return False
        # Nothing was changed up to here. From here on the call is removed from the buffer and gets a reply.
        self._start += len(part)
        self.received += whole
        if self.received >= RENEW:
            self.took(0)  # the bytes are counted already; this only enlarges the window
        self._newest = number
        message, reply_to = part[body:], self._at_once.get(block)
        reply = None
        if reply_to is not None:
            # The call is not among `streams` yet, and `Http2Server.stop` must wait for it.
            self._is_answering = True
            try:
                reply = reply_to(message)
            except Exception as error:
                self._open_whole(number, behavior).fail(error)
                return True
            if reply is not None and self._send_whole(number, reply):
                self._is_answering = False
                return True
        call = self._open_whole(number, behavior)
        if reply is not None:  # the windows do not accept it yet: queue it as any reply
            call.end(reply)
            return True
        call.deadline = time.monotonic() + int(timeout[:-1]) * 1e-3
        call.run_handler(behavior, message)
        return True

    def _open_whole(self, number: int, behavior: Behavior) -> IncomingCall:
        """Register a new call whose request has arrived in one piece."""
        call = self._open(number)
        self._is_answering = False
        call.behavior, call.ended = behavior, True
        return call

    def _send_whole(self, number: int, reply: bytes) -> bool:
        """Send a reply if the flow-control windows accept all of it now. Returns False if they do not."""
        with self.sending:
            takes = self.takes(PREFIX + len(reply), self.stream_window)
            if takes:
                self.send_at_once(number, OK_HEADERS, reply, OK_TRAILERS)
            return takes

    @override
    def newest(self) -> int:
        return self._newest

    @property
    def is_busy(self) -> bool:
        """True if a call waits for its reply. Ignores streaming calls, which may stay open forever."""
        return self._is_answering or any(
            not isinstance(call.behavior, Streaming) for call in [*self.streams.values()]
        )

    def limit(self, length: int, is_decoded: bool) -> None:
        """Wait as long as the rate limit requires, but return if the client disconnects.

        In effect until the first permitted call, so that an unknown client cannot keep the processor busy.
        """
        until = time.monotonic() + self._rate.take(length, is_decoded, time.monotonic())
        hung_up = select.poll()
        # No event is requested: poll then reports only a hang-up or an error.
        hung_up.register(self.transport.fileno(), 0)
        while (remaining_seconds := until - time.monotonic()) > 0:
            if hung_up.poll(min(remaining_seconds, _TICK) * 1000):
                return

    def on_headers(self, number: int, block: bytes, ends: bool) -> None:
        """Begin a call. If the headers are trailers, end the request of their call instead."""
        if not number % 2:
            raise ProtocolViolation(ErrorCode.PROTOCOL_ERROR, f"a call comes on stream {number}")
        # Client stream numbers only increase, so this stream was opened before: the headers are trailers.
        if number <= self._newest:
            self._trailers(number, block, ends)
            return
        self._newest = number
        prefix, timeout = split_timeout(block)
        behavior = self._known.get(prefix)
        if behavior is None or not timeout or len(self.streams) >= self._limits.streams:
            self._check_call(number, block, ends)
        else:  # the same headers have passed the checks before
            call = self._open(number)
            call.ended, call.at_once = ends, self._at_once.get(prefix)
            self._take_call(call, behavior, int(timeout[:-1]) * 1e-3)

    def _open(self, number: int) -> IncomingCall:
        """Register a new call."""
        call = self.streams[number] = IncomingCall(number, self.stream_window, self.most)
        call.connection = self
        return call

    def _check_call(self, number: int, block: bytes, ends: bool) -> None:
        """Accept or refuse a new call after checking its headers."""
        headers, timeout = self.headers.read(block)
        length = check_request(headers)
        if ends and length:
            raise StreamError(ErrorCode.PROTOCOL_ERROR, "the content-length is another")
        if len(self.streams) >= self._limits.streams:
            raise StreamError(ErrorCode.REFUSED_STREAM, "too many calls are open")
        call = self._open(number)
        call.remaining, call.ended = length, ends
        if not _is_grpc(headers):
            call.unwanted = True
            if ends:
                self._reply_plainly(call)
            return
        refusal = self._refusal(headers, timeout)
        if refusal:
            call.refuse(*refusal)
            return
        self.is_authenticated, self.is_limited = True, False
        behavior = self._behaviors[headers[":path"]]
        if (
            # Only headers without content-length are remembered, since it differs from call to call.
            length is None
            and not isinstance(behavior, Streaming)
            and len(self._known) < _MOST_KNOWN
            and self.headers.knows(block)
        ):
            prefix, path = split_timeout(block)[0], headers[":path"]
            self._known[prefix] = behavior
            if path in self._limits.at_once:
                self._at_once[prefix] = self._limits.at_once[path]
        self._take_call(call, behavior, seconds_of(timeout))

    def _take_call(
        self, call: IncomingCall, behavior: Behavior | Streaming, seconds: float | None
    ) -> None:
        call.deadline = None if seconds is None else time.monotonic() + seconds
        try:
            self._messages.enter(self, call)
        except LimitExceeded as error:
            call.refuse(_EXHAUSTED, str(error))
            return
        call.behavior = behavior
        if call.ended:
            self.on_end(call)

    def _trailers(self, number: int, block: bytes, ends: bool) -> None:
        headers, _ = self.headers.read(block)
        stream = self.streams.get(number)
        if stream is None:
            if not self.is_late(number, ends):
                raise ProtocolViolation(
                    ErrorCode.STREAM_CLOSED,
                    f"a call comes on stream {number}, which was open before",
                )
            return
        if stream.ended:
            raise StreamError(ErrorCode.STREAM_CLOSED, "headers come after the end")
        if not ends or has_pseudo(headers) or stream.remaining:
            raise StreamError(ErrorCode.PROTOCOL_ERROR, "these are no trailers")
        stream.ended = True
        self.on_end(stream)

    def _refusal(self, headers: dict[str, str], timeout: str) -> tuple[int, str] | None:
        """Return the status code and text for refusing a call, or None to accept the call."""
        path = headers[":path"]
        # The token is checked first, so that a stranger cannot find out which methods exist.
        if refusal := self._limits.refuse(path, headers.get("authorization", "")):
            return _UNAUTHENTICATED, refusal
        if path not in self._behaviors:
            return _UNIMPLEMENTED, f"method {path!r} is not answered here"
        try:
            seconds_of(timeout)
        except ValueError as error:
            return _INVALID, str(error)
        return None

    @override
    def is_late(self, number: int, ends: bool) -> bool:
        was_ended = number in self._late
        if ends:
            self._late.pop(number, None)
        return was_ended

    @override
    def on_end(self, stream: IncomingCall) -> None:
        if stream.unwanted:
            self._reply_plainly(stream)
        if stream.behavior is None or not self._messages.leave(self, stream):
            return
        if isinstance(stream.behavior, Streaming):
            stream.run_handler(stream.behavior.end)
            return
        if not stream.is_whole:
            stream.refuse(_INVALID, "the call ended without its message")
            return
        message, stream.content = stream.content, b""
        try:
            reply = None if stream.at_once is None else stream.at_once(message)
        except Exception as error:
            stream.fail(error)
            return
        if reply is None:
            stream.run_handler(stream.behavior, message)
        else:
            stream.end(reply)

    @override
    def on_damage(self, stream: IncomingCall, damage: DamagedMessage) -> None:
        self._messages.leave(self, stream)
        stream.refuse(damage.status, damage.details)

    def on_stream_error(self, number: int, error: StreamError, ends: bool) -> None:
        """Cancel the stream in which the client has violated the protocol."""
        stream = self.streams.get(number)
        if stream is not None:
            self.drop(stream)
            self.on_reset(stream)
            ends = ends or stream.ended
        if not ends:
            self._expect_late(number)
        self.send([frames.reset(number, error.code)])

    def _expect_late(self, number: int) -> None:
        """Remember a closed stream, because the client may send on it until it learns that it is closed."""
        # A dict is used as an ordered set: its first key is the oldest.
        self._late[number] = None
        if len(self._late) > _MOST_LATE:
            del self._late[next(iter(self._late))]

    def on_goaway(self, newest: int) -> None:
        """Do nothing: the client closes the connection once it has its replies."""

    @override
    def on_reset(self, stream: IncomingCall) -> None:
        self._messages.leave(self, stream)
        stream.lose()

    def _reply_plainly(self, stream: IncomingCall) -> None:
        """Reply in plain text to a client that does not speak gRPC, to explain what this port is for."""
        with self.sending:
            if not stream.closed:
                self.send_apart(stream, TEXT_HEADERS, [_NO_GRPC], TEXT_TRAILERS)

    def fail(self, call: IncomingCall) -> None:
        """End a call with its error status and text."""
        block = failure_trailers(call.code or _UNKNOWN, call.details, call.metadata)
        if call.has_opened:
            block = block.removeprefix(OK_HEADERS)
        with self.sending:
            if call.closed:
                return
            self.drop(call)
            self.send_headers(call.number, block, frames.END_HEADERS | frames.END_STREAM)
            if not call.ended:  # ask the client to stop sending the message
                self._expect_late(call.number)
                self.transport.send([frames.reset(call.number, ErrorCode.NO_ERROR)])


def _is_grpc(headers: dict[str, str]) -> bool:
    return headers[":method"] == "POST" and headers.get("content-type", "").startswith(
        "application/grpc"
    )
