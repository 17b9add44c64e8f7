"""The opening of a job on all machines: first messages, and checks of connections.

Without this check workers behind a firewall would try for minutes, and their error would name no machine.
Only the first start of a rank is checked: later the network has shown that it works, and an interruption
is no reason to end the job.
"""

import contextlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from psfleet.errors import ConfigError
from psfleet.settings.kinds import url_of
from psfleet.wire.v1 import agent_pb2 as pb
from psfleet_launch.engines.remote.agent_messages import secrets_of, user_variables, write_request
from psfleet_launch.engines.remote.machine_placement import MachinePlacement
from psfleet_launch.job.job_plan import Job, Member
from psfleet_launch.supervision.job_events import ServerReady, ServerUnreachable

if TYPE_CHECKING:
    from psfleet_launch.engines.remote.agent_hub import AgentConnection


class JobOpening:
    """The job as sent to agents, and their replies."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.replies: dict[str, pb.Opened] = {}

    @contextlib.contextmanager
    def told(
        self, agents: "Mapping[str, AgentConnection]", places: MachinePlacement
    ) -> Iterator[None]:
        """Send the job to all agents; meanwhile a file shows them whether they share the logs."""
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
        for name, reply in self.replies.items():
            if reply.error:
                raise ConfigError(f"host {name}: {reply.error}")
        alone, request = self.without_shared_logs, self._job.request
        if alone and request.keeps_snapshots and url_of(request.snapshot_store) is None:
            raise ConfigError(
                f"host {alone[0]}: {str(self._job.logs.absolute())!r} is not the launcher's folder there, "
                "and a snapshot needs all its parts in one; name a shared folder with --log-dir, or a URL "
                "with --snapshot-store"
            )

    def check_log(self, member: Member) -> None:
        """Refuse to start a server on another machine without the log that it had.

        Raises:
            ConfigError: It has none there.
        """
        if self._job.request.keeps_log and self.without_shared_logs:
            raise ConfigError(
                f"{member} cannot start on another machine, where its log is not; with --log-dir in a folder "
                "that all machines share it could"
            )

    @property
    def without_shared_logs(self) -> list[str]:
        """The machines whose folder of logs is not the launcher's."""
        return [name for name, reply in self.replies.items() if not reply.has_shared_logs]


@dataclass
class _Check:
    """A check under way; `missing`: machines that have not answered."""

    ready: ServerReady
    host: str
    missing: set[str]


class ConnectionChecks:
    """The checks of one job."""

    def __init__(self) -> None:
        self._ranks: set[int] = set()
        self._checks: dict[str, _Check] = {}  # by endpoint

    def begin(self, ready: ServerReady, host: str, machines: Iterable[str]) -> bool:
        """A server listens; whether these machines must connect to it before it counts as ready."""
        if ready.member.rank in self._ranks:
            return False
        self._ranks.add(ready.member.rank)
        self._checks[ready.endpoint] = _Check(ready, host, set(machines))
        return True

    def answered(
        self, machine: str, endpoint: str, error: str
    ) -> Iterator[ServerReady | ServerUnreachable]:
        """A machine has tried; `error` is empty if it has connected."""
        check = self._checks.get(endpoint)
        if check is None:
            return
        if error:
            del self._checks[endpoint]
            yield ServerUnreachable(check.ready.member, _advice(machine, check, error))
            return
        check.missing.discard(machine)
        if not check.missing:
            yield self._checks.pop(endpoint).ready

    def lose(self, machine: str) -> Iterator[ServerReady | ServerUnreachable]:
        """Forget a machine that is gone: no server waits for its replies."""
        for endpoint in list(self._checks):
            yield from self.answered(machine, endpoint, "")

    def forget(self, member: Member) -> None:
        """Its process has ended."""
        self._checks = {
            where: one for where, one in self._checks.items() if one.ready.member != member
        }


def _advice(machine: str, check: _Check, error: str) -> str:
    member, endpoint = check.ready.member, check.ready.endpoint
    return (
        f"host {machine} cannot connect to {member} on host {check.host} at {endpoint} ({error}); "
        f"let firewalls pass TCP from {machine} to the ports of servers on {check.host} (--port)"
    )
