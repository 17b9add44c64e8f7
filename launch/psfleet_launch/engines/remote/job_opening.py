"""What every machine is told of a job before its first process, and whether it can take part."""

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from psfleet.errors import ConfigError
from psfleet.wire.v1 import agent_pb2 as pb
from psfleet_launch.engines.remote.agent_messages import secrets_of, user_variables, write_request
from psfleet_launch.engines.remote.machine_placement import MachinePlacement
from psfleet_launch.job.job_plan import Job

if TYPE_CHECKING:  # it loads gRPC
    from psfleet_launch.engines.remote.agent_hub import AgentConnection

__all__ = ["JobOpening"]


class JobOpening:
    """The job as agents are told of it, and their answers.

    Attributes:
        answers: By name of the machine.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.answers: dict[str, pb.Opened] = {}

    @contextlib.contextmanager
    def told(
        self, agents: "Mapping[str, AgentConnection]", places: MachinePlacement
    ) -> Iterator[None]:
        """Tell all agents of the job; while they answer, a file shows them whether they share the logs."""
        probe = self._job.logs / f".probe.{secrets.token_hex(8)}"
        probe.touch()
        secret, request = secrets_of(self._job), write_request(self._job.request)
        for name, agent in agents.items():
            opened = pb.OpenJob(
                request=request,
                name=self._job.name,
                token=f"{self._job.token}-{name}",
                working_folder=os.getcwd(),
                logs=str(self._job.logs.absolute()),
                variables={**user_variables(), **self._job.variables},
                credentials=secret,
                workers=sum(member.role == "worker" for member in places.on(name)),
                probe=probe.name,
            )
            agent.send(pb.LauncherMessage(open=opened))
        try:
            yield
        finally:
            probe.unlink()

    def check(self) -> None:
        """Refuse a machine that cannot take part, and snapshots whose parts would lie in different folders.

        Raises:
            ConfigError: The text names the host.
        """
        for name, said in self.answers.items():
            if said.error:
                raise ConfigError(f"host {name}: {said.error}")
        alone = [name for name, said in self.answers.items() if not said.shares_logs]
        if alone and self._job.request.keeps_snapshots:
            raise ConfigError(
                f"host {alone[0]}: {str(self._job.logs.absolute())!r} is not the launcher's folder there, "
                "and a snapshot needs all its parts in one; name a shared folder with --log-dir"
            )

    @property
    def shares_logs(self) -> bool:
        """Whether the folder of logs is the same on all machines."""
        return all(said.shares_logs for said in self.answers.values())
