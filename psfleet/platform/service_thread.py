"""Threads that a process cannot do without: when one fails, the process ends.

A process that has lost a thread seems to live: its other threads answer, and whoever waits for the lost
one waits for ever. An end can be acted on: the launcher starts the process again, or ends the job.
Errors that are expected, such as a peer that does not answer or a disk that is full, are handled by
the thread itself and never come here.
"""

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from psfleet.faults.crash_points import ThreadFault
from psfleet.platform.notices import say

__all__ = ["ServiceThread", "ends_process"]

_FAILED = 1  # exit code


class ServiceThread(threading.Thread):
    """A daemon thread whose unexpected error ends the process with one sentence on standard error.

    Every thread of a server or a worker is one of these.

    Args:
        target: What it does.
        name: Of the thread, for the sentence.
        args: For `target`.
    """

    def __init__(self, target: Callable[..., object], name: str, args: tuple[Any, ...] = ()):
        super().__init__(target=target, name=name, args=args, daemon=True)

    def run(self) -> None:
        """Do what it is for."""
        with ends_process(f"thread {self.name!r}"):
            ThreadFault.check(self.name)
            super().run()


@contextlib.contextmanager
def ends_process(what: str) -> Iterator[None]:
    """Within, any error ends the process: its traceback, then one sentence, then exit code 1."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(OSError, ValueError):
            traceback.print_exc(file=sys.stderr)
        words = " ".join(str(error).split())
        say(
            f"psfleet: {what} has failed, and process {os.getpid()} ends: "
            f"{type(error).__name__}: {words}"
        )
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
        os._exit(_FAILED)
