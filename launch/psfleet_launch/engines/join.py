"""Engine `join`: prints the command that starts an agent, and waits until the user has run it on each
machine.

With this engine psfleet runs under PBS, LSF, MPI, Nomad, SkyPilot or Kubernetes, or on machines where the
user types the command. The command names a file with credentials, which must be copied to the machine
before.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from psfleet.core.base.settings.declaration import setting
from psfleet.core.base.settings.kinds import FOLDER
from psfleet_launch.engines.remote.remote_engine import RemoteEngine


@dataclass(frozen=True)
class JoinSettings:
    """Settings of engine join."""

    agents: int = setting(
        1,
        "Engine join: how many machines to wait for",
        names="--agents engine.join.agents",
        least=1,
    )
    credentials: str = setting(
        "",
        "Engine join: the launcher's credentials, `FOLDER/server` of `psfleet certs FOLDER`; agents have "
        "`FOLDER/worker`. By default new ones are made, and the command of agents names them",
        FOLDER,
        names="--agent-credentials engine.join.credentials",
        metavar="FOLDER",
    )


class JoinEngine(RemoteEngine):
    """Engine that waits for agents which the user starts."""

    name = "join"
    settings = JoinSettings

    def machines(self) -> Sequence[str]:
        return [f"machine {number}" for number in range(1, self._count + 1)]

    @override
    def control_credentials(self) -> tuple[Path, bytes]:
        path = self.launch.of(JoinSettings).credentials
        return (Path(path), b"") if path else super().control_credentials()

    def start_agents(self, endpoint: str, invitation: bytes) -> None:
        if not invitation:
            print(f"waits for {self._count} machine(s) at {endpoint}", file=sys.stderr, flush=True)
            return
        path = self._credentials
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(invitation)
        command = ["psfleet", "agent", "--join", endpoint, "--credentials", str(path)]
        print(
            f"run this command on {self._count} machine(s); first copy the credentials file to those that do "
            f"not share this folder:\n  {shlex.join(command)}",
            file=sys.stderr,
            flush=True,
        )

    def stop_agents(self) -> None:
        self._credentials.unlink(missing_ok=True)

    @property
    def _count(self) -> int:
        return self.launch.of(JoinSettings).agents

    @property
    def _credentials(self) -> Path:
        return self.job.logs.absolute() / "agent.json"


ENGINE = JoinEngine
