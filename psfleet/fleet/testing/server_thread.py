"""Servers as threads of the test process (LocalFleet with `in_process`), and a check for resource leaks.

A server thread is ready in milliseconds, much sooner than a process. It shares the process with the test, so
EndCheck makes sure that no thread, socket, pipe or named memory is left when the fleet ends.
"""

import importlib
import os
import stat
import subprocess
import threading
import time
from typing import Any, ClassVar

from typing_extensions import override

from psfleet.core.base.errors import PsfleetError, UsageError
from psfleet.core.base.settings.environment import Environment

_LOOK = 0.01  # seconds between two checks
_CLOSE_TIMEOUT = (
    60.0  # seconds for leftovers to go by themselves, such as connections that were closed
)


class ServerThread(threading.Thread):
    """Server that runs in a thread. It has the methods of `subprocess.Popen` that apply to a thread.

    Args:
        environment: Environment of the server, as a process would read it from its environment variables.

    Attributes:
        error: Error that has ended the server, or None.
        returncode: 0 after a regular end, 2 after an error, or None while the server is running.
    """

    def __init__(self, environment: Environment) -> None:
        super().__init__(name=f"server {environment.rank}", daemon=True)
        self.error: PsfleetError | None = None
        self.returncode: int | None = None
        self._server: Any = importlib.import_module("psfleet_server.process").Server(environment)
        self.start()

    @override
    def run(self) -> None:
        try:
            self._server.run()
            self.returncode = 0
        except PsfleetError as error:
            self.error, self.returncode = error, 2

    def poll(self) -> int | None:
        """Return the exit code, or None if the server is running."""
        return None if self.is_alive() else self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end of the server, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: The server is still running after `timeout` seconds.
        """
        self.join(timeout)
        if self.is_alive():
            raise subprocess.TimeoutExpired(self.name, timeout or 0.0)
        return self.returncode

    def terminate(self) -> None:
        """Request the server to end, and return at once."""
        self._server.stop()

    # LocalFleet calls `kill` on servers that have not ended in time. A thread cannot be killed.
    kill = terminate

    def send_signal(self, number: int) -> None:
        """Raise UsageError, because a thread takes no signals."""
        raise UsageError(
            f"{self.name} is a thread of this process and takes no signal {number}; make the LocalFleet "
            "without in_process"
        )


class EndCheck:
    """Check that no thread, socket, pipe or named memory that was created after this object is still open.

    If several fleets are open at the same time, the check cannot tell which of them a thread or socket
    belongs to. It therefore happens only when the last fleet ends, and compares with the state before the
    first fleet started. Unnamed shared memory is not checked: arrays that a test has pulled may be stored
    in it until the test drops them.
    """

    _open: ClassVar[list["EndCheck"]] = []

    def __init__(self) -> None:
        self._before: set[object] = {*threading.enumerate(), *_files()}
        if self._open:
            self._before = self._open[0]._before
        self._open.append(self)

    def drop(self) -> bool:
        """Give the check up, and return True if no other fleet is open."""
        if self in self._open:
            self._open.remove(self)
        return not self._open

    def check(self) -> None:
        """Wait until everything is closed. If another fleet is open, return at once.

        Raises:
            UsageError: Something is still open after a minute. The message lists what.
        """
        if not self.drop():
            return
        deadline = time.monotonic() + _CLOSE_TIMEOUT
        while leftovers := self._left():
            if time.monotonic() > deadline:
                raise UsageError(
                    f"the LocalFleet has ended and left {', '.join(sorted(leftovers))}; "
                    "close what was opened inside"
                )
            time.sleep(_LOOK)

    def _left(self) -> list[str]:
        threads = {*threading.enumerate()} - self._before
        files = {inode: name for inode, name in _files().items() if inode not in self._before}
        return [*(f"thread {thread.name!r}" for thread in threads), *files.values()]


def _files() -> dict[tuple[int, int], str]:
    """Return the names of open sockets, pipes and files of named memory, by device and inode."""
    files = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            state, text = os.stat(int(name)), os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # it is closed already
            continue
        is_memory = text.startswith("/dev/shm")
        if stat.S_ISSOCK(state.st_mode) or stat.S_ISFIFO(state.st_mode) or is_memory:
            files[state.st_dev, state.st_ino] = f"file {name} ({text})"
    return files
