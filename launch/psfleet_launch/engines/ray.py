"""The engine of a Ray cluster: a placement group, and one actor per bundle that runs an agent.

Ray only places agents and holds them. The launcher loads no Ray: a program of its own is the driver
(psfleet_launch.engines.remote.ray_driver).
"""

import importlib.util
import json
import selectors
import sys
from collections.abc import Sequence

from psfleet.errors import ConfigError
from psfleet_launch.engines.remote.addresses import address_towards, own_address
from psfleet_launch.engines.remote.agent_starter import AgentStarter
from psfleet_launch.engines.remote.machine_placement import MachinePlacement
from psfleet_launch.engines.remote.ray_driver import FAILED, WAITS
from psfleet_launch.engines.remote.remote_engine import RemoteEngine
from psfleet_launch.job.job_plan import Job
from psfleet_launch.job.job_request import Launch

__all__ = ["ENGINE", "RayEngine"]

_DRIVER = ("-m", "psfleet_launch.engines.remote.ray_driver")


class RayEngine(RemoteEngine):
    """Holds the driver, which holds the actors."""

    name = "ray"

    def __init__(
        self, job: Job, selector: selectors.BaseSelector, launch: Launch | None = None
    ) -> None:
        super().__init__(job, selector, launch)
        self._driver: AgentStarter | None = None
        self._told: set[str] = set()

    def machines(self) -> Sequence[str]:
        return [f"bundle {number}" for number in range(1, self.launch.bundles + 1)]

    def default_address(self) -> str:
        """The address that faces the cluster's head."""
        head = self.launch.ray_address
        return own_address() if head == "auto" else address_towards(head.rpartition(":")[0])

    def start_agents(self, endpoint: str, invitation: bytes) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ConfigError("--engine ray needs Ray; pip install 'psfleet[ray]'")
        wanted = {
            "address": self.launch.ray_address,
            "endpoint": endpoint,
            "bundles": self.launch.bundles,
            "resources": self._bundle(),
            "spread": bool(self.job.request.replicas),
            "seconds": self.launch.start_timeout,
        }
        command = [sys.executable, *_DRIVER, json.dumps(wanted)]
        output = self.job.folder / "ray"
        self._driver = AgentStarter(command, invitation, output, self.job.token)

    def _bundle(self) -> dict[str, float]:
        """What Ray sets apart for each agent: at least what the processes there are promised."""
        needs = MachinePlacement(self.job, self.machines()).largest
        cores = max(self.launch.bundle_cores, needs.cores)
        return {"CPU": cores, "GPU": self.launch.bundle_gpus, "memory": needs.memory}

    def check_agents(self) -> None:
        assert self._driver is not None
        lines = self._driver.lines()
        for line in lines:
            if line.startswith(WAITS) and line not in self._told:
                self._told.add(line)
                print(line.removeprefix(WAITS), file=sys.stderr, flush=True)
            if line.startswith(FAILED):
                raise ConfigError(line.removeprefix(FAILED))
        if self._driver.exit_code is not None:
            ended = f"Ray's driver has ended with exit code {self._driver.exit_code}"
            raise ConfigError([ended, *lines][-1])

    def stop_agents(self) -> None:
        if self._driver is not None:
            self._driver.let_go()
            self._driver.wait()


ENGINE = RayEngine
