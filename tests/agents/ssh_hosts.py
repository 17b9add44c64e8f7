"""Machines of a test with an sshd each."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.agents.machines import NAMES, NETWORK, Lab, has, laboratory, run
from tests.waiting import until

_SSHD = "/usr/sbin/sshd"


def ssh_options(lab: Lab) -> str:
    """The value of --ssh-options."""
    return f"-F,{lab.folder / 'ssh_config'}"


@contextlib.contextmanager
def ssh_hosts(folder: Path) -> Iterator[Lab]:
    """Make the machines; skip by name where that cannot be done."""
    has("ssh", ("ssh", "ssh-keygen", _SSHD), "iproute2, openssh-server")
    with laboratory(folder) as lab, contextlib.ExitStack() as stack:
        _make_keys(lab)
        for number in range(1, len(NAMES) + 1):
            stack.enter_context(_sshd(lab, number))
        yield lab


def _make_keys(lab: Lab) -> None:
    for name in ("host", "user", "stranger"):
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(lab.folder / name))
    hosts = "".join(
        f"Host {name}\n HostName {NETWORK}.{number + 2}\n" for number, name in enumerate(NAMES)
    )
    common = "Host *\n Port 2222\n User root\n StrictHostKeyChecking no\n LogLevel ERROR\n"
    common += " UserKnownHostsFile /dev/null\n SendEnv PSFLEET_TEST\n IdentitiesOnly yes\n"
    for config, key in (("ssh_config", "user"), ("stranger_config", "stranger")):
        identity = f" IdentityFile {lab.folder / key}\n"
        (lab.folder / config).write_text(
            f"{hosts}Host away\n HostName {NETWORK}.99\n{common}{identity}"
        )


@contextlib.contextmanager
def _sshd(lab: Lab, number: int) -> Iterator[None]:
    Path("/run/sshd").mkdir(exist_ok=True)  # where it separates privileges
    config = lab.folder / f"sshd_config.{number}"
    address = f"{NETWORK}.{number + 1}"
    config.write_text(
        f"ListenAddress {address}:2222\nHostKey {lab.folder / 'host'}\nPidFile none\nUsePAM no\n"
        f"AuthorizedKeysFile {lab.folder / 'user.pub'}\nStrictModes no\nAcceptEnv PSFLEET_TEST\n"
        "PermitRootLogin prohibit-password\n"
    )
    command = [*lab.within(number), _SSHD, "-D", "-e", "-f", str(config)]
    with (lab.folder / f"sshd.{number}").open("w") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        until(lambda: _listens(lab, address) or process.poll() is not None, "sshd")
        assert process.poll() is None, (lab.folder / f"sshd.{number}").read_text()
        yield
    finally:
        process.terminate()
        process.wait()


def _listens(lab: Lab, address: str) -> bool:
    """Whether somebody answers on port 2222, as the launcher sees it."""
    probe = f"import socket; socket.create_connection(({address!r}, 2222), 1).close()"
    command = [*lab.inside, "python3", "-c", probe]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
