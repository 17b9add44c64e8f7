"""A call that a server has taken: its messages, and its answer."""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from typing_extensions import override

from psfleet.http2.call_errors import ConnectionBroken, DamagedMessage
from psfleet.http2.header_blocks import OK_HEADERS, OK_TRAILERS
from psfleet.http2.stream_state import ByteSource, StreamState

if TYPE_CHECKING:
    from psfleet.http2.server_connection import ServerConnection

_EXHAUSTED = 8  # status of gRPC
_LONG = 86_400.0  # seconds that a call without a timeout may take


class IncomingCall(StreamState):
    """A call that waits for its answer. Any thread may answer, once.

    It has the methods of grpc.ServicerContext that handlers use.

    Attributes:
        connection: The connection over which it comes.
        behavior: Takes the request; None: the call is not taken.
        deadline: Time at which the client gives it up; None: never.
        code, details, metadata: Status of gRPC at its end, text for a person, headers after the answer.
        has_opened: True if a part of the answer was sent, of a method with streams.
    """

    connection: "ServerConnection"
    behavior: "Behavior | Streaming | None" = None
    deadline: float | None = None
    code = 0
    details = ""
    metadata: Mapping[str, str] = MappingProxyType({})
    has_opened = False
    _lost: tuple[Callable[[], None], ...] = ()

    def time_remaining(self) -> float:
        """Return the seconds until the deadline."""
        return _LONG if self.deadline is None else self.deadline - time.monotonic()

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Call back when the call is lost; False: it is over."""
        with self.connection.sending:
            if self.closed:
                return False
            self._lost = (*self._lost, callback)
            return True

    def set_code(self, code: "int | object") -> None:
        """Set the status: a number, or a grpc.StatusCode."""
        self.code = code if isinstance(code, int) else code.value[0]  # type: ignore[attr-defined]

    def set_details(self, details: str) -> None:
        """Set the status text for a person."""
        self.details = details

    def set_trailing_metadata(self, trailing_metadata: tuple[tuple[str, str], ...]) -> None:
        """Set the headers after the answer."""
        self.metadata = dict(trailing_metadata)

    @override
    def take(self, size: int, source: ByteSource) -> None:
        if not isinstance(self.behavior, Streaming):
            super().take(size, source)
            return
        while size:
            part = min(size, self.missing)
            super().take(part, source)
            size -= part
            if self.is_whole:
                message = self.content
                self.begin_next()
                if not self.connection.took_replies(self):
                    raise DamagedMessage(_EXHAUSTED, "answers wait that are not read", size)
                self.behavior.take(message, self)

    def write(self, message: bytes) -> None:
        """Send one message of an answer of several."""
        self._send_part([b"\0" + len(message).to_bytes(4, "big"), message], b"")

    def close(self) -> None:
        """End an answer of several messages."""
        self._send_part([b""], OK_TRAILERS)

    def _send_part(self, contents: list[bytes], trailers: bytes) -> None:
        with contextlib.suppress(ConnectionBroken), self.connection.sending:
            if not self.closed:
                block = b"" if self.has_opened else OK_HEADERS
                self.has_opened = True
                self.connection.send_apart(self, block, contents, trailers, ends=False)

    def end(self, message: bytes | None) -> None:
        """End the call with a message, or with its status. A broken connection is its reader's matter."""
        self._lost = ()
        with contextlib.suppress(ConnectionBroken):
            if self.code or message is None:
                self.connection.fail(self)
            else:
                self.connection.send_message(self, OK_HEADERS, message, OK_TRAILERS)

    def refuse(self, code: int, details: str) -> None:
        """End the call with this status."""
        self.code, self.details = code, details
        self.end(None)

    def cancel(self) -> None:
        """End the call, whose message has not come, in favor of another one."""
        self.refuse(_EXHAUSTED, "too many messages are on their way to this server")

    def lose(self) -> None:
        """Call back: the client is gone."""
        with self.connection.sending:
            callbacks, self._lost = self._lost, ()
        for callback in callbacks:
            callback()


Behavior = Callable[[bytes, IncomingCall], None]
"""Takes a request and answers the call now or later. It does not raise."""


@dataclass(frozen=True)
class Streaming:
    """A method whose requests or answers are several messages.

    Attributes:
        take: Takes each message as it comes.
        end: The client sends no more.
    """

    take: Behavior
    end: Callable[[IncomingCall], None]
