"""What goes wrong before a job starts: one sentence names the host and the cause, and nothing is left."""

import json
import os
import socket
from pathlib import Path

import pytest

from psfleet.core.net.connections.certificates import make_credentials
from psfleet_launch.engines.remote.agent_messages import invitation
from tests.agents.conftest import JOIN, JOINED, PSFLEET, TRAINER, TWO, Site
from tests.launch.conftest import ROOT, Launcher
from tests.programs import ended

pytestmark = JOINED
AGENTS = (*JOIN, "--agents", "2")


@pytest.fixture(params=["psfleet 9.9", "Python 3.99"])
def other_version(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """Another version, and a folder for PYTHONPATH in which programs have that one."""
    folder = tmp_path / "other"
    if request.param.startswith("psfleet"):
        (folder / "psfleet-9.9.dist-info").mkdir(parents=True)
        metadata = "Metadata-Version: 2.1\nName: psfleet\nVersion: 9.9\n"
        (folder / "psfleet-9.9.dist-info" / "METADATA").write_text(metadata)
    else:
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(
            "import platform; platform.python_version_tuple = lambda: ('3', '99', '0')\n"
        )
    return request.param, str(folder)


@pytest.fixture
def hidden(tmp_path: Path) -> list[str]:
    """What a command begins with that does not see the folder `data`."""
    if os.geteuid() != 0:
        pytest.skip("a machine without the script needs root, for a file system of its own")
    (tmp_path / "data").mkdir()
    mount = f"mount -t tmpfs none {tmp_path / 'data'}"
    return ["unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh"]


def refused(site: Site, code: int = 2) -> str:
    """What the launcher has said at its end."""
    found, _, err = site.ends(site.launchers[0])
    assert found == code, err
    return err.splitlines()[-1]


def test_another_version(site: Site, other_version: tuple[str, str]) -> None:
    """An agent of another version is sent away, and the launcher names its host and both versions."""
    theirs, folder = other_version
    launcher = site.start(*AGENTS, *TWO, TRAINER, "30")
    path = os.pathsep.join(map(str, [folder, *_paths()]))
    agent = site.join(launcher, "beta", "127.0.0.2", PYTHONPATH=path)
    expected = f"host beta: it has {theirs} and the launcher has "
    assert expected in refused(site)
    out, _ = agent.communicate(timeout=60)
    assert f"psfleet agent beta: the launcher has refused it: it has {theirs}" in out
    assert agent.returncode == 1


def _paths() -> list[Path]:
    return [ROOT, *(ROOT / name for name in ("server", "worker", "launch"))]


def test_a_script_that_is_missing_on_a_machine(
    site: Site, hidden: list[str], tmp_path: Path
) -> None:
    """The launcher names the host that does not have the script."""
    script = tmp_path / "data" / "train.py"
    script.write_text("")
    launcher = site.start(*AGENTS, *TWO, str(script))
    site.join(launcher, "alpha", "127.0.0.2")
    site.join(launcher, "beta", "127.0.0.3", *hidden)
    assert f"host beta: script '{script}' does not exist; name a Python file" in refused(site)


def test_what_no_machine_has_room_for(site: Site) -> None:
    """Agents say what their machines have; a worker that fits on none is refused before anything starts."""
    site.launch(*TWO, "--worker-cores", "100000", TRAINER, "30")
    said = "worker 0 needs 100000 cores, and no machine has room for it: 'alpha' has most left, "
    assert said in refused(site)
    assert not any(path.stat().st_size for path in site.folder.glob("psfleet-logs/*/*log.*"))


def agent_says(site: Site, launcher: Launcher, code: int, name: str = "beta") -> str:
    """What an agent says that ends at once with this exit code."""
    agent = site.join(launcher, name, "127.0.0.2")
    out, _ = agent.communicate(timeout=150)
    assert agent.returncode == code, out
    return out


def test_credentials_that_are_not_good(site: Site, tmp_path: Path) -> None:
    """An agent does not use a file that is open to others, and says if it is of another job; the launcher
    does not hear of either and waits on. With this job's certificate and another token the launcher names
    the host, and the job ends."""
    launcher = site.start(*AGENTS, *TWO, TRAINER, "30")
    _, _, endpoint, _, file = site.invitation(launcher)
    path, good = Path(file), Path(file).read_text()
    path.chmod(0o644)
    output = agent_says(site, launcher, 2)
    assert "can be read by others than its owner; chmod 600 it" in output
    path.chmod(0o600)
    path.write_bytes(invitation(make_credentials(tmp_path / "other")["worker"]))
    output = agent_says(site, launcher, 2)
    assert f"the launcher at {endpoint} and this agent do not know each other" in output
    assert "it is of another job" in output
    credentials = json.loads(good)
    path.write_text(json.dumps(credentials | {"token": credentials["token"][::-1]}))
    assert "psfleet agent beta: its token is not this job's" in agent_says(site, launcher, 1)
    expected = (
        "the agent on host 127.0.0.1 has the certificate of this job with another token; copy"
    )
    assert expected in refused(site)


AHEAD = """
import datetime
import psfleet.core.net.connections.certificates as certificates
certificates._SKEW -= datetime.timedelta(hours=2)
"""


def test_clocks_that_differ(site: Site, tmp_path: Path) -> None:
    """The launcher's clock is two hours ahead, as its certificates show: the agent says what to compare."""
    (tmp_path / "ahead").mkdir()
    (tmp_path / "ahead" / "sitecustomize.py").write_text(AHEAD)
    path = os.pathsep.join(map(str, [tmp_path / "ahead", *_paths()]))
    said = agent_says(site, site.start(*AGENTS, *TWO, TRAINER, "30", PYTHONPATH=path), 2)
    assert "do not know each other: the server's certificate is not good here: " in said
    assert "it is not valid yet; compare the hosts' clocks" in said


def test_workers_credentials_are_not_an_agents(site: Site) -> None:
    """Processes of the job cannot become agents: the control connection has an authority of its own."""
    launcher = site.launch(*TWO, TRAINER, "100000", "0.05")
    launcher.until_logged("workerlog.1", "step 1")
    words = Path(f"/proc/{launcher.pid_of('worker', 0)}/environ").read_text().split("\0")
    tls = next(word.partition("=")[2] for word in words if word.startswith("PSFLEET_TLS="))
    _, _, _, _, path = site.invitation(launcher)
    Path(path).write_bytes(invitation(Path(tls)))
    assert "it is of another job" in agent_says(site, launcher, 2, "gamma")


def test_two_machines_of_one_name(site: Site) -> None:
    """The second agent of a name is sent away with a hint; the first one stays."""
    launcher = site.start(*AGENTS, *TWO, TRAINER, "30")
    site.join(launcher, "alpha", "127.0.0.2")
    launcher.until(lambda: len(launcher.family()) > 2, "agent")
    agents = [site.join(launcher, "alpha", "127.0.0.3"), site.agents[0]]
    launcher.until(lambda: any(one.poll() is not None for one in agents), "refusal")
    out = "".join(one.communicate()[0] for one in agents if one.poll() is not None)
    assert "another agent is called 'alpha'; give each a --name of its own" in out


def test_agents_that_do_not_come(site: Site) -> None:
    """The launcher gives up in time and says of whom it has heard."""
    site.start(*AGENTS, "--start-timeout", "2s", *TWO, TRAINER, "30")
    assert "2 agents were not there within 2 s; heard of: none" in refused(site)


def test_a_launcher_that_is_not_there(site: Site) -> None:
    """The agent says in one sentence that nobody answers."""
    path = site.folder / "agent.json"
    path.touch(0o600)
    path.write_bytes(invitation(make_credentials(site.folder / "other")["worker"]))
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nobody listens
        endpoint = f"127.0.0.1:{bound.getsockname()[1]}"
        command = [*PSFLEET, "agent", "--join", endpoint, "--credentials", str(path)]
        process = ended(command)
    assert process.returncode == 2
    assert (
        f"psfleet: the launcher at {endpoint} cannot be reached; check the address"
        in process.stderr
    )
