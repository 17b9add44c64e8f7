"""Engine ssh on machines that are network namespaces: what ssh itself says, and cut networks."""

import json
import os
import signal

import pytest

from tests.agents.conftest import TRAINER, TWO, Site
from tests.agents.machines import NETWORK, Lab
from tests.agents.ssh_hosts import ssh_options
from tests.agents.test_engines import LONG
from tests.launch.conftest import ROOT


@pytest.fixture(params=["ssh"], scope="session")
def engine(request: pytest.FixtureRequest, lab: Lab) -> tuple[str, Lab]:
    """Only this engine."""
    return request.param, lab


def refused(site: Site, *arguments: str) -> str:
    """The one sentence of a job that cannot start."""
    assert site.lab is not None
    launcher = site.start("--engine", "ssh", *arguments, *TWO, TRAINER, "30")
    _, err = site.ends_with(2, launcher)
    return err.splitlines()[-1]


def test_a_host_that_cannot_be_reached(site: Site) -> None:
    """What ssh says of it is the cause."""
    assert site.lab is not None
    said = refused(site, "--hosts", "alpha,away", "--ssh-options", ssh_options(site.lab))
    assert "host away: ssh: connect to host 198.18.7.99 port 2222:" in said


def test_a_host_that_cannot_reach_the_launcher(site: Site) -> None:
    """A firewall of the host lets logins in and no connection out."""
    assert site.lab is not None
    with site.lab.blocked("beta", "OUTPUT", "--jump", "DROP"):
        said = refused(site, "--hosts", "alpha,beta", "--ssh-options", ssh_options(site.lab))
    assert f"host beta: psfleet: the launcher at {NETWORK}.1:" in said
    assert "cannot be reached; check the address, the network" in said


def test_a_key_that_a_host_does_not_know(site: Site) -> None:
    """ssh is not let in; nobody is asked for a password."""
    assert site.lab is not None
    stranger = ssh_options(site.lab).replace("ssh_config", "stranger_config")
    said = refused(site, "--hosts", "alpha", "--ssh-options", stranger)
    assert "host alpha: root@198.18.7.2: Permission denied (publickey" in said


def test_a_python_that_is_missing_on_a_host(site: Site) -> None:
    """The host's shell says what it does not find."""
    assert site.lab is not None
    options = ("--ssh-options", ssh_options(site.lab), "--remote-python", "/no/python")
    assert "/no/python" in refused(site, "--hosts", "alpha", *options)


def test_hosts_must_be_named(site: Site) -> None:
    """Without hosts, or with one twice, nothing starts."""
    assert "needs machines; name them with --hosts or --hostfile" in refused(site)
    site.launchers.clear()
    assert "host 'alpha' is named twice" in refused(site, "--hosts", "alpha,alpha")


def test_a_killed_login_is_the_first_cause(site: Site) -> None:
    """Without its login an agent ends by itself, and all of its processes with it."""
    launcher = site.launch(*TWO, *LONG)
    launcher.until_logged("workerlog.1", "step 9")
    login = next(
        pid
        for pid, line in launcher.family().items()
        if line.startswith("ssh ") and "--name beta" in line
    )
    os.kill(login, signal.SIGKILL)
    _, err = site.ends_with(128 + signal.SIGKILL, launcher)
    assert "failed first: the agent on host beta is lost: its standard input has ended" in err


def test_a_cut_network_ends_the_job(site: Site) -> None:
    """When a machine is cut off, both sides give each other up, and nothing runs on either."""
    assert site.lab is not None
    launcher = site.launch(*TWO, *LONG)
    launcher.until_logged("workerlog.1", "step 9")
    site.lab.cut("beta")
    try:
        code, _, err = site.ends(launcher)
        launcher.until(lambda: not launcher.family(), "end of the family")
    finally:
        site.lab.cut("beta", is_up=True)
    assert code == 128 + signal.SIGKILL, err
    assert "failed first: the agent on host beta is lost: " in err


@pytest.mark.timeout(600)
def test_chaos_on_several_machines(site: Site) -> None:
    """Servers and standbys are killed, paused and hang on both machines: every promise is kept."""
    options = ("--chaos", "3", "--chaos-pace", "2", "--replicas", "1", "--hung-after", "2s")
    script = str(ROOT / "tests" / "chaos" / "scripts" / "trainer.py")
    launcher = site.launch(*TWO, *options, "--job", "j", script, "sync", "4")
    site.ends_with(0, launcher)
    report = json.loads((site.folder / "psfleet-logs" / "j" / "chaos.json").read_text())
    kept = {one["promise"][0] for one in report["promises"] if one["verdict"] == "kept"}
    assert kept >= {"1", "2", "7"}, report
    assert report["faults"]
