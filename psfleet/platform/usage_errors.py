"""psfleet's errors that end a script: one sentence on standard error instead of psfleet's own frames."""

import os
import sys
import traceback
from types import TracebackType

from psfleet.errors import ProtocolError, PsfleetError


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
