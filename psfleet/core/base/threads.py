"""Threads whose failure ends the process, and blocks that Ctrl-C cannot interrupt halfway.

**Service threads.** A process that has lost a thread still looks alive: its other threads reply, and
everything that waits for the lost thread waits forever. The launcher cannot see that, but it can see a
process that ends: it restarts the process, or ends the job. So an unexpected error in a ServiceThread ends
the process. Expected errors, such as a peer that does not reply or a full disk, are handled within the
thread.

**Interrupts.** Python raises KeyboardInterrupt at any line of the main thread. In the middle of a push, that
could leave a sequence number that was assigned but never sent, or only one of two tables updated. Code that
must run as a whole is wrapped in `deferred`: an interrupt is then delayed until the block ends. A block that
has to wait calls `check` or `wait_for`, which raise a delayed interrupt while nothing is half done.

**Stopping.** `stops_on_signals` and `wakes_on_signals` deliver SIGTERM and SIGINT through a pipe, to a
thread or to a selector.
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

from psfleet.core.base import crash_points
from psfleet.core.base.errors import type_and_text
from psfleet.core.base.logs import log_of

_log = log_of(__name__)

_FAILED = 1  # exit code


_LOOK = 0.1  # seconds between checks for an interrupt while waiting
_P = ParamSpec("_P")
_T = TypeVar("_T")
_Handler = Callable[[int, FrameType | None], Any]
# The module `signal` converts each handler to an enumeration member: 17 us per block instead of 1.
_signals: Any = importlib.import_module("_signal")
_this_thread = threading.get_ident
_main: int | None  # ident of the main thread
_interrupted = False
_depth = 0  # nested `deferred` blocks that the main thread is in
_handler: _Handler | None = None  # the script's, or None if SIGINT is ignored or ends the process
_ENDING = (signal.SIGTERM, signal.SIGINT)


class ServiceThread(threading.Thread):
    """Daemon thread whose unexpected error ends the process, with one sentence on standard error.

    Every thread of a server or a worker is a ServiceThread. It inherits the context variables of the thread
    that creates it.
    """

    def __init__(self, target: Callable[..., object], name: str, args: tuple[Any, ...] = ()):
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._inherited = contextvars.copy_context()

    def run(self) -> None:
        """Run the target."""
        with _ends_process(self.name):
            crash_points.reach(f"thread {self.name}")
            self._inherited.run(super().run)


@contextlib.contextmanager
def _ends_process(name: str) -> Iterator[None]:
    """End the process on any error in the block: log a sentence and the traceback, and exit with code 1."""
    try:
        yield
    except BaseException as error:
        _log.critical(
            f"psfleet: thread {name!r} has failed, and process {os.getpid()} ends: "
            f"{type_and_text(error)}",
            exc_info=error,
        )
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
        # sys.exit would end only this thread.
        os._exit(_FAILED)


class _Deferred:
    """Context manager and decorator that `deferred` returns.

    One object serves all blocks. It has no state: blocks matter only in the main thread, so they can only be
    nested, and `_depth` counts the nesting.
    """

    def __call__(self, work: Callable[_P, _T]) -> Callable[_P, _T]:
        """Return a function that calls `work` within a deferred block."""

        @functools.wraps(work)
        def block(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            if _depth or _this_thread() != _main:  # already in a block, or never interrupted
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
        # Not earlier: until the handler is replaced, an interrupt may still end this function.
        _depth += 1

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
    """Return a block (context manager or decorator) that an interrupt of the main thread cannot end halfway.

        with deferred():
            number = next(sequence)
            send(number)  # no KeyboardInterrupt between the two

    A KeyboardInterrupt is delayed until the end of the block, or until the block calls `check`. In other
    threads, which are never interrupted, the block has no effect.
    """
    return _block


def check() -> None:
    """Raise a delayed interrupt now. Within `deferred`, call this only where nothing is half done."""
    global _interrupted
    if _interrupted and _handler is not None and _in_main_thread():
        _interrupted = False
        _handler(signal.SIGINT, None)


def wait_for(
    condition: threading.Condition, until: Callable[[], bool], timeout: float | None = None
) -> bool:
    """Wait like `condition.wait_for(until, timeout)`. Even within `deferred`, an interrupt ends the wait."""
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
os.register_at_fork(after_in_child=_look)  # in a child, the thread that forked is the main thread


@contextlib.contextmanager
def handled(numbers: Iterable[int], handler: Callable[..., Any]) -> Iterator[None]:
    """Install a handler for these signals. Restores the previous handlers at the end of the block."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class Waker:
    """Wakes a selector from other threads and from signals. Register the Waker itself with the selector.

    Attributes:
        theirs: Socket to write to. Pass its descriptor to signal.set_wakeup_fd to be woken by signals.
    """

    def __init__(self) -> None:
        self._ours, self.theirs = socket.socketpair()
        self._ours.setblocking(False)
        self.theirs.setblocking(False)

    def fileno(self) -> int:
        """Return the file descriptor that the selector waits for."""
        return self._ours.fileno()

    def wake(self) -> None:
        """Wake the selector. Any thread may call, even after `close`."""
        with contextlib.suppress(OSError):  # a full socket wakes the selector anyway
            self.theirs.send(b"\0")

    def drain(self) -> None:
        """Read the bytes that woke the selector, so that the selector can sleep again."""
        with contextlib.suppress(BlockingIOError):
            self._ours.recv(1 << 16)

    def close(self) -> None:
        """Close both sockets."""
        self._ours.close()
        self.theirs.close()


@contextlib.contextmanager
def wakes_on_signals(
    selector: selectors.BaseSelector, numbers: Iterable[int], note: Callable[[int], None]
) -> Iterator[None]:
    """Wake a selector on SIGCHLD and on the given signals, during the block.

    Args:
        selector: Selector that the main thread waits in.
        note: Called with the number of each signal that arrives, except SIGCHLD.
    """
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
    """Call `stop` on SIGTERM and SIGINT during the block, from a thread of its own.

    Has no effect unless called in the main thread.

    The signals are sent to the thread through a pipe. A handler in Python is not enough, for two reasons.
    It runs between two steps of the main thread, which may be about to wait forever, or may hold the very
    lock that `stop` needs. And the kernel may deliver the signal to another thread, as happens when a
    process continues after SIGSTOP; the main thread would then keep waiting.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    hearing = ServiceThread(_hear, "signals", (read_end, stop))
    hearing.start()
    wakeup = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    try:
        with handled(_ENDING, lambda *_: None):
            yield
    finally:
        signal.set_wakeup_fd(wakeup)
        os.close(write_end)
        hearing.join()
        os.close(read_end)


def _hear(pipe: int, stop: Callable[[], None]) -> None:
    """Read signal numbers from the pipe and call `stop` for each, until the pipe's other end is closed."""
    while numbers := os.read(pipe, 64):
        if any(number in numbers for number in _ENDING):
            stop()
