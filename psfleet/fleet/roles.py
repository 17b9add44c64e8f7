"""Role makers: where a process learns what it is."""

from collections.abc import Sequence

from psfleet.errors import ConfigError
from psfleet.settings.environment import Environment, read_environment

__all__ = ["PaddleCloudRoleMaker", "Role", "UserDefinedRoleMaker"]


class Role:
    """Names of the roles, for UserDefinedRoleMaker."""

    WORKER = "worker"
    SERVER = "server"


class PaddleCloudRoleMaker:
    """Takes the role from the environment: what `init()` does without a role maker."""

    def __init__(self, is_collective: bool = False) -> None:
        self.environment = read_environment()


class UserDefinedRoleMaker:
    """Takes the role from its arguments."""

    def __init__(
        self,
        current_id: int = 0,
        role: str = Role.WORKER,
        worker_num: int = 1,
        server_endpoints: Sequence[str] = (),
        worker_endpoints: Sequence[str] = (),
    ) -> None:
        if role not in (Role.WORKER, Role.SERVER):
            raise ConfigError(f"role is {role!r}; it must be Role.WORKER or Role.SERVER")
        self.environment = Environment(
            "server" if role == Role.SERVER else "worker",
            current_id,
            tuple(server_endpoints),
            worker_num,
            tuple(worker_endpoints),
        )
