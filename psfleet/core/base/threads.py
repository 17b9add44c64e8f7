"""Threads and signals: threads that a process cannot do without, and interrupts between two changes of state.

A process that has lost a thread seems to live: its other threads answer, and whoever waits for the lost
one waits for ever. An end can be acted on: the launcher starts the process again, or ends the job.
Errors that are expected, such as a peer that does not answer or a disk that is full, are handled by
the thread itself and never come here.

Python raises KeyboardInterrupt wherever the main thread is. Within a push that could leave a number
that was given out and never sent, or a table that is updated beside one that is not. What must happen
whole is done within `deferred`; where it waits for somebody else it asks `check`.
"""

import contextlib
import contextvars
import functools
import importlib
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from psfleet.core.base import faults
from psfleet.core.base.logs import log_of

_log = log_of(__name__)

_FAILED = 1  # exit code


_LOOK = 0.1  # seconds between two looks for an interrupt in a wait
_P = ParamSpec("_P")
_T = TypeVar("_T")
_Handler = Callable[[int, FrameType | None], Any]
# `signal` looks every handler up in an enumeration: 17 us for each block, instead of 1.
_signals: Any = importlib.import_module("_signal")
_this_thread = threading.get_ident
_main: int | None  # thread
_interrupted = False
_depth = 0  # blocks of the main thread that are under way
_handler: _Handler | None = None  # of the script; None: the signal is ignored or ends the process
_ENDING = (signal.SIGTERM, signal.SIGINT)


class ServiceThread(threading.Thread):
    """A daemon thread whose unexpected error ends the process with one sentence on standard error.

    Every thread of a server or a worker is one of these. Its context is that of the thread that made it.

    Args:
        target: Function that it runs.
        name: Name of the thread, for the sentence.
        args: For `target`.
    """

    def __init__(self, target: Callable[..., object], name: str, args: tuple[Any, ...] = ()):
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._inherited = contextvars.copy_context()

    def run(self) -> None:
        """Do what it is for."""
        with _ends_process(self.name):
            faults.reach(f"thread {self.name}")
            self._inherited.run(super().run)


@contextlib.contextmanager
def _ends_process(name: str) -> Iterator[None]:
    """Within a thread, any error ends the process: one sentence and its traceback, then exit code 1."""
    try:
        yield
    except BaseException as error:
        words = " ".join(str(error).split())
        _log.critical(
            f"psfleet: thread {name!r} has failed, and process {os.getpid()} ends: "
            f"{type(error).__name__}: {words}",
            exc_info=error,
        )
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
        os._exit(_FAILED)


class _Deferred:
    """It has no state of its own: blocks of the main thread lie within each other."""

    def __call__(self, work: Callable[_P, _T]) -> Callable[_P, _T]:
        """Return the function as such a block."""

        @functools.wraps(work)
        def block(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            if _depth or _this_thread() != _main:  # a block is under way, or none is needed
                return work(*args, **kwargs)
            with self:
                return work(*args, **kwargs)

        return block

    def __enter__(self) -> None:
        global _depth, _handler
        if _this_thread() != _main:
            return
        if not _depth:
            before = _signals.getsignal(signal.SIGINT)
            _handler = before if callable(before) else None
            if _handler is not None:
                _signals.signal(signal.SIGINT, _note)
        _depth += 1  # not before: an interrupt may come until then

    def __exit__(self, *failure: object) -> None:
        global _depth
        if _this_thread() != _main:
            return
        _depth -= 1
        if not _depth and _handler is not None:
            _signals.signal(signal.SIGINT, _handler)
            if _interrupted:
                check()


_block = _Deferred()


def deferred() -> _Deferred:
    """Within, an interrupt of the main thread waits for the end of the block, or for `check`."""
    return _block


def check() -> None:
    """Let an interrupt that has waited come now: nothing is half done."""
    global _interrupted
    if _interrupted and _handler is not None and _in_main_thread():
        _interrupted = False
        _handler(signal.SIGINT, None)


def wait_for(
    condition: threading.Condition, until: Callable[[], bool], timeout: float | None = None
) -> bool:
    """Wait as `changed.wait_for(until, timeout)` does; within `deferred` an interrupt ends the wait."""
    if not _in_main_thread():
        return condition.wait_for(until, timeout)
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        seconds = _LOOK if deadline is None else min(_LOOK, deadline - time.monotonic())
        if condition.wait_for(until, max(seconds, 0.0)):
            return True
        check()
        if seconds < _LOOK:
            return False


def _note(number: int, frame: FrameType | None) -> None:
    global _interrupted
    _interrupted = True


def _in_main_thread() -> bool:
    return _this_thread() == _main


def _look() -> None:
    global _main
    _main = threading.main_thread().ident


_look()
os.register_at_fork(after_in_child=_look)  # the thread that forks is the child's main thread


@contextlib.contextmanager
def handled(numbers: Iterable[int], handler: Callable[..., Any]) -> Iterator[None]:
    """Let a handler have these signals, and then those that had them before."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class Waker:
    """Wakes a selector from other threads and by signals; `fileno` is what it registers."""

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair()
        self._ours.setblocking(False)
        self.theirs.setblocking(False)

    def fileno(self) -> int:
        """Return the file descriptor for the selector."""
        return self._ours.fileno()

    def wake(self) -> None:
        """Wake it. Any thread may call, also when it is closed."""
        with contextlib.suppress(OSError):  # what is full wakes it already
            self.theirs.send(b"\0")

    def drain(self) -> None:
        """Take what has woken it."""
        with contextlib.suppress(BlockingIOError):
            self._ours.recv(1 << 16)

    def close(self) -> None:
        """Close both ends."""
        self._ours.close()
        self.theirs.close()


@contextlib.contextmanager
def wakes_on_signals(
    selector: selectors.BaseSelector, numbers: Iterable[int], note: Callable[[int], None]
) -> Iterator[None]:
    """Have SIGCHLD and these signals wake a selector; `note` takes the numbers of the latter."""
    with contextlib.closing(Waker()) as waker:
        selector.register(waker, selectors.EVENT_READ, waker.drain)
        wakeup = signal.set_wakeup_fd(waker.theirs.fileno(), warn_on_full_buffer=False)
        try:
            with (
                handled([signal.SIGCHLD], lambda *_: None),
                handled(numbers, lambda number, _: note(number)),
            ):
                yield
        finally:
            signal.set_wakeup_fd(wakeup)
            selector.unregister(waker)


@contextlib.contextmanager
def stops_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` for SIGTERM and SIGINT, whatever the main thread is about. Call this from the main thread.

    A thread hears of them through a pipe. A handler in Python would come too late or in the way: it runs
    between two steps of the main thread, which may just then be about to wait without end, or hold the
    very lock that `stop` needs. And the kernel may have another thread take the signal, as it does when
    one that goes on after SIGSTOP gets it; then the main thread goes on waiting.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    hearing = ServiceThread(_hear, "signals", (ours, stop))
    hearing.start()
    wakeup = signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
    try:
        with handled(_ENDING, lambda *_: None):
            yield
    finally:
        signal.set_wakeup_fd(wakeup)
        os.close(theirs)
        hearing.join()
        os.close(ours)


def _hear(pipe: int, stop: Callable[[], None]) -> None:
    """Each signal with a handler writes its number; the pipe's end says that no reader is left."""
    while numbers := os.read(pipe, 64):
        if any(number in numbers for number in _ENDING):
            stop()
