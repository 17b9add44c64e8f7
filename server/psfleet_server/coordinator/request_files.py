"""Reads the files in which users request another mode or another number of servers from a running job.

`psfleet mode` and the launcher write these files to the job's folder, and server 0 reads a file when it has
changed. A file that cannot be read is ignored with a line in the log, so that training continues.
"""

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from psfleet.core.base.errors import ConfigError, FrameError, rows_move
from psfleet.core.base.job_files import REQUEST, read_request, write_reply
from psfleet.core.base.logs import log_of
from psfleet.core.base.scaling_files import SCALE_READY, read_scale_ready, write_scale
from psfleet.core.runtime.strategy import Settings
from psfleet_server.coordinator.barriers import ModeRequest
from psfleet_server.coordinator.coordinator_messages import Decision, TermStarted

_log = log_of(__name__)
_Request = TypeVar("_Request")


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """Request to continue with the servers at these endpoints. Later requests have a higher number."""

    number: int
    endpoints: tuple[str, ...]


@dataclass
class Scaling:
    """State of a change of the number of servers.

    Rows move while all workers wait in a collective, with no push or pull under way. The collective ends once
    the change is complete or given up. No worker joins or leaves meanwhile.

    Attributes:
        endpoints: Endpoints of all servers, or empty if their number has not changed since the start.
        request: The last request, set by callers, or None.
        moving: The request that is being carried out, or None.
        done: Number of the last request that was carried out or given up.
    """

    endpoints: tuple[str, ...] = ()
    request: ScaleRequest | None = None
    moving: ScaleRequest | None = None
    done: int = 0

    @property
    def is_due(self) -> bool:
        """True if a request for another number of servers waits to be carried out."""
        return self.moving is None and self.request is not None and self.request.number > self.done

    def admit(self, decision: Decision) -> None:
        """Refuse decisions of the coordinator while rows move.

        The log that begins with the move would not contain these decisions.

        Raises:
            NotReady: Rows are moving.
        """
        if self.moving is not None and not isinstance(decision, TermStarted):
            raise rows_move(0)

    def begin(self) -> None:
        """Start to move rows. All workers wait in a collective, which ends only when the move has ended."""
        self.moving = self.request

    def end(self, endpoints: tuple[str, ...] = ()) -> None:
        """End the move of rows. `endpoints` are the servers from now on, or empty if nothing has changed."""
        assert self.moving is not None
        self.done, self.moving = self.moving.number, None
        self.endpoints = endpoints or self.endpoints


class _RequestFile(Generic[_Request]):
    """Reads a file of requests when it has changed.

    Args:
        folder: Folder of the job, or None if the job cannot get requests.
        warning_start: Beginning of the line in the log that says why a request is ignored.
    """

    def __init__(
        self, folder: Path | None, name: str, read: Callable[[Path], _Request], warning_start: str
    ) -> None:
        self._folder, self._name, self._read, self._what = folder, name, read, warning_start
        self._seen = 0
        self._request: _Request | None = None
        self._lock = threading.Lock()

    def look(self) -> _Request | None:
        """Return the request in the file, or None if there is none. Reads the file only if it has changed.

        A request that cannot be read is ignored, with a line in the log.
        """
        if self._folder is None:
            return None
        with self._lock:
            try:
                changed = (self._folder / self._name).stat().st_mtime_ns
                if changed != self._seen:
                    self._seen, self._request = changed, None
                    self._request = self._read(self._folder)
            except FileNotFoundError:
                return None
            except (
                OSError,
                ValueError,
            ) as error:  # ValueError includes all errors in the file's content
                _log.warning(f"{self._what} ignored: {error}")
            return self._request


class ModeRequestFile(_RequestFile[ModeRequest]):
    """Reads the requests of `psfleet mode`, and writes the confirmation that the workers have received one.

    Args:
        folder: Folder of the job, or None if the job cannot get mode requests.
    """

    def __init__(self, folder: Path | None) -> None:
        super().__init__(folder, REQUEST, _mode_request, "the mode request is")
        self._told = 0

    def told(self, number: int) -> None:
        """Confirm to `psfleet mode` that workers have received the mode request of this number."""
        with self._lock, contextlib.suppress(OSError):  # a full disk is no reason to fail a barrier
            if self._folder is None or self._request is None or number == self._told:
                return
            if number == self._request.number:
                write_reply(self._folder, number)
                self._told = number


class ScaleRequestFile(_RequestFile[ScaleRequest]):
    """Reads the file that the launcher writes once the servers for a new number of servers have started.

    Args:
        folder: Folder of the job, or None if the number of servers cannot change.
    """

    def __init__(self, folder: Path | None) -> None:
        super().__init__(folder, SCALE_READY, _scale_request, "the servers that were started are")

    def take(self, number: int) -> None:
        """Remove the file of a request that has ended. A file with a later request stays."""
        if self._folder is not None:
            # The file may be gone already, because the launcher has given the request up.
            with contextlib.suppress(OSError, FrameError):
                if read_scale_ready(self._folder)[0] == number:
                    (self._folder / SCALE_READY).unlink()

    def ask(self, servers: int) -> None:
        """Request another number of servers from the launcher.

        Raises:
            ConfigError: The job has no launcher that could start the servers.
        """
        if self._folder is None:
            raise ConfigError(
                f"scale_servers({servers}) needs a job of psfleet-launch, which starts the servers"
            )
        with self._lock:
            write_scale(self._folder, servers)


def _mode_request(folder: Path) -> ModeRequest:
    number, part = read_request(folder)
    Settings.from_parts({"consistency": part})
    mode = str(part.pop("mode"))
    return ModeRequest(number, mode, tuple((str(name), int(value)) for name, value in part.items()))


def _scale_request(folder: Path) -> ScaleRequest:
    return ScaleRequest(*read_scale_ready(folder))
