"""A machine is lost with all of its processes, and the job goes on without it."""

import os
import signal

import pytest

from tests.agents.conftest import TRAINER, Site
from tests.launch.conftest import digest

ONE = ("--servers", "2", "--workers", "1", "--no-progress")
STEPS = (TRAINER, "30", "0.5")


@pytest.fixture(params=["join"], scope="session")
def engine(request: pytest.FixtureRequest) -> tuple[str, None]:
    """Agents that each test starts by itself."""
    return request.param, None


def test_a_job_goes_on_on_other_machines(site: Site) -> None:
    """The agent of server 1 is killed, and a standby takes over: no push is lost, so no bit changes."""
    plain = site.start(*ONE, TRAINER, "30")
    code, out, err = site.ends(plain)
    assert code == 0, err
    machines = ("--engine", "join", "--agents", "3", "--listen", "127.0.0.1")
    launcher = site.start(*machines, *ONE, "--replicas", "1", "--job", "lossy", *STEPS)
    for number, name in enumerate(("alpha", "beta", "gamma")):
        site.join(launcher, name, f"127.0.0.{number + 2}")
    launcher.until_logged("serverlog.1.copy.1", "standby 1 of server 1 ready")
    launcher.until_logged("workerlog.0", "step 5")
    os.kill(site.agent_pid(launcher, "beta"), signal.SIGKILL)
    code, found, err = site.ends(launcher)
    assert code == 0, err
    assert "the agent on host beta is lost: its connection has ended" in err
    assert "server 1 copy 1 takes over" in err
    assert digest(found) == digest(out)


def test_a_server_goes_on_from_a_shared_log(site: Site) -> None:
    """The agent of server 1 is killed; another machine goes on from its log: no bit changes."""
    plain = site.start(*ONE, TRAINER, "30")
    code, out, err = site.ends(plain)
    assert code == 0, err
    machines = ("--engine", "join", "--agents", "3", "--listen", "127.0.0.1")
    launcher = site.start(*machines, *ONE, "--durability", "log", "--job", "lossy", *STEPS)
    for number, name in enumerate(("alpha", "beta", "gamma")):
        site.join(launcher, name, f"127.0.0.{number + 2}")
    launcher.until(lambda: "lossy/workerlog.0" in _logged(site, "step 5"), "step 5")
    os.kill(site.agent_pid(launcher, "beta"), signal.SIGKILL)
    code, found, err = site.ends(launcher)
    assert code == 0, err
    assert "server 1 ended with signal 9; it goes on from its log (restart 1 of 5)" in err
    assert digest(found) == digest(out)


def _logged(site: Site, text: str) -> str:
    """The logs that hold a text."""
    logs = site.launchers[-1].folder.glob("psfleet-logs/*/*log.*")
    return " ".join(str(path) for path in logs if text in path.read_text(errors="replace"))
