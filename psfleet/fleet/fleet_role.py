"""What this process is in its fleet, and who the others are."""

from collections.abc import Sequence

from psfleet.settings.environment import Environment, check_alone
from psfleet.stages.links import StagePosition

__all__ = ["FleetRole"]


class FleetRole:
    """The role of this process, as `fleet.init` has found it."""

    def __init__(self) -> None:
        self._joined: Environment | None = None
        self._place = StagePosition()

    @property
    def _environment(self) -> Environment:
        """What `init` has found; a script that trains alone need not call it."""
        if self._joined is None:
            check_alone()
            return Environment()
        return self._joined

    def is_server(self) -> bool:
        """Whether this process is a server."""
        return self._environment.role == "server"

    def is_worker(self) -> bool:
        """Whether this process trains."""
        return not self.is_server()

    def is_first_worker(self) -> bool:
        """Whether this process is worker 0, or its first stage."""
        return self.is_worker() and self.worker_index() == 0 and not self.is_later_stage()

    def is_later_stage(self) -> bool:
        """Whether this process is a stage of a pipeline and not the worker's first."""
        return self._place.process > 0

    def worker_index(self) -> int:
        """This worker's index, from 0; all its stages have the same."""
        return self._environment.rank

    def server_index(self) -> int:
        """This server's index, from 0."""
        return self._environment.rank

    def worker_num(self) -> int:
        """How many workers train."""
        return self._environment.workers

    def server_num(self) -> int:
        """How many servers there are; 0 embedded."""
        return len(self._environment.servers)

    def server_endpoints(self, to_string: bool = False) -> list[str] | str:
        """The servers' endpoints, as a list or joined by commas."""
        return _listed(self._environment.servers, to_string)

    def worker_endpoints(self, to_string: bool = False) -> list[str] | str:
        """The workers' addresses as far as the environment names them."""
        return _listed(self._environment.worker_endpoints, to_string)


def _listed(endpoints: Sequence[str], to_string: bool) -> list[str] | str:
    return ",".join(endpoints) if to_string else list(endpoints)
