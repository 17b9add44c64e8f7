"""Errors of calls and connections."""

from enum import IntEnum


class ErrorCode(IntEnum):
    """Reason for which a stream or a connection ends (RFC 9113, section 7)."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    FLOW_CONTROL_ERROR = 0x3
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    COMPRESSION_ERROR = 0x9
    ENHANCE_YOUR_CALM = 0xB


class ConnectionBroken(Exception):
    """The connection is lost, or the other end does not keep to the protocol."""


class CodedError(Exception):
    """The other end does not keep to the protocol.

    Attributes:
        code: Error code that the other end gets.
    """

    def __init__(self, code: ErrorCode, details: str) -> None:
        super().__init__(details)
        self.code = code


class ProtocolViolation(CodedError, ConnectionBroken):
    """The other end does not keep to the protocol, which ends the connection."""


class StreamError(CodedError):
    """The other end does not keep to the protocol in one call, which ends that call."""


class DamagedMessage(Exception):
    """Message of a call that cannot be read.

    Attributes:
        status: Status of gRPC, with which the call ends.
        details: For a person.
        unread: Bytes of the frame that are not read yet.
    """

    def __init__(self, status: int, details: str, unread: int) -> None:
        super().__init__(details)
        self.status = status
        self.details = details
        self.unread = unread


class DeadlinePassed(Exception):
    """The call was not answered in time."""


class CallFailed(Exception):
    """The other end has answered with a status.

    Attributes:
        code: Status code of gRPC, as a number.
        details: For a person.
        metadata: Trailing headers, lower case.
    """

    def __init__(self, code: int, details: str, metadata: dict[str, str]) -> None:
        super().__init__(f"status {code}: {details}")
        self.code = code
        self.details = details
        self.metadata = metadata
