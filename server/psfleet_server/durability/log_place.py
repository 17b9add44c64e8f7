"""The place of a server's log: which files count, the room on their disk, and their pages in memory.

Before the number of servers of a job changes, every server makes a new log, which begins with all that the
server is to hold. The file `scale.done` of server 0 then decides in one step which number the job has, and
with it which logs count: a server that starts before the decision continues from its old log, a later one
from its new log.

Memory that the system must find for each record is dear, the more so in a virtual machine whose host takes
free memory back: there a megabyte costs 1.4 to 1.9 ms of the writer's time, and 0.2 in memory that was just
let go. So the log's file is followed at a distance by a thread that has it written to the disk and dropped.
No call waits for this thread: it changes nothing about how durable a record is.
"""

import contextlib
import dataclasses
import errno
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from psfleet.core.base.errors import LogError, NoRoom
from psfleet.core.base.scaling_files import read_scaled
from psfleet.core.base.settings.environment import Environment
from psfleet.core.base.threads import ServiceThread

PACE = 0.5
"""Seconds between two tries of a server that is starting on a disk without room."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_STRIDE = 8 << 20  # bytes written between two turns


def decided(environment: Environment) -> tuple[Environment, int]:
    """Return the environment with the servers that the job now has, and their generation.

    The launcher may not know yet that their number has changed. A server beyond that number is a new one,
    which keeps a log of its own until it gets its part of the rows.

    Raises:
        FrameError: The decision cannot be read.
    """
    if not environment.snapshot_folder:
        return environment, 0
    scaling = read_scaled(job_folder(environment))
    if not scaling.generation or environment.rank >= len(scaling.endpoints):
        return environment, 0
    if len(scaling.endpoints) != len(environment.servers):
        environment = dataclasses.replace(environment, servers=scaling.endpoints)
    return environment, scaling.generation


def job_folder(environment: Environment) -> Path:
    """Return the folder of the job's logs, in which requests and decisions are."""
    return Path(environment.snapshot_folder).parent


def log_path(environment: Environment, generation: int) -> Path:
    """Return the first file of this server's log of a generation."""
    move = f".move{generation}" if generation else ""
    return Path(environment.log_folder) / f"server.{environment.rank}{move}.log"


def remove_earlier(environment: Environment) -> None:
    """Remove this server's logs that no longer count: of earlier generations, or of an earlier server."""
    scaling = read_scaled(job_folder(environment))
    is_new = environment.rank >= len(scaling.endpoints)
    first = scaling.number + 1 if is_new and scaling.number else scaling.generation
    name = re.compile(rf"server\.{environment.rank}(?:\.move(\d+))?(?:\.\d{{6,}})?\.log")
    for path in Path(environment.log_folder).glob(f"server.{environment.rank}.*"):
        match = name.fullmatch(path.name)
        if match and int(match[1] or 0) < first:
            path.unlink()


class LogDisk:
    """The disk under a log. One thread at a time.

    Args:
        tell: Shows a line on the console: once when the disk is full, and once when there is room again.
        clock: Returns seconds that only rise.
    """

    def __init__(
        self, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._full_since: float | None = None
        self._wanted = 0  # bytes for which there was no room

    def failed(self, what: str, error: OSError, size: int) -> LogError:
        """Return the error to raise after a write that failed, of which nothing is left in the file.

        Args:
            what: Beginning of the sentence, such as "log 'x' cannot be written".
            error: Error of the system.
            size: Bytes of the write that failed.
        """
        sentence = f"{what}: {error.strerror}; make room for it"
        if error.errno not in _FULL:
            return LogError(f"{what}: {error.strerror}; start the job anew on another disk")
        if self._full_since is None:
            self._full_since = self._clock()
            self._tell(f"{sentence}. Pushes wait until there is some")
        self._wanted = max(self._wanted, size)
        return NoRoom(sentence)

    def took(self, what: str, file: Path) -> None:
        """Note that a write to the file has succeeded, and report it if the disk was full before.

        A short record may fit where a longer one does not. So the disk counts as full until it has space for
        the longest write that has failed.
        """
        if self._full_since is None:
            return
        free = os.statvfs(file)
        if free.f_bavail * free.f_frsize > self._wanted:
            self._wanted = 0
            seconds, self._full_since = self._clock() - self._full_since, None
            self._tell(f"{what} can be written again, after {seconds:.1f} seconds without room")


class PageCacheEvictor:
    """Follows one writer. The thread begins with the first long way, and ends with `close`."""

    def __init__(self, stride: int = _STRIDE) -> None:
        self._stride = stride
        self._way = 0  # bytes since the last turn
        self._more = threading.Condition()
        self._next: tuple[int, int] | None = None  # a descriptor of its own, and where to stop
        self._over = False
        self._thread: threading.Thread | None = None

    def follow(self, file: int, end: int, size: int) -> None:
        """`size` bytes were written to the file, up to `end`. Returns at once."""
        self._way += size
        if self._way < self._stride:
            return
        self._way = 0
        if self._thread is None:
            self._thread = ServiceThread(self._run, "trail")
            self._thread.start()
        with self._more:
            if self._next is not None:  # the disk is slow; this turn covers that one
                os.close(self._next[0])
            self._next = os.dup(file), end
            self._more.notify()

    def close(self) -> None:
        """Return when the last turn is done."""
        with self._more:
            self._over = True
            self._more.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._more:
                self._more.wait_for(lambda: self._next is not None or self._over)
                if self._next is None:
                    return
                (file, end), self._next = self._next, None
            # Starts to write what the disk lacks, and drops what it has. It is advice: nothing depends on it.
            with contextlib.suppress(OSError):
                os.posix_fadvise(file, 0, end, os.POSIX_FADV_DONTNEED)
            os.close(file)
