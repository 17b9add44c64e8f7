"""Errors that psfleet raises on purpose, and the hook that prints them without a traceback.

Every error derives from PsfleetError, so `except PsfleetError` catches any. If a server refuses a call with
an error, the worker raises an error of the same class, with the same sentence.

PsfleetError
├── UsageError            (also ValueError)    an argument is wrong; nothing was changed
│   ├── ShapeError                             an array has the wrong shape or dtype
│   ├── IdError                                an id is not a 64-bit integer
│   ├── UnknownTable                           no table of that name or key
│   ├── TableConflict                          the table exists with another definition
│   ├── ConfigError                            a setting is unknown, missing or contradictory
│   │   ├── RuleError                          an update rule is unknown, differs or cannot run
│   │   └── WrongType      (also TypeError)    an argument is of another type than its annotation
│   └── LimitExceeded                          more than a server accepts
├── FrameError            (also ValueError)    bytes on the wire or on disk are not what they claim
├── ProtocolError                              a message came out of order
│   ├── Gap                                    a sequence number was skipped
│   ├── Fenced                                 this incarnation has ended
│   ├── LaneLost                               the shared memory of a call is not available
│   ├── NotReady                               the server does not know the caller yet
│   └── Later                                  the server accepts the same push a moment later
├── DeadlineExceeded      (also TimeoutError)  a wait ended without its event
├── ServerUnavailable     (also ConnectionError) a server does not answer
├── AccessDenied          (also PermissionError) the other end does not belong to this job
├── LogError                                   a server's log is damaged, or cannot be written
│   └── NoRoom                                 its disk is full; the same message is sent again
└── CheckpointError                            a snapshot is missing, incomplete or damaged
"""

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any

__all__ = [
    "AccessDenied",
    "CheckpointError",
    "ConfigError",
    "DeadlineExceeded",
    "Fenced",
    "FrameError",
    "Gap",
    "IdError",
    "LaneLost",
    "Later",
    "LimitExceeded",
    "LogError",
    "NoRoom",
    "NotReady",
    "ProtocolError",
    "PsfleetError",
    "RuleError",
    "ServerUnavailable",
    "ShapeError",
    "TableConflict",
    "UnknownTable",
    "UsageError",
    "WrongType",
]


class PsfleetError(Exception):
    """Base of all errors that psfleet raises on purpose. The text is one sentence for a person.

    try:
        fleet.init()
    except psfleet.PsfleetError as error:
        sys.exit(f"cannot start: {error}")
    """


class UsageError(PsfleetError, ValueError):
    """An argument is wrong. The call has changed nothing."""


class ShapeError(UsageError):
    """An array has the wrong shape or dtype."""


class IdError(UsageError):
    """An id is not a 64-bit integer."""


class UnknownTable(UsageError):
    """No table has this name or key."""


class TableConflict(UsageError):
    """A table with this name already exists, and its definition is different."""


class ConfigError(UsageError):
    """A setting is unknown, missing or contradicts another setting."""


class RuleError(ConfigError):
    """An update rule is unknown here, is defined differently elsewhere, or cannot be compiled."""


class WrongType(ConfigError, TypeError):
    """An argument is missing, unknown, or of another type than its annotation."""


class LimitExceeded(UsageError):
    """A request exceeds a limit of the server (PSFLEET_LIMITS). The call has changed nothing."""


class FrameError(PsfleetError, ValueError):
    """Bytes from the network or from disk are damaged, or of another format than they claim."""


class ProtocolError(PsfleetError):
    """A message came out of order or from the wrong sender. Usually a defect in psfleet."""


class Gap(ProtocolError):
    """A sequence number was skipped, so an earlier push has not arrived."""


class Fenced(ProtocolError):
    """A worker process was replaced or declared dead, so the servers refuse its messages.

    The process must register again.
    """


class LaneLost(ProtocolError):
    """A call refers to shared memory that the server cannot use.

    The worker sends the call again, with the tensors inside the message.
    """


class NotReady(ProtocolError):
    """The server is not ready for this call, as after a restart. The caller tries again shortly."""


