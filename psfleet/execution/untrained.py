"""A script that runs its program over and over and never trains it: it has forgotten `minimize`."""

import atexit
import functools
import sys

from psfleet.errors import UsageError
from psfleet.execution import model_files
from psfleet.parameters import binding
from psfleet.platform.logs import log_of

_log = log_of(__name__)

_runs = 0  # of programs with parameters and without an update, which are not for tests


def note() -> None:
    """A program with parameters was run that no optimizer updates."""
    global _runs
    _runs += 1
    _tell_at_exit()


def check() -> None:
    """At the end of a loop over the data: refuse to go on as if it had trained.

    Raises:
        UsageError: Programs were run in it, and no gradient was pushed.
    """
    if sentence := _suspicion():
        _forget()
        raise UsageError(sentence)


def _suspicion() -> str:
    """Return the warning; empty: there was one run at most, or the script has trained, or loaded a model."""
    if _runs < 2 or binding.has_pushed() or model_files.has_loaded():
        return ""
    return (
        f"a program with parameters was run {_runs} times and never trained: no optimizer minimizes its "
        "loss; call minimize(loss) of an optimizer before exe.run, or run program.clone(for_test=True) to "
        "evaluate"
    )


def _forget() -> None:
    global _runs
    _runs = 0


@functools.cache
def _tell_at_exit() -> None:
    atexit.register(_tell)


def _tell() -> None:
    sentence = _suspicion()
    if sentence and not hasattr(sys, "last_value"):
        _log.warning(f"psfleet: {sentence}")
