"""Errors as gRPC statuses, and back.

An error is sent as a gRPC status code, which any client understands. The name of the error's class is sent
too, in the trailing header `psfleet-error`, so that a psfleet client raises the same class as the server.
"""

from typing import Protocol

import grpc

from psfleet.core.base import errors
from psfleet.core.base.errors import (
    AccessDenied,
    DeadlineExceeded,
    LimitExceeded,
    ProtocolError,
    PsfleetError,
    ServerUnavailable,
)

KEY = "psfleet-error"
# Longest text of an error, in characters: many HTTP/2 peers cap the headers of a call at 8 KiB.
_LONGEST = 2000

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

# Errors for statuses that gRPC itself reports, when no psfleet server has named an error class.
_FOREIGN: dict[grpc.StatusCode, type[PsfleetError]] = {
    _Code.UNAVAILABLE: ServerUnavailable,
    _Code.CANCELLED: ServerUnavailable,
    _Code.DEADLINE_EXCEEDED: DeadlineExceeded,
    _Code.RESOURCE_EXHAUSTED: LimitExceeded,
    _Code.UNAUTHENTICATED: AccessDenied,
    _Code.UNIMPLEMENTED: ProtocolError,
}


class _Settable(Protocol):
    """The methods of grpc.ServicerContext that set a status."""

    def set_code(self, code: grpc.StatusCode) -> None: ...
    def set_details(self, details: str) -> None: ...
    def set_trailing_metadata(self, trailing_metadata: tuple[tuple[str, str], ...]) -> None: ...


def status_of(error: PsfleetError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Return the status code, text and trailing metadata that a server sends for an error."""
    cls = next(cls for cls in type(error).__mro__ if cls in CODES)
    return CODES[cls], str(error)[:_LONGEST], ((KEY, cls.__name__),)


def failure(context: _Settable, error: PsfleetError) -> None:
    """End a call with an error, from within the handler that serves `context`."""
    code, details, metadata = status_of(error)
    context.set_code(code)
    context.set_details(details)
    context.set_trailing_metadata(metadata)


def error_of(error: grpc.RpcError, server: str, question: str = "") -> PsfleetError:
    """Return the psfleet error for a gRPC call that failed.

    Args:
        server: Name of the other process, for the error's text.
        question: Request that the call waited for, and how long it waited. Used in the text of a timeout.
    """
    if not isinstance(error, grpc.Call):
        return ServerUnavailable(f"{server} does not answer: {error}")
    name = next((value for key, value in error.trailing_metadata() or () if key == KEY), "")
    return error_named(str(name), error.code(), error.details() or "", server, question)


def error_named(
    name: str, code: grpc.StatusCode, details: str, server: str, question: str = ""
) -> PsfleetError:
    """Return the psfleet error for a failed call: of the class that the server has named, if it named one.

    Otherwise the status code decides the class.

    Args:
        name: Name of the class from the trailing metadata, or empty.
        server: Name of the other process, for the error's text.
        question: Request that the call waited for, and how long it waited. Used in the text of a timeout.
    """
    if name in _CLASSES:
        return _CLASSES[name](details)
    cls = _FOREIGN.get(code, PsfleetError)
    waiting = f" {question}" if cls is DeadlineExceeded and question else ""
    return cls(
        f"{server} does not answer{waiting}: {code.name}, {details}"
        if cls is not PsfleetError
        else f"{server} failed: {code.name}, {details}"
    )
