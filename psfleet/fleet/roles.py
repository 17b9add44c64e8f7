"""Role makers, the role of this process in its fleet, and the other members."""

from collections.abc import Sequence
from typing import Literal

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.settings.environment import Environment, check_alone, read_environment
from psfleet.core.base.settings.server_endpoints import check_endpoint
from psfleet.core.base.validation.annotations import PositiveInt, checked
from psfleet.core.runtime.process_runtime import current
from psfleet.core.runtime.stages import StagePosition


class Role:
    """Names of the roles, for UserDefinedRoleMaker."""

    WORKER: Literal["worker"] = "worker"
    SERVER: Literal["server"] = "server"


class RoleMaker:
    """Source from which a process learns its role."""

    environment: Environment


class PaddleCloudRoleMaker(RoleMaker):
    """Takes the role from the environment: what `init()` does without a role maker.

    Args:
        is_collective: Accepted for the reference's sake; must be False.
        init_gloo: Accepted for the reference's sake.
    """

    @checked
    def __init__(self, is_collective: bool = False, init_gloo: bool = False) -> None:
        check_no_collective(is_collective)
        self.environment = read_environment()


class UserDefinedRoleMaker(RoleMaker):
    """Takes the role from its arguments.

    Args:
        current_id: This worker's or server's index, from 0.
        role: Role.WORKER or Role.SERVER.
        worker_num: Number of workers; None: as many as `worker_endpoints`, or else 1.
        server_endpoints: Endpoints of all servers, in the order of their indices.
        worker_endpoints: Endpoints of all workers, for information.
        is_collective, init_gloo: As in PaddleCloudRoleMaker.
    """

    @checked
    def __init__(
        self,
        current_id: int = 0,
        role: Literal["worker", "server"] = Role.WORKER,
        worker_num: PositiveInt | None = None,
        server_endpoints: Sequence[str] = (),
        worker_endpoints: Sequence[str] = (),
        *,
        is_collective: bool = False,
        init_gloo: bool = False,
    ) -> None:
        check_no_collective(is_collective)
        for endpoint in server_endpoints:
            check_endpoint(endpoint)
        if worker_num not in (None, len(worker_endpoints) or worker_num):
            raise ConfigError(
                f"UserDefinedRoleMaker: worker_num is {worker_num} and worker_endpoints names "
                f"{len(worker_endpoints)} workers; leave one of them out"
            )
        self.environment = Environment(
            role,
            current_id,
            tuple(server_endpoints),
            worker_num or len(worker_endpoints) or 1,
            tuple(worker_endpoints),
        )


def check_no_collective(is_collective: bool) -> None:
    """Refuse to train without servers."""
    if is_collective:
        raise ConfigError("is_collective is True; psfleet trains with parameter servers only")


def environment_of(role_maker: RoleMaker | None) -> Environment:
    """Return the environment that a role maker has found; None: the one of environment variables.

    Raises:
        ConfigError: The environment is wrong.
    """
    if role_maker is None:
        return read_environment()
    return role_maker.environment


@checked
class FleetRole:
    """The role of this process, as `fleet.init` has found it."""

    def __init__(self) -> None:
        self._joined: Environment | None = None
        self._place = StagePosition()

    @property
    def _environment(self) -> Environment:
        """Environment found by `init`. A script that trains alone, or has a client, need not call it."""
        if self._joined is not None:
            return self._joined
        if current().is_held:  # psfleet.connect() has the worker's seat
            return read_environment()
        check_alone()
        return Environment()

    def is_server(self) -> bool:
        """Return whether this process is a server."""
        return self._environment.role == "server"

    def is_worker(self) -> bool:
        """Return whether this process trains."""
        return not self.is_server()

    def is_first_worker(self) -> bool:
        """Return whether this process is worker 0, or its first stage."""
        return self.is_worker() and self.worker_index() == 0 and not self.is_later_stage()

    def is_later_stage(self) -> bool:
        """Return whether this process is a stage of a pipeline and not the worker's first."""
        return self._place.process > 0

    def worker_index(self) -> int:
        """This worker's index, from 0; all its stages have the same."""
        return self._environment.rank

    def server_index(self) -> int:
        """This server's index, from 0."""
        return self._environment.rank

    def worker_num(self) -> int:
        """Return the number of workers that train."""
        return self._environment.workers

    def server_num(self) -> int:
        """Return the number of servers as this process knows them now; 0 embedded."""
        now = current().server_num
        return len(self._environment.servers) if now is None else now

    def server_endpoints(self, to_string: bool = False) -> list[str] | str:
        """The endpoints of the servers that there were when this process started, or joined by commas."""
        return _listed(self._environment.servers, to_string)

    def worker_endpoints(self, to_string: bool = False) -> list[str] | str:
        """The workers' addresses as far as the environment names them."""
        return _listed(self._environment.worker_endpoints, to_string)


def _listed(endpoints: Sequence[str], to_string: bool) -> list[str] | str:
    return ",".join(endpoints) if to_string else list(endpoints)
