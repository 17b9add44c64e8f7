"""Engine `ray`: runs agents on a Ray cluster, in one actor for each bundle of a placement group.

Ray chooses the machines of the agents and keeps the agents alive. The rest works as with other engines for
several machines. The launcher does not import Ray: it starts a driver program
(psfleet_launch.engines.remote.ray_driver) and reads its output.
"""

import importlib.util
import json
import selectors
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import override

from psfleet.core.base.errors import ConfigError, not_installed
from psfleet.core.base.settings.declaration import setting
from psfleet_launch.engines.remote.machine import address_towards, own_address
from psfleet_launch.engines.remote.machine_placement import MachinePlacement
from psfleet_launch.engines.remote.ray_driver import FAILED, WAITS
from psfleet_launch.engines.remote.remote_engine import RemoteEngine
from psfleet_launch.job.job_plan import Job
from psfleet_launch.job.job_request import JobRequest, Launch

_DRIVER = ("-m", "psfleet_launch.engines.remote.ray_driver")


@dataclass(frozen=True)
class RaySettings:
    """Settings of engine ray."""

    ray_address: str = setting(
        "auto",
        "Engine ray: `HOST:PORT` of the cluster's head; by default the cluster of this machine",
        names="--ray-address engine.ray.address",
        metavar="HOST:PORT",
    )
    bundles: int = setting(
        1,
        "Engine ray: how many agents, each in a bundle of a placement group",
        names="--bundles engine.ray.bundles",
        least=1,
    )
    bundle_cores: float = setting(
        1.0, "Engine ray: CPUs of each bundle", names="--bundle-cores engine.ray.cores", least=0
    )
    bundle_gpus: float = setting(
        0.0, "Engine ray: GPUs of each bundle", names="--bundle-gpus engine.ray.gpus", least=0
    )


class RayEngine(RemoteEngine):
    """Engine that starts the Ray driver program. The driver's actors run the agents."""

    name = "ray"
    settings = RaySettings

    def __init__(
        self, job: Job, selector: selectors.BaseSelector, launch: Launch | None = None
    ) -> None:
        super().__init__(job, selector, launch)
        self._said = self.launch.of(RaySettings)
        self._told: set[str] = set()

    @classmethod
    @override
    def hand_over(
        cls, request: JobRequest, name: str, launch: Launch, words: Sequence[str]
    ) -> int | None:
        if not launch.dry_run and importlib.util.find_spec("ray") is None:
            raise not_installed("--engine ray needs", "Ray", "ray")
        return None

    def machines(self) -> Sequence[str]:
        return [f"bundle {number}" for number in range(1, self._said.bundles + 1)]

    def default_address(self) -> str:
        """Return this machine's address in the network of the Ray cluster's head node."""
        head = self._said.ray_address
        return own_address() if head == "auto" else address_towards(head.rpartition(":")[0])

    def start_agents(self, endpoint: str, invitation: bytes) -> None:
        driver_request = {
            "address": self._said.ray_address,
            "endpoint": endpoint,
            "bundles": self._said.bundles,
            "resources": self._bundle(),
            "spread": bool(self.job.request.replicas),
            "seconds": self.launch.start_timeout,
        }
        self.start("ray", [sys.executable, *_DRIVER, json.dumps(driver_request)], invitation)

    def _bundle(self) -> dict[str, float]:
        """Return the resources to reserve for each agent, at least those promised to the agent's
        processes."""
        needs = MachinePlacement(self.job, self.machines()).largest
        cores = max(self._said.bundle_cores, needs.cores)
        return {"CPU": cores, "GPU": self._said.bundle_gpus, "memory": needs.memory}

    def check_agents(self) -> None:
        driver = self.starters["ray"]
        lines = driver.lines()
        for line in lines:
            if line.startswith(WAITS) and line not in self._told:
                self._told.add(line)
                print(line.removeprefix(WAITS), file=sys.stderr, flush=True)
            if line.startswith(FAILED):
                raise ConfigError(line.removeprefix(FAILED))
        if driver.exit_code is not None:
            sentence = f"Ray's driver has ended with exit code {driver.exit_code}"
            raise ConfigError([sentence, *lines][-1])


ENGINE = RayEngine
