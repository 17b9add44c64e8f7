"""Between psfleet's errors and gRPC's statuses: the one place where they are mapped.

The status code tells any client the kind of error. The name of the class travels in the trailing
metadata `psfleet-error`, so that a psfleet client raises the class that the server raised.
"""

from typing import Protocol

import grpc

from psfleet import errors
from psfleet.errors import (
    AccessDenied,
    DeadlineExceeded,
    LimitExceeded,
    ProtocolError,
    PsfleetError,
    ServerUnavailable,
)

KEY = "psfleet-error"
_LONGEST = 2000  # characters: HTTP/2 peers cap all headers of a call at 8 KiB

_Code = grpc.StatusCode
CODES: dict[type[PsfleetError], grpc.StatusCode] = {
    errors.PsfleetError: _Code.INTERNAL,
    errors.UsageError: _Code.INVALID_ARGUMENT,
    errors.ShapeError: _Code.INVALID_ARGUMENT,
    errors.IdError: _Code.INVALID_ARGUMENT,
    errors.UnknownTable: _Code.NOT_FOUND,
    errors.TableConflict: _Code.ALREADY_EXISTS,
    errors.ConfigError: _Code.INVALID_ARGUMENT,
    errors.RuleError: _Code.INVALID_ARGUMENT,
    errors.WrongType: _Code.INVALID_ARGUMENT,
    errors.LimitExceeded: _Code.RESOURCE_EXHAUSTED,
    errors.FrameError: _Code.INVALID_ARGUMENT,
    errors.ProtocolError: _Code.FAILED_PRECONDITION,
    errors.Gap: _Code.OUT_OF_RANGE,
    errors.Fenced: _Code.ABORTED,
    errors.LaneLost: _Code.FAILED_PRECONDITION,
    errors.NotReady: _Code.UNAVAILABLE,
    errors.Later: _Code.UNAVAILABLE,
    errors.DeadlineExceeded: _Code.DEADLINE_EXCEEDED,
    errors.ServerUnavailable: _Code.UNAVAILABLE,
    errors.AccessDenied: _Code.UNAUTHENTICATED,
    errors.LogError: _Code.DATA_LOSS,
    errors.NoRoom: _Code.UNAVAILABLE,
    errors.CheckpointError: _Code.DATA_LOSS,
}
_CLASSES = {cls.__name__: cls for cls in CODES}

# What gRPC itself reports, when no server has said anything.
_FOREIGN: dict[grpc.StatusCode, type[PsfleetError]] = {
    _Code.UNAVAILABLE: ServerUnavailable,
    _Code.CANCELLED: ServerUnavailable,
    _Code.DEADLINE_EXCEEDED: DeadlineExceeded,
    _Code.RESOURCE_EXHAUSTED: LimitExceeded,
    _Code.UNAUTHENTICATED: AccessDenied,
    _Code.UNIMPLEMENTED: ProtocolError,
}


class _Settable(Protocol):
    """The part of a servicer context that carries a status."""

    def set_code(self, code: grpc.StatusCode) -> None: ...
    def set_details(self, details: str) -> None: ...
    def set_trailing_metadata(self, trailing_metadata: tuple[tuple[str, str], ...]) -> None: ...


def status_of(error: PsfleetError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Return code, text and trailing metadata that stand for an error."""
    cls = next(cls for cls in type(error).__mro__ if cls in CODES)
    return CODES[cls], str(error)[:_LONGEST], ((KEY, cls.__name__),)


def failure(context: _Settable, error: PsfleetError) -> None:
    """Let the call of `context` end with the error."""
    code, details, metadata = status_of(error)
    context.set_code(code)
    context.set_details(details)
    context.set_trailing_metadata(metadata)


def error_of(error: grpc.RpcError, server: str, question: str = "") -> PsfleetError:
    """Return the error that a failed call stands for.

    Args:
        error: Error raised by gRPC.
        server: Names the other end, for the text.
        question: Says what was asked, and for how long it was waited.
    """
    if not isinstance(error, grpc.Call):
        return ServerUnavailable(f"{server} does not answer: {error}")
    name = next((value for key, value in error.trailing_metadata() or () if key == KEY), "")
    return error_named(str(name), error.code(), error.details() or "", server, question)


def error_named(
    name: str, code: grpc.StatusCode, details: str, server: str, question: str = ""
) -> PsfleetError:
    """Return the error of a class that the server has named, or else of the code; see error_of."""
    if name in _CLASSES:
        return _CLASSES[name](details)
    cls = _FOREIGN.get(code, PsfleetError)
    what = f" {question}" if cls is DeadlineExceeded and question else ""
    return cls(
        f"{server} does not answer{what}: {code.name}, {details}"
        if cls is not PsfleetError
        else f"{server} failed: {code.name}, {details}"
    )
