"""Start of a job on remote machines: commands that start agents, the job's opening, and connection checks.

Agents that are started by a command on this machine, such as `ssh` or `srun`, read their credentials from
the command's standard input. The input stays open, and agents end when it is closed. (The end of the
command alone might not end them.)

When a server is ready for the first time, every machine tries to connect to it. Without this check, workers
behind a firewall would try for minutes, and their error would not name the machine. Later starts of the
server are not checked: the network has worked before, and a short interruption must not end the job.
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
    """Return the command of an agent that reads its credentials from standard input.

    Args:
        python: Path of Python on the agent's machine, or "" for the same path as on this machine.
    """
    return [python or sys.executable, *_AGENT, "--join", endpoint]


class AgentStarter:
    """Running command on this machine, such as `ssh` or `srun`, that starts one or several agents.

    Args:
        invitation: Credentials for the agents, written to the command's standard input.
        output: File for the output of the command and its agents.
        token: Token of the job, so that the guard can find the command.
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
                start_new_session=True,  # so that Ctrl-C reaches only the launcher
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the command has ended; `lines` says why
            self._process.stdin.write(invitation)
            self._process.stdin.flush()

    @property
    def exit_code(self) -> int | None:
        """Exit code of the command, or None while it is running."""
        return self._process.poll()

    def lines(self) -> list[str]:
        """Return the output of the command and its agents, without empty lines."""
        lines = self._output.read_text(errors="replace").split("\n")
        return [line.strip() for line in lines if line.strip()]

    def let_go(self) -> None:
        """Close the agents' standard input, so that they end."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def wait(self) -> None:
        """Wait some seconds until the command ends. If it does not, kill it."""
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class JobOpening:
    """Sends a job to all agents, and checks their replies."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.replies: dict[str, Opened] = {}

    @contextlib.contextmanager
    def told(
        self, agents: "Mapping[str, AgentConnection]", places: MachinePlacement
    ) -> Iterator[None]:
        """Context that sends the job to all agents. Inside, a file exists whose name they look for: agents
        that find it share the launcher's folder of logs.
        """
        probe = self._job.logs / f".probe.{secrets.token_hex(8)}"
        probe.touch()
        # Each agent gets a different token below, so that its sweep kills only its own processes. Several
        # agents may run on the same machine, for example with --engine ray.
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
        """Check the replies of all agents.

        Raises:
            ConfigError: A machine cannot run processes of the job, or servers would write a snapshot to
                different folders because the machines share none.
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
        """Check that a server can read its log if it starts on another machine.

        Raises:
            ConfigError: The machines do not share the folder of the logs.
        """
        if self._job.request.keeps_log and self.without_shared_logs:
            raise ConfigError(
                f"{member} cannot start on another machine, where its log is not; with --log-dir in a folder "
                "that all machines share it could"
            )

    @property
    def without_shared_logs(self) -> list[str]:
        """Names of the machines that do not share the launcher's folder of logs."""
        return [name for name, reply in self.replies.items() if not reply.has_shared_logs]


@dataclass
class _Check:
    """Connection check of one server. `missing` has the machines that have not replied yet."""

    ready: ServerReady
    host: str
    missing: set[str]


class ConnectionChecks:
    """Connection checks of one job: whether every machine can connect to every server."""

    def __init__(self) -> None:
        self._ranks: set[int] = set()
        self._checks: dict[str, _Check] = {}  # by endpoint

    def begin(self, ready: ServerReady, host: str, machines: Iterable[str]) -> bool:
        """Begin the check of a server that listens, if it is the first start of a server with this rank.

        Returns:
            True if the machines must try to connect now. The server is ready when every machine has
            succeeded.
        """
        if ready.member.rank in self._ranks:
            return False
        self._ranks.add(ready.member.rank)
        self._checks[ready.endpoint] = _Check(ready, host, set(machines))
        return True

    def answered(
        self, machine: str, endpoint: str, error: str
    ) -> Iterator[ServerReady | ServerUnreachable]:
        """Record a machine's reply, and yield the result of the check if it is complete.

        Args:
            error: Reason why the machine cannot connect, or "".
        """
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
        """Stop waiting for the replies of a lost machine, and yield the results of checks that are complete
        now."""
        for endpoint in list(self._checks):
            yield from self.answered(machine, endpoint, "")

    def forget(self, member: Member) -> None:
        """Drop the check of a server whose process has ended."""
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
