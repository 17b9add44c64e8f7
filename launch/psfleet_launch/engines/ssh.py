"""Engine `ssh`: runs an agent on each machine through the user's `ssh` command, with one login per machine.

The user's ssh configuration, keys and jump hosts are used, and ssh checks host keys. sshd does not end a
command when the login is cut, so an agent ends when its standard input ends.
"""

import selectors
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from psfleet.core.base.errors import ConfigError
from psfleet.core.base.settings.declaration import setting
from psfleet_launch.engines.remote.job_opening import agent_command
from psfleet_launch.engines.remote.machine import address_towards
from psfleet_launch.engines.remote.remote_engine import RemoteEngine
from psfleet_launch.job.job_plan import Job
from psfleet_launch.job.job_request import Launch

_OPTIONS = ("-T", "-oBatchMode=yes", "-oConnectTimeout=8", "-oServerAliveInterval=5")


@dataclass(frozen=True)
class SshSettings:
    """Settings of engine ssh."""

    hosts: tuple[str, ...] = setting(
        (),
        "Engine ssh: machines, as `ssh` takes them",
        names="--hosts engine.ssh.hosts",
        metavar="HOST,...",
    )
    hostfile: str = setting(
        "",
        "Engine ssh: a file with one machine per line",
        names="--hostfile engine.ssh.hostfile",
        metavar="FILE",
    )
    remote_python: str = setting(
        "",
        "Engine ssh: Python on the machines; by default at the path of this machine's",
        names="--remote-python engine.ssh.python",
        metavar="PATH",
    )
    ssh_options: tuple[str, ...] = setting(
        (),
        "Engine ssh: arguments for `ssh`, as in -F,my_config",
        names="--ssh-options engine.ssh.options",
        metavar="OPTION,...",
    )


class SshEngine(RemoteEngine):
    """Engine that starts agents by ssh, with one login per machine that stays open."""

    name = "ssh"
    settings = SshSettings
    programs = ("ssh",)

    def __init__(
        self, job: Job, selector: selectors.BaseSelector, launch: Launch | None = None
    ) -> None:
        super().__init__(job, selector, launch)
        self._said = self.launch.of(SshSettings)

    def machines(self) -> Sequence[str]:
        hosts = [*self._said.hosts, *self._listed()]
        if not hosts:
            raise ConfigError("--engine ssh needs machines; name them with --hosts or --hostfile")
        for host in hosts:
            if hosts.count(host) > 1 or host.startswith("-"):
                why = "is named twice" if hosts.count(host) > 1 else "is no name of a machine"
                raise ConfigError(f"host {host!r} {why}; name each machine once, as ssh takes it")
        return hosts

    def _listed(self) -> list[str]:
        if not self._said.hostfile:
            return []
        try:
            lines = Path(self._said.hostfile).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--hostfile {self._said.hostfile!r} cannot be read: {error}"
            ) from None
        words = [line.partition("#")[0].split() for line in lines]
        return [match[0] for match in words if match]

    def default_address(self) -> str:
        """Return the address with which this machine connects to the first host. `ssh -G` gives its real
        name."""
        first = self.machines()[0]
        process = subprocess.run(
            ["ssh", "-G", *self._said.ssh_options, first],
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        names = [line.split()[1] for line in process.splitlines() if line.startswith("hostname ")]
        return address_towards(names[0] if names else first)

    def start_agents(self, endpoint: str, invitation: bytes) -> None:
        for number, host in enumerate(self.machines()):
            agent = [*agent_command(endpoint, self._said.remote_python), "--name", host]
            remote = f"exec {shlex.join(agent)}"
            command = ["ssh", *_OPTIONS, *self._said.ssh_options, "--", host, remote]
            self.start(f"ssh.{number}", command, invitation)

    def check_agents(self) -> None:
        for host, login in zip(self.machines(), self.starters.values(), strict=False):
            if login.exit_code is not None and host not in self.agents:
                sentence = f"ssh has ended with exit code {login.exit_code}"
                raise ConfigError(f"host {host}: {[sentence, *login.lines()][-1]}")


ENGINE = SshEngine
