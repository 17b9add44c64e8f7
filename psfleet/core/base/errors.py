"""Every error that psfleet raises on purpose.

PsfleetError
├── UsageError            (also ValueError)    an argument is wrong; nothing was changed
│   ├── ShapeError                             an array has the wrong shape or dtype
│   ├── IdError                                an id is not a whole number of 64 bits
│   ├── UnknownTable                           no table of that name or key
│   ├── TableConflict                          the table exists with another definition
│   ├── ConfigError                            a setting is unknown, missing or contradictory
│   │   ├── RuleError                          an update rule is unknown, differs or cannot run
│   │   └── WrongType      (also TypeError)    an argument is of another type than its annotation
│   └── LimitExceeded                          more than a server takes
├── FrameError            (also ValueError)    bytes on the wire or on disk are not what they claim
├── ProtocolError                              a message came out of order
│   ├── Gap                                    a sequence number was skipped
│   ├── Fenced                                 this incarnation has ended
│   ├── LaneLost                               the memory that was shared is not, or not any more
│   ├── NotReady                               the server does not know the caller yet
│   └── Later                                  the server takes the same push a moment later
├── DeadlineExceeded      (also TimeoutError)  a wait ended without its event
├── ServerUnavailable     (also ConnectionError) a server does not answer
├── AccessDenied          (also PermissionError) the other end is not of this job
├── LogError                                   a server's log is damaged, or cannot be written
│   └── NoRoom                                 its disk is full; the same is tried again
└── CheckpointError                            a snapshot is missing, incomplete or damaged
"""

import os
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType

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
    """Base of every error raised on purpose; its text is one sentence for a person."""


class UsageError(PsfleetError, ValueError):
    """An argument is wrong. Nothing was changed."""


class ShapeError(UsageError):
    """An array has the wrong shape or dtype."""


class IdError(UsageError):
    """An id is not a whole number of 64 bits."""


class UnknownTable(UsageError):
    """No table of that name or key exists."""


class TableConflict(UsageError):
    """A table of that name exists with another definition."""


class ConfigError(UsageError):
    """A setting is unknown, missing or contradicts another."""


class RuleError(ConfigError):
    """An update rule is unknown here, is defined differently elsewhere, or cannot become kernels."""


class WrongType(ConfigError, TypeError):
    """An argument is missing, unknown, or of another type than its annotation."""


class LimitExceeded(UsageError):
    """More than a server takes (psfleet.core.base.settings.declared_settings). Nothing was changed."""


class FrameError(PsfleetError, ValueError):
    """Bytes from the wire or from disk are not what they claim to be."""


class ProtocolError(PsfleetError):
    """A message came out of order or from the wrong sender."""


class Gap(ProtocolError):
    """A sequence number was skipped: an earlier push never arrived."""


class Fenced(ProtocolError):
    """This incarnation of the worker has ended; it must register again."""


class LaneLost(ProtocolError):
    """A call names shared memory that is not, or no more, there; it is sent with its tensors."""


class NotReady(ProtocolError):
    """The server does not know the caller yet; try again shortly."""


def joined_refusals(refusals: Sequence[UsageError]) -> UsageError:
    """Return one error for the pushes that servers have refused: the first one, and how many followed."""
    first, others = refusals[0], len(refusals) - 1
    more = f" (so were {others} pushes after it)" if others else ""
    return type(first)(f"{first}{more}")


def rows_move(server: int) -> NotReady:
    """Return the error of a server whose rows may not change now."""
    return NotReady(f"server {server} takes nothing while rows move to another number of servers")


class Later(ProtocolError):
    """The server takes this push a moment later; send the same again."""


class DeadlineExceeded(PsfleetError, TimeoutError):
    """A wait ended without its event; the text says what it waited for."""


class ServerUnavailable(PsfleetError, ConnectionError):
    """A server does not answer."""


class AccessDenied(PsfleetError, PermissionError):
    """One end does not know the other: no certificate or token, or that of another job."""


class LogError(PsfleetError):
    """The log of a server is damaged, of another server, or cannot be written."""


class NoRoom(LogError):
    """The disk of a log is full. Nothing was changed; workers send the same again until there is room."""


class CheckpointError(PsfleetError):
    """A snapshot is missing, incomplete or damaged."""


def not_installed(use: str, package: str, extra: str) -> ConfigError:
    """Return the error of a use, such as "Kafka topics need", of a package that an extra brings."""
    return ConfigError(
        f"{use} {package}, which is not installed; run: pip install '.[{extra}]' in psfleet's checkout"
    )


def install_hook() -> None:
    """Print a `PsfleetError` that ends this process as one line with the place in the script.

    Other exceptions and a `ProtocolError` keep their traceback. So do all where PSFLEET_TRACEBACK is 1,
    where the script has a hook of its own, and in the workers of a job, whose launcher reads the place
    from it.
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
    """` (train.py, line 12)`: where the script was; empty if no frame of the script is left."""
    lines = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(trace)
        if frame.f_globals.get("__name__") == "__main__"
    ]
    return f" ({os.path.basename(lines[-1][0])}, line {lines[-1][1]})" if lines else ""


for _name in __all__:
    # Scripts import errors from psfleet, so tracebacks and pickles name them there.
    globals()[_name].__module__ = "psfleet"
