"""By which addresses the machines of a job reach each other."""

import subprocess
import sys
from pathlib import Path

import pytest

from psfleet.core.base.errors import ConfigError
from psfleet_launch.engines.remote.machine import (
    address_towards,
    listen_endpoint,
    read_addresses,
    set_addresses,
)
from tests.agents.conftest import JOINED, TRAINER, Site
from tests.agents.machines import NETWORK, Lab, run
from tests.agents.test_lost_machines import ALONE
from tests.launch.conftest import digest
from tests.programs import ended

SIX, OTHER = "fd00:7", "198.18.8"
JOB = ("--servers", "2", "--workers", "1", "--no-progress", "--job", "addressed")


@pytest.mark.parametrize(
    ("said", "endpoint"),
    [
        ("192.0.2.1", "192.0.2.1:0"),
        ("192.0.2.1:80", "192.0.2.1:80"),
        ("fd00::1", "[fd00::1]:0"),
        ("[fd00::1]", "[fd00::1]:0"),
        ("[fd00::1]:80", "[fd00::1]:80"),
        ("a.example", "a.example:0"),
    ],
)
def test_an_address_need_not_name_a_port(said: str, endpoint: str) -> None:
    """--listen takes names and addresses of both kinds, with and without a port."""
    assert listen_endpoint(said) == endpoint


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_an_address_of_ipv6_has_brackets(host: str) -> None:
    """A port may follow it."""
    assert address_towards(host) == "[::1]"


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (["alpha"], r"--addresses says 'alpha'; write HOST=ADDRESS"),
        (["=10.0.0.1"], r"--addresses says '=10.0.0.1'; write HOST=ADDRESS"),
        (["a=10.0.0.1", "a=10.0.0.2"], r"--addresses names host 'a' twice; give each machine one"),
        (["b=10.0.0.1"], r"--addresses names host 'b'; the machines of this job are none"),
    ],
)
def test_wrong_addresses_are_refused(said: list[str], sentence: str) -> None:
    """In a sentence that quotes them."""
    with pytest.raises(ConfigError, match=sentence):
        set_addresses(read_addresses(said), {})


def test_a_name_with_an_address_of_ipv6_alone(tmp_path: Path) -> None:
    """The launcher finds the address of its machine's name; those of this machine alone do not count."""
    hosts = tmp_path / "hosts"
    hosts.write_text(f"::1 six\nfe80::1 six\n{SIX}::9 six\n")
    code = "from psfleet_launch.engines.remote.machine import own_address\nprint(own_address())"
    inside = f'hostname six; mount --bind {hosts} /etc/hosts; exec "$@"'
    prefix = ["unshare", "--uts", "--mount", "sh", "-ec", inside, "sh"]
    if subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode:
        pytest.skip("another name for this machine needs root")
    process = ended([*prefix, sys.executable, "-c", code])
    assert process.stdout == f"[{SIX}::9]\n", process.stderr


def train(site: Site, machines: Lab, listen: str, *options: str) -> list[str]:
    """Where the servers of a job on these machines have listened; it ends with the usual bits."""
    site.lab = machines
    engine = ("--engine", "join", "--agents", "2", "--listen", listen, *options)
    launcher = site.start(*engine, *JOB, TRAINER, "30")
    for number, name in enumerate(machines.hosts, 1):
        site.join(launcher, name, "", *machines.within(number))
    out, _ = site.ends_with(0, launcher)
    assert digest(out) == ALONE
    logs = [launcher.log(f"serverlog.{rank}") for rank in (0, 1)]
    return [log.partition(" ready at ")[2].partition(" (")[0].rpartition(":")[0] for log in logs]


@pytest.mark.long
@JOINED
def test_machines_may_have_ipv6_alone(site: Site, pair: Lab) -> None:
    """Launcher, agents, servers and workers reach each other over it, for calls and for tensors."""
    for number in range(3):
        device = ("dev", "eth0")
        run(*pair.within(number), "ip", "-4", "address", "flush", *device)
        own = f"{SIX}::{number + 1}/64"
        run(*pair.within(number), "ip", "-6", "address", "add", own, *device, "nodad")
    assert train(site, pair, f"{SIX}::1") == [f"[{SIX}::2]", f"[{SIX}::3]"]


@JOINED
def test_machines_may_have_two_networks(site: Site, pair: Lab) -> None:
    """Servers listen at the addresses that the job names for their machines, on whatever engine; agents reach
    the launcher over the other network."""
    for number in range(3):
        own = f"{OTHER}.{number + 1}/24"
        run(*pair.within(number), "ip", "address", "add", own, "dev", "eth0")
    addresses = ",".join(f"{host}={OTHER}.{n}" for n, host in enumerate(pair.hosts, 2))
    actual = train(site, pair, f"{NETWORK}.1", "--addresses", addresses)
    assert actual == [f"{OTHER}.2", f"{OTHER}.3"]
