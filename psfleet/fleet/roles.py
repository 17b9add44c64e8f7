"""Role of this process in its fleet (server or worker, and its index), and where the role comes from.

A RoleMaker is the source of the role: the environment variables that the launcher sets, or arguments.
FleetRole is the base class of Fleet with the methods that return the role and the endpoints of other
processes.
"""

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
    """Source of a process's role, passed to `fleet.init`."""

    environment: Environment


class PaddleCloudRoleMaker(RoleMaker):
    """Role from the environment variables that the launcher sets. `fleet.init()` without arguments does the
    same.

    Args:
        is_collective: Must be False. Accepted because Paddle has it.
        init_gloo: Ignored. Accepted because Paddle has it.
    """

    @checked
    def __init__(self, is_collective: bool = False, init_gloo: bool = False) -> None:
        check_no_collective(is_collective)
        self.environment = read_environment()


class UserDefinedRoleMaker(RoleMaker):
    """Role from arguments, for processes that are not started by the launcher.

        fleet.init(UserDefinedRoleMaker(0, Role.WORKER, 2, server_endpoints=["10.0.0.1:6000"]))

    Args:
        current_id: Index of this worker or server, from 0.
        role: Role.WORKER or Role.SERVER.
        worker_num: Number of workers. None means the number of `worker_endpoints`, or 1 without endpoints.
        server_endpoints: Endpoints of all servers, in the order of their indices.
        worker_endpoints: Endpoints of all workers. Only `fleet.worker_endpoints` uses them.
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
    """Raise ConfigError if `is_collective` is True, because psfleet does not train without servers."""
    if is_collective:
        raise ConfigError("is_collective is True; psfleet trains with parameter servers only")


def environment_of(role_maker: RoleMaker | None) -> Environment:
    """Return the role maker's environment, or the environment from the process's variables if it is None.

    Raises:
        ConfigError: A variable is missing or has a wrong value.
    """
    if role_maker is None:
        return read_environment()
    return role_maker.environment


@checked
class FleetRole:
    """Methods of a Fleet about the role of this process and the other members."""

    def __init__(self) -> None:
        self._joined: Environment | None = None
        self._place = StagePosition()

    @property
    def _environment(self) -> Environment:
        """Environment of this process: its role, its index and the servers.

        Scripts without a cluster, and scripts that use `psfleet.connect()`, need not call `init`.
        """
        if self._joined is not None:
            return self._joined
        if current().is_held:  # psfleet.connect() was called
            return read_environment()
        check_alone()
        return Environment()

    def is_server(self) -> bool:
        """Return whether this process is a server."""
        return self._environment.role == "server"

    def is_worker(self) -> bool:
        """Return whether this process is a worker. True without a cluster too."""
        return not self.is_server()

    def is_first_worker(self) -> bool:
        """Return whether this process is worker 0 or, in a pipeline, the first stage of worker 0."""
        return self.is_worker() and self.worker_index() == 0 and not self.is_later_stage()

    def is_later_stage(self) -> bool:
        """Return whether this process is a stage of a worker's pipeline other than the first stage."""
        return self._place.process > 0

    def worker_index(self) -> int:
        """Return the index of this worker, from 0. All pipeline stages of a worker have the same index."""
        return self._environment.rank

    def server_index(self) -> int:
        """Return the index of this server, from 0."""
        return self._environment.rank

    def worker_num(self) -> int:
        """Return the number of workers that train."""
        return self._environment.workers

    def server_num(self) -> int:
        """Return the present number of servers, or 0 without a cluster."""
        now = current().server_num
        return len(self._environment.servers) if now is None else now

    def server_endpoints(self, to_string: bool = False) -> list[str] | str:
        """Return the servers' endpoints as they were when this process started.

        Args:
            to_string: True to return one string with commas between the endpoints.
        """
        return _listed(self._environment.servers, to_string)

    def worker_endpoints(self, to_string: bool = False) -> list[str] | str:
        """Return the workers' endpoints, or nothing if the role maker does not have them.

        Args:
            to_string: True to return one string with commas between the endpoints.
        """
        return _listed(self._environment.worker_endpoints, to_string)


def _listed(endpoints: Sequence[str], to_string: bool) -> list[str] | str:
    return ",".join(endpoints) if to_string else list(endpoints)
