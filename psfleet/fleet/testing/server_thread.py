"""A server as a thread of this process, and what it may leave behind."""

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

_LOOK = 0.01  # seconds between looks
_CLOSE_TIMEOUT = 60.0  # seconds for what ends by itself, such as connections that were closed


class ServerThread(threading.Thread):
    """A running server with those methods of `subprocess.Popen` that apply to a thread.

    Attributes:
        error: Error with which it has ended.
        returncode: 0: it has ended in order; 2: with an error; None: it runs.
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
        """Return the exit code; None: it runs."""
        return None if self.is_alive() else self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """Return the exit code once it has ended.

        Raises:
            subprocess.TimeoutExpired: It has not ended in time.
        """
        self.join(timeout)
        if self.is_alive():
            raise subprocess.TimeoutExpired(self.name, timeout or 0.0)
        return self.returncode

    def terminate(self) -> None:
        """Ask it to end."""
        self._server.stop()

    kill = terminate  # of LocalFleet's end

    def send_signal(self, number: int) -> None:
        """Refuse it: a thread takes no signals."""
        raise UsageError(
            f"{self.name} is a thread of this process and takes no signal {number}; make the LocalFleet "
            "without in_process"
        )


class EndCheck:
    """Threads, sockets, pipes and named memory of this process that came after this object.

    Fleets that are open at once begin threads and connections beside each other, so the last of them to
    end answers for all. Memory without a name may be left: arrays that were pulled may lie in it, and it
    goes with the last one.
    """

    _open: ClassVar[list["EndCheck"]] = []

    def __init__(self) -> None:
        self._before: set[object] = {*threading.enumerate(), *_files()}
        if self._open:
            self._before = self._open[0]._before
        self._open.append(self)

    def drop(self) -> bool:
        """End the check; returns whether no other fleet is open."""
        if self in self._open:
            self._open.remove(self)
        return not self._open

    def check(self) -> None:
        """Wait until nothing is left, unless another fleet is open.

        Raises:
            UsageError: Something is left after a minute; the sentence lists it.
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
        files = {place: name for place, name in _files().items() if place not in self._before}
        return [*(f"thread {each.name!r}" for each in threads), *files.values()]


def _files() -> dict[tuple[int, int], str]:
    """Open sockets, pipes and named memory by device and inode."""
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
