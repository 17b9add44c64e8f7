"""What goes wrong before a job starts: one sentence names the host and the cause, and nothing is left."""

import json
import os
import socket
from pathlib import Path

import pytest

from psfleet.wire.certificates import make_credentials
from psfleet_launch.engines.remote.agent_messages import invitation
from tests.agents.conftest import PSFLEET, TRAINER, TWO, Site
from tests.programs import ended

JOIN = ("--engine", "join", "--agents", "2", "--listen", "127.0.0.1")


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
    mount = f"mount -t tmpfs none {tmp_path / 'data'} && exec "
    return ["unshare", "--mount", "sh", "-c", f'{mount} "$@"', "sh"]


@pytest.fixture(params=["join"], scope="session")
def engine(request: pytest.FixtureRequest) -> tuple[str, None]:
    """Agents that join, where each test starts them by itself."""
    return request.param, None


def refused(site: Site, code: int = 2) -> str:
    """What the launcher has said at its end."""
    found, _, err = site.ends(site.launchers[0])
    assert found == code, err
    return err.splitlines()[-1]


def test_another_version(site: Site, other_version: tuple[str, str]) -> None:
    """An agent of another version is sent away, and the launcher names its host and both versions."""
    theirs, folder = other_version
    launcher = site.start(*JOIN, *TWO, TRAINER, "30")
    path = os.pathsep.join(map(str, [folder, *_paths()]))
    agent = site.join(launcher, "beta", "127.0.0.2", PYTHONPATH=path)
    expected = f"host beta: it has {theirs} and the launcher has "
    assert expected in refused(site)
    out, _ = agent.communicate(timeout=60)
    assert f"psfleet agent beta: the launcher has refused it: it has {theirs}" in out
    assert agent.returncode == 1


def _paths() -> list[Path]:
    from tests.launch.conftest import ROOT

    return [ROOT, *(ROOT / name for name in ("server", "worker", "launch"))]


def test_a_script_that_is_missing_on_a_machine(
    site: Site, hidden: list[str], tmp_path: Path
) -> None:
    """The launcher names the host that does not have the script."""
    script = tmp_path / "data" / "train.py"
    script.write_text("")
    launcher = site.start(*JOIN, *TWO, str(script))
    site.join(launcher, "alpha", "127.0.0.2")
    site.join(launcher, "beta", "127.0.0.3", *hidden)
    assert f"host beta: script '{script}' does not exist; name a Python file" in refused(site)


def test_what_no_machine_has_room_for(site: Site) -> None:
    """Agents say what their machines have; a worker that fits on none is refused before anything starts."""
    launcher = site.start(*JOIN, *TWO, "--worker-cores", "100000", TRAINER, "30")
    for number, name in enumerate(("alpha", "beta")):
        site.join(launcher, name, f"127.0.0.{number + 2}")
    said = "worker 0 needs 100000 cores, and no machine has room for it: 'alpha' has most left, "
    assert said in refused(site)
    assert not any(path.stat().st_size for path in site.folder.glob("psfleet-logs/*/*log.*"))


def test_credentials_of_another_job(site: Site, tmp_path: Path) -> None:
    """An agent with another job's credentials says so; the launcher does not hear of it and waits on."""
    launcher = site.start(*JOIN, "--start-timeout", "60s", *TWO, TRAINER, "30")
    _, _, endpoint, _, path = site.invitation(launcher)
    Path(path).write_bytes(invitation(make_credentials(tmp_path / "other")["worker"]))
    agent = site.join(launcher, "beta", "127.0.0.2")
    out, _ = agent.communicate(timeout=60)
    assert f"the launcher at {endpoint} and this agent do not know each other" in out
    assert "it is of another job" in out
    assert agent.returncode == 2


def test_another_token(site: Site) -> None:
    """The certificate is this job's and the token is not: the launcher names the host, and the job ends."""
    launcher = site.start(*JOIN, *TWO, TRAINER, "30")
    path = Path(site.invitation(launcher)[4])
    credentials = json.loads(path.read_text())
    credentials["token"] = credentials["token"][::-1]
    path.write_text(json.dumps(credentials))
    agent = site.join(launcher, "beta", "127.0.0.2")
    expected = (
        "the agent on host 127.0.0.1 has the certificate of this job with another token; copy"
    )
    assert expected in refused(site)
    out, _ = agent.communicate(timeout=60)
    assert "psfleet agent beta: its token is not this job's" in out
    assert agent.returncode == 1


