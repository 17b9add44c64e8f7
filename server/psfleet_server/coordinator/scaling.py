"""Another number of servers that is wanted from outside, and the moment to get it."""

import threading
from dataclasses import dataclass
from pathlib import Path

from psfleet.errors import ConfigError, FrameError
from psfleet.formats import SCALE_READY, read_scale_ready, write_scale
from psfleet.platform.logs import log_of
from psfleet_server.coordinator.coordinator_messages import Outcome

_log = log_of(__name__)


@dataclass(frozen=True, slots=True)
class ScaleRequest:
    """The fleet is to have these servers. Its `number` grows."""

    number: int
    endpoints: tuple[str, ...]


@dataclass
class Scaling:
    """The servers that there are, and are to be.

    Rows move while all workers have come to a collective, with nothing under way. It ends once the number of
    servers has changed, or has not. Nobody comes into the fleet or leaves it meanwhile.

    Attributes:
        endpoints: Where all servers are, if their number has changed since the fleet started.
        request: The last request; callers set it.
        moving: The request that is being carried out.
        done: Number of the last request that was carried out, or given up.
    """

    endpoints: tuple[str, ...] = ()
    request: ScaleRequest | None = None
    moving: ScaleRequest | None = None
    done: int = 0

    @property
    def is_due(self) -> bool:
        """A request waits to be carried out."""
        return self.moving is None and self.request is not None and self.request.number > self.done

    def begin(self) -> list[Outcome]:
        """All workers are there; none of them is answered yet."""
        self.moving = self.request
        return []

    def end(self, endpoints: tuple[str, ...] = ()) -> None:
        """The fleet has these servers now; empty: the same as before."""
        assert self.moving is not None
        self.done, self.moving = self.moving.number, None
        self.endpoints = endpoints or self.endpoints


class ScaleRequestFile:
    """Reads the file that the launcher writes when the servers have started.

    Args:
        folder: The job's folder; None: nobody asks for another number of servers.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._seen = 0
        self._request: ScaleRequest | None = None
        self._lock = threading.Lock()

    def look(self) -> ScaleRequest | None:
        """Return the last request; ignore one that cannot be read, with a line in the log."""
        if self._folder is None:
            return None
        with self._lock:
            try:
                changed = (self._folder / SCALE_READY).stat().st_mtime_ns
                if changed != self._seen:
                    self._seen, self._request = changed, None
                    self._request = ScaleRequest(*read_scale_ready(self._folder))
            except FileNotFoundError:
                return None
            except (OSError, FrameError) as error:
                _log.warning(f"the servers that were started are ignored: {error}")
            return self._request

    def take(self) -> None:
        """The request is under way; a later process does not begin it again."""
        if self._folder is not None:
            (self._folder / SCALE_READY).unlink(missing_ok=True)

    def ask(self, servers: int) -> None:
        """Ask the launcher for another number of servers.

        Raises:
            ConfigError: No launcher reads it.
        """
        if self._folder is None:
            raise ConfigError(
                f"scale_servers({servers}) needs a job of psfleet-launch, which starts the servers"
            )
        with self._lock:
            write_scale(self._folder, servers)