def internal_error(error: Exception) -> PsfleetError:
    """Return the error that a server sends for an unexpected exception, such as a bug or a MemoryError.

    The caller writes the traceback to the server's log.
    """
    return PsfleetError(f"the server failed: {type_and_text(error)}; see its log")


def one_line(text: object) -> str:
    """Return `str(text)` on one line, to be part of a sentence, with one space for each run of whitespace."""
    return " ".join(str(text).split())


def type_and_text(error: BaseException) -> str:
    """Return the type and text of an error on one line, to be part of a sentence."""
    return f"{type(error).__name__}: {one_line(error)}"


def joined_refusals(refusals: Sequence[UsageError]) -> UsageError:
    """Return one error for several refused pushes: the first error, with the number of further refusals."""
    first, refused_count = refusals[0], len(refusals) - 1
    suffix = f" (so were {refused_count} pushes after it)" if refused_count else ""
    return type(first)(f"{first}{suffix}")


def rows_move(server: int) -> NotReady:
    """Return the error for a change that a server refuses because rows move to other servers."""
    return NotReady(f"server {server} takes nothing while rows move to another number of servers")


class Later(ProtocolError):
    """The server must take a snapshot before it accepts this push. The worker resends the push later."""


class DeadlineExceeded(PsfleetError, TimeoutError):
    """A wait has timed out. The text says which event did not occur."""


class ServerUnavailable(PsfleetError, ConnectionError):
    """A server cannot be reached, or does not reply."""


class AccessDenied(PsfleetError, PermissionError):
    """A certificate or token is missing, or belongs to another job. One side therefore rejects the other."""


class LogError(PsfleetError):
    """The log of a server is damaged, belongs to another server, or cannot be written."""


class NoRoom(LogError):
    """The disk of a server's log is full.

    Nothing was changed; workers repeat the message until there is space.
    """


class CheckpointError(PsfleetError):
    """A snapshot is missing, incomplete or damaged."""


def not_installed(use: str, package: str, extra: str) -> ConfigError:
    """Return the error for an optional package that is not installed.

    Args:
        use: Subject and verb of the error's sentence, such as "Kafka topics need".
    """
    return ConfigError(
        f"{use} {package}, which is not installed; run: pip install '.[{extra}]' in psfleet's checkout"
    )


def optional_module(name: str, use: str, package: str, extra: str) -> Any:
    """Import a module of an optional package. The last three arguments are those of `not_installed`.

    Raises:
        ConfigError: The package is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if error.name is not None and error.name.partition(".")[0] != name.partition(".")[0]:
            raise  # the package is there and lacks another one
        raise not_installed(use, package, extra) from None


def install_hook() -> None:
    """Make Python print a `PsfleetError` that ends this process as one line, without a traceback.

    The line ends with the position in the script. A full traceback is still printed
    - for other exceptions, and for ProtocolError, which indicates a defect;
    - if PSFLEET_TRACEBACK is 1;
    - in the workers of a job, whose launcher reads the position from the traceback.

    If the script has installed a hook of its own, that hook stays.
    """
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_exception


def _print_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    whole = os.environ.get("PSFLEET_TRACEBACK") == "1" or "PSFLEET_JOB" in os.environ
    if whole or not isinstance(error, PsfleetError) or isinstance(error, ProtocolError):
        sys.__excepthook__(kind, error, trace)
        return
    name = f"{kind.__module__}.{kind.__qualname__}"
    print(f"{name}: {error}{_place(trace)}", file=sys.stderr)


def _place(trace: TracebackType | None) -> str:
    """Return the position in the script, like ` (train.py, line 12)`, or "" if it is unknown."""
    lines = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(trace)
        if frame.f_globals.get("__name__") == "__main__"
    ]
    return f" ({os.path.basename(lines[-1][0])}, line {lines[-1][1]})" if lines else ""


for _name in __all__:
    # Scripts import errors from psfleet, so show them under this name in tracebacks and pickles.
    globals()[_name].__module__ = "psfleet"