AHEAD = """
import datetime
import psfleet.wire.certificates as certificates
certificates._SKEW -= datetime.timedelta(hours=2)
"""


def test_clocks_that_differ(site: Site, tmp_path: Path) -> None:
    """The launcher's clock is two hours ahead, as its certificates show: the agent says what to compare."""
    (tmp_path / "ahead").mkdir()
    (tmp_path / "ahead" / "sitecustomize.py").write_text(AHEAD)
    path = os.pathsep.join(map(str, [tmp_path / "ahead", *_paths()]))
    launcher = site.start(*JOIN, *TWO, TRAINER, "30", PYTHONPATH=path)
    agent = site.join(launcher, "beta", "127.0.0.2")
    out, _ = agent.communicate(timeout=60)
    assert "do not know each other: the server's certificate is not good here: " in out
    assert "it is not valid yet; compare the hosts' clocks" in out
    assert agent.returncode == 2


def test_workers_credentials_are_not_an_agents(site: Site) -> None:
    """Processes of the job cannot become agents: the control connection has an authority of its own."""
    launcher = site.start(*JOIN, *TWO, TRAINER, "100000", "0.05")
    for number, name in enumerate(("alpha", "beta")):
        site.join(launcher, name, f"127.0.0.{number + 2}")
    launcher.until_logged("workerlog.1", "step 1")
    words = Path(f"/proc/{launcher.pid_of('worker', 0)}/environ").read_text().split("\0")
    tls = next(word.partition("=")[2] for word in words if word.startswith("PSFLEET_TLS="))
    _, _, _, _, path = site.invitation(launcher)
    Path(path).write_bytes(invitation(Path(tls)))
    agent = site.join(launcher, "gamma", "127.0.0.4")
    out, _ = agent.communicate(timeout=60)
    assert agent.returncode == 2
    assert "it is of another job" in out


def test_ray_is_not_installed(site: Site, tmp_path: Path) -> None:
    """Nothing starts, and the launcher says what to install."""
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "sitecustomize.py").write_text("import sys; sys.modules['ray'] = None\n")
    folders = [tmp_path / "none", *_paths()]
    path = os.pathsep.join(map(str, folders))
    site.start("--engine", "ray", "--listen", "127.0.0.1", *TWO, TRAINER, "30", PYTHONPATH=path)
    assert "--engine ray needs Ray; pip install 'psfleet[ray]'" in refused(site)


def test_two_machines_of_one_name(site: Site) -> None:
    """The second agent of a name is sent away with a hint; the first one stays."""
    launcher = site.start(*JOIN, *TWO, TRAINER, "30")
    site.join(launcher, "alpha", "127.0.0.2")
    launcher.until(lambda: len(launcher.family()) > 2, "agent")
    agents = [site.join(launcher, "alpha", "127.0.0.3"), site.agents[0]]
    launcher.until(lambda: any(one.poll() is not None for one in agents), "refusal")
    out = "".join(one.communicate()[0] for one in agents if one.poll() is not None)
    assert "another agent is called 'alpha'; give each a --name of its own" in out


def test_agents_that_do_not_come(site: Site) -> None:
    """The launcher gives up in time and says of whom it has heard."""
    site.start(*JOIN, "--start-timeout", "2s", *TWO, TRAINER, "30")
    assert "2 agents were not there within 2 s; heard of: none" in refused(site)


def test_a_launcher_that_is_not_there(tmp_path: Path) -> None:
    """The agent says in one sentence that nobody answers."""
    path = tmp_path / "agent.json"
    path.touch(0o600)
    path.write_bytes(invitation(make_credentials(tmp_path / "other")["worker"]))
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nobody listens
        endpoint = f"127.0.0.1:{bound.getsockname()[1]}"
        command = [*PSFLEET, "agent", "--join", endpoint, "--credentials", str(path)]
        done = ended(command)
    assert done.returncode == 2
    assert (
        f"psfleet: the launcher at {endpoint} cannot be reached; check the address" in done.stderr
    )


def test_credentials_that_others_can_read(site: Site) -> None:
    """An agent does not use a file that is open to others."""
    launcher = site.start(*JOIN, *TWO, TRAINER, "30")
    Path(site.invitation(launcher)[4]).chmod(0o644)
    agent = site.join(launcher, "alpha", "127.0.0.2")
    out, _ = agent.communicate(timeout=60)
    assert "can be read by others than its owner; chmod 600 it" in out
    assert agent.returncode == 2
