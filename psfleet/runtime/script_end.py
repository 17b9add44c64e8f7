"""Whether the script of this process ends because it has failed.

Its worker then keeps its seat in the fleet: a worker that leaves counts as finished, and the others would
go on without its share of the data. The launcher, or the platform that runs the job, sees the exit code.
"""

import sys

__all__ = ["expect_exit", "forget_exit", "has_failed", "is_failure"]

_exit: SystemExit | None = None


def is_failure(error: BaseException) -> bool:
    """Whether a script that nothing keeps from ending with this error has failed."""
    return not isinstance(error, SystemExit) or bool(error.code)


def expect_exit(error: BaseException) -> None:
    """Take note of a failure that is `sys.exit`: the interpreter leaves no trace of it, unlike of errors."""
    global _exit
    if isinstance(error, SystemExit):
        _exit = error


def forget_exit() -> None:
    """The script goes on: somebody has caught what `expect_exit` was told of."""
    global _exit
    _exit = None


def has_failed() -> bool:
    """Whether the script, which has ended, did so by an error or with an exit code."""
    return _exit is not None or hasattr(sys, "last_value")
