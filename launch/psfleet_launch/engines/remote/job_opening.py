"""The opening of a job on all machines: agents start, say what they are, and check their connections.

Agents that a local command starts, as `ssh` and `srun` do, read their credentials from its standard input,
which then stays open: the end of that input is the end of the agents, even where the end of the command
itself is not.

Without the check of connections workers behind a firewall would try for minutes, and their error would name
no machine. Only the first start of a rank is checked: later the network has shown that it works, and an
interruption is no reason to end the job.
"""

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.settings.kinds import url_of
from psfleet_launch.engines.remote.agent_messages import (
    Opened,
    OpenJob,
    secrets_of,
    user_variables,
    write_request,
)
from psfleet_launch.engines.remote.machine_placement import MachinePlacement
from psfleet_launch.job.guard import MARKER
from psfleet_launch.job.job_plan import Job, Member
from psfleet_launch.supervision.job_events import ServerReady, ServerUnreachable

if TYPE_CHECKING:
    from psfleet_launch.engines.remote.agent_hub import AgentConnection

_AGENT = ("-m", "psfleet_launch.commands.psfleet_cli", "agent", "--credentials", "-")
_GRACE = 5.0  # seconds for the command to end by itself


def agent_command(endpoint: str, python: str = "") -> list[str]:
    """The command of an agent that reads its credentials from standard input.

    Args:
        python: On the machine of the agent; empty: at the path of this one's.
    """
    return [python or sys.executable, *_AGENT, "--join", endpoint]


class AgentStarter:
    """The command while it runs.

    Args:
        output: The file that takes what the command and its agents write.
        token: Token of the job, so that the guard finds the command.
    """

    def __init__(self, command: Sequence[str], invitation: bytes, output: Path, token: str) -> None:
        self._output = output
        environment: Mapping[str, str] = {**os.environ, MARKER: token}
        with output.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the launcher
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; `lines` say why
            self._process.stdin.write(invitation)
            self._process.stdin.flush()

    @property
    def exit_code(self) -> int | None:
        """Exit code of the command; None: it runs."""
        return self._process.poll()

    def lines(self) -> list[str]:
        """Return the output of the command and its agents, without empty lines."""
        lines = self._output.read_text(errors="replace").split("\n")
        return [line.strip() for line in lines if line.strip()]

    def let_go(self) -> None:
        """Close the standard input of the agents."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def wait(self) -> None:
        """Wait for the end of the command, for a moment; then kill it."""
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class JobOpening:
    """The job as sent to agents, and their replies."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.replies: dict[str, Opened] = {}

    @contextlib.contextmanager
    def told(
        self, agents: "Mapping[str, AgentConnection]", places: MachinePlacement
    ) -> Iterator[None]:
        """Send the job to all agents; meanwhile a file shows them whether they share the logs."""
        probe = self._job.logs / f".probe.{secrets.token_hex(8)}"
        probe.touch()
        secret, request = secrets_of(self._job), write_request(self._job.request)
        for name, agent in agents.items():
            opened = OpenJob(
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
            agent.send(opened)
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
            endpoint: check
            for endpoint, check in self._checks.items()
            if check.ready.member != member
        }


def _advice(machine: str, check: _Check, error: str) -> str:
    member, endpoint = check.ready.member, check.ready.endpoint
    return (
        f"host {machine} cannot connect to {member} on host {check.host} at {endpoint} ({error}); "
        f"let firewalls pass TCP from {machine} to the ports of servers on {check.host} (--port)"
    )
