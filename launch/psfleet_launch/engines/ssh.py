"""The engine of machines that the user's own ssh reaches: one login per machine, which runs an agent.

The user's configuration, keys, agents and jump hosts apply; psfleet never looks at known hosts. The agent
reads its credentials from standard input, which then stays open: sshd does not end a command whose login
was cut, but the end of its standard input does.
"""

import contextlib
import os
import selectors
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from psfleet.errors import ConfigError
from psfleet_launch.engines.remote.addresses import address_towards
from psfleet_launch.engines.remote.remote_engine import RemoteEngine
from psfleet_launch.job.guard import MARKER
from psfleet_launch.job.job_plan import Job
from psfleet_launch.job.job_request import Launch

__all__ = ["ENGINE", "SshEngine"]

_OPTIONS = ("-T", "-oBatchMode=yes", "-oConnectTimeout=8", "-oServerAliveInterval=5")
_AGENT = ("-m", "psfleet_launch.commands.psfleet_cli", "agent", "--credentials", "-")
_GRACE = 5.0  # seconds for logins to end by themselves


class SshEngine(RemoteEngine):
    """Holds one login per machine."""

    name = "ssh"

    def __init__(
        self, job: Job, selector: selectors.BaseSelector, launch: Launch | None = None
    ) -> None:
        super().__init__(job, selector, launch)
        self._logins: dict[str, subprocess.Popen[bytes]] = {}

    def machines(self) -> Sequence[str]:
        hosts = [*self.launch.hosts, *self._listed()]
        if not hosts:
            raise ConfigError("--engine ssh needs machines; name them with --hosts or --hostfile")
        for host in hosts:
            if hosts.count(host) > 1 or host.startswith("-"):
                why = "is named twice" if hosts.count(host) > 1 else "is no name of a machine"
                raise ConfigError(f"host {host!r} {why}; name each machine once, as ssh takes it")
        return hosts

    def _listed(self) -> list[str]:
        """The hosts of the hostfile."""
        if not self.launch.hostfile:
            return []
        try:
            lines = Path(self.launch.hostfile).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--hostfile {self.launch.hostfile!r} cannot be read: {error}"
            ) from None
        words = [line.partition("#")[0].split() for line in lines]
        return [found[0] for found in words if found]

    def default_address(self) -> str:
        """The address that faces the first host."""
        first = self.machines()[0]
        told = subprocess.run(
            ["ssh", "-G", *self.launch.ssh_options, first],
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        names = [line.split()[1] for line in told.splitlines() if line.startswith("hostname ")]
        return address_towards(names[0] if names else first)

    def start_agents(self, endpoint: str, invitation: bytes) -> None:
        for host in self.machines():
            self._logins[host] = self._log_in(host, endpoint)
            stdin = self._logins[host].stdin
            assert stdin is not None
            try:
                stdin.write(invitation)
                stdin.flush()
            except BrokenPipeError:  # it has ended; check_agents says why
                continue

    def _log_in(self, host: str, endpoint: str) -> "subprocess.Popen[bytes]":
        python = self.launch.remote_python or sys.executable
        remote = shlex.join([python, *_AGENT, "--join", endpoint, "--name", host])
        command = ["ssh", *_OPTIONS, *self.launch.ssh_options, "--", host, f"exec {remote}"]
        with self._said_by(host).open("wb") as said:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
                env={**os.environ, MARKER: self.job.token},  # so the guard finds it
                start_new_session=True,  # Ctrl-C is for the launcher
            )

    def check_agents(self) -> None:
        for host, login in self._logins.items():
            if login.poll() is not None and host not in self.agents:
                lines = self._said_by(host).read_text(errors="replace").split("\n")
                said = [line.strip() for line in lines if line.strip()]
                why = said[-1] if said else f"ssh has ended with exit code {login.returncode}"
                raise ConfigError(f"host {host}: {why}")

    def _said_by(self, host: str) -> Path:
        """The file of what a login writes: messages of ssh and of the agent."""
        return self.job.folder / f"ssh.{self.machines().index(host)}"

    def stop_agents(self) -> None:
        for login in self._logins.values():
            assert login.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                login.stdin.close()
        for login in self._logins.values():
            try:
                login.wait(_GRACE)
            except subprocess.TimeoutExpired:
                login.kill()
                login.wait()


ENGINE = SshEngine
