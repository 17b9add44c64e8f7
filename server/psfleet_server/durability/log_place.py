"""Location of a server's log: its path for each number of servers, full disks, and its pages in memory.

Before the number of servers of a job changes, every server creates a new log, which begins with all rows and
state that the server will hold. The file `scale.done` of server 0 then decides in one step which number of
servers the job has, and with it which logs are valid. A server that starts before the decision continues from
its old log, and a server that starts later from its new log. Each such set of logs is a *generation*.

Fresh page-cache memory for each record is expensive, especially in a virtual machine whose host reclaims free
memory: a megabyte costs the writer 1.4 to 1.9 ms there, against 0.2 ms in memory that was just released. So
`PageCacheEvictor` follows the log's file at a distance, and its thread has the system write the pages to the
disk and drop them. No call waits for this thread, and durability does not depend on it.
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
"""Seconds between two attempts of a starting server to write to a full disk."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_STRIDE = 8 << 20  # bytes written between two turns


def decided(environment: Environment) -> tuple[Environment, int]:
    """Return the environment with the job's present servers, and the generation of the valid logs.

    Each change of the number of servers begins a generation: a new set of logs. The launcher may not know of
    the last change yet. A server with an index beyond the present number of servers is being added. It keeps
    a separate log, of generation 0, until it gets its share of the rows.

    Raises:
        FrameError: The file with the decision cannot be read.
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
    """Return the job's folder, which holds its logs, requests and decisions."""
    return Path(environment.snapshot_folder).parent


def log_path(environment: Environment, generation: int) -> Path:
    """Return the path of the first file of this server's log.

    Args:
        environment: Environment of the server.
        generation: Generation of the log, which changes with the number of servers. 0 is the job's first.
    """
    move = f".move{generation}" if generation else ""
    return Path(environment.log_folder) / f"server.{environment.rank}{move}.log"


def remove_earlier(environment: Environment) -> None:
    """Remove this server's outdated logs.

    Outdated are logs from before the last change of the number of servers, and logs of a removed server that
    had the same index.
    """
    scaling = read_scaled(job_folder(environment))
    is_new = environment.rank >= len(scaling.endpoints)
    first = scaling.number + 1 if is_new and scaling.number else scaling.generation
    name = re.compile(rf"server\.{environment.rank}(?:\.move(\d+))?(?:\.\d{{6,}})?\.log")
    for path in Path(environment.log_folder).glob(f"server.{environment.rank}.*"):
        match = name.fullmatch(path.name)
        if match and int(match[1] or 0) < first:
            path.unlink()


class LogDisk:
    """Detects when the disk under a log is full, and when it has space again. Not thread-safe.

    Args:
        tell: Shows a line on the console: once when the disk is full, and once when there is space again.
        clock: Returns a monotonic time in seconds.
    """

    def __init__(
        self, tell: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tell = tell
        self._clock = clock
        self._full_since: float | None = None
        self._wanted = 0  # bytes for which there was no room

    def failed(self, what: str, error: OSError, size: int) -> LogError:
        """Return the error to raise after a failed write. The caller has removed the written bytes already.

        Args:
            what: Beginning of the error message, such as "log 'x' cannot be written".
            error: Error of the system.
            size: Number of bytes that the failed write had.

        Returns:
            NoRoom if the disk is full, otherwise LogError.
        """
        sentence = f"{what}: {error.strerror}; make room for it"
        if error.errno not in _FULL:
            return LogError(f"{what}: {error.strerror}; start the job again on another disk")
        if self._full_since is None:
            self._full_since = self._clock()
            self._tell(f"{sentence}. Pushes wait until there is some")
        self._wanted = max(self._wanted, size)
        return NoRoom(sentence)

    def took(self, what: str, file: Path) -> None:
        """Note that a write to the file has succeeded, and report it if the disk was full before.

        A short record may fit where a longer record does not. So the disk is treated as full until it has
        space for the longest write that has failed.

        Args:
            what: Beginning of the reported line, such as "log 'x'".
            file: File that was written.
        """
        if self._full_since is None:
            return
        free = os.statvfs(file)
        if free.f_bavail * free.f_frsize > self._wanted:
            self._wanted = 0
            seconds, self._full_since = self._clock() - self._full_since, None
            self._tell(f"{what} can be written again, after {seconds:.1f} seconds without room")


class PageCacheEvictor:
    """Drops the pages of a growing file from the page cache, so that its writer reuses memory.

    One writer calls `follow` after each write. The thread starts after the first `stride` bytes, and ends
    with `close`.
    """

    def __init__(self, stride: int = _STRIDE) -> None:
        self._stride = stride
        self._way = 0  # bytes since the last turn
        self._more = threading.Condition()
        self._next: tuple[int, int] | None = None  # a descriptor of its own, and where to stop
        self._over = False
        self._thread: threading.Thread | None = None

    def follow(self, file: int, end: int, size: int) -> None:
        """Note that `size` bytes were written to the file, up to offset `end`. Returns at once."""
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
        """Stop the thread, and wait until its last pages are dropped."""
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
            # Starts to write the pages that the disk lacks, and drops the others. This is only advice to the
            # system: nothing depends on it.
            with contextlib.suppress(OSError):
                os.posix_fadvise(file, 0, end, os.POSIX_FADV_DONTNEED)
            os.close(file)
