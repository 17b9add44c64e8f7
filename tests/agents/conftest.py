"""Jobs on several machines: the same tests run on every engine."""

import os
import re
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.agents.machines import NAMES, Lab, has, laboratory
from tests.agents.ray_cluster import RAY_HEAD, RAY_NODES, RAY_VARIABLES, ray_cluster
from tests.agents.slurm_cluster import cancel_all, slurm_cluster, slurm_variables
from tests.agents.ssh_hosts import ssh_hosts, ssh_options
from tests.launch.conftest import _MARK, ROOT, Launcher, _environment, _words

TRAINER = str(ROOT / "tests" / "launch" / "trainer.py")
PSFLEET = [sys.executable, "-m", "psfleet_launch.commands.psfleet_cli"]
_PATIENCE = 500.0  # seconds; pytest ends a test that hangs earlier, where its limit is lower
_HOSTS = {"local": ("local", "local"), "ray": RAY_NODES}
TWO = ("--servers", "2", "--workers", "2", "--no-progress")
JOIN = ("--engine", "join", "--listen", "127.0.0.1")
JOINED = pytest.mark.parametrize("engine", ["join"], indirect=True)
"""With agents that join, which each test starts by itself."""


class Site:
    """An engine and its machines.

    Attributes:
        engine: Its name.
        hosts: What its machines are called.
        folder: Where the job runs.
    """

    def __init__(self, engine: str, folder: Path, lab: Lab | None) -> None:
        self.engine = engine
        self.hosts: Sequence[str] = _HOSTS.get(engine, NAMES)
        self.lab = lab
        self.folder = folder
        self.launchers: list[Launcher] = []
        self.agents: list[subprocess.Popen[str]] = []

    def launch(self, *arguments: str, agents: int = 2, **variables: str) -> Launcher:
        """Start a job and, where that is for somebody else to do, its agents."""
        launcher = self.start(*self._machines(agents), *arguments, **variables)
        if self.engine == "join":
            self.join_all(launcher, agents)
        return launcher

    def join_all(self, launcher: Launcher, agents: int = 2, **variables: str) -> None:
        """Start the agents of as many machines, each with an address of its own."""
        for number, name in enumerate((*NAMES, "gamma")[:agents]):
            self.join(launcher, name, f"127.0.0.{number + 2}", **variables)

    def start(self, *arguments: str, **variables: str) -> Launcher:
        """Start a launcher with exactly these arguments."""
        mark = uuid.uuid4().hex
        if self.engine == "slurm":
            assert self.lab is not None
            variables |= slurm_variables(self.lab)
        if self.engine == "ray":
            variables |= RAY_VARIABLES
        with (self.folder / "err").open("w") as err, (self.folder / "out").open("w") as out:
            process = subprocess.Popen(
                [
                    *(self.lab.inside if self.lab else []),
                    *(sys.executable, "-m", "psfleet_launch", *arguments),
                ],
                cwd=self.folder,
                text=True,
                stdout=out,
                stderr=err,
                start_new_session=True,
                env=_environment() | {_MARK: mark} | variables,
            )
        self.launchers.append(Launcher(process, self.folder, mark))
        return self.launchers[-1]

    def _machines(self, agents: int) -> list[str]:
        match self.engine:
            case "join":
                return [*JOIN, "--agents", str(agents)]
            case "ssh":
                assert self.lab is not None
                options = ["--ssh-options", ssh_options(self.lab)]
                return ["--engine", "ssh", "--hosts", ",".join(NAMES), *options]
            case "slurm":
                return ["--engine", "slurm", "--nodes", "2"]
            case "ray":
                return ["--engine", "ray", "--bundles", "2", "--ray-address", RAY_HEAD]
            case _:
                return []

    def invitation(self, launcher: Launcher) -> list[str]:
        """The arguments of the command that the launcher has printed."""
        launcher.until(lambda: "agent --join" in self.said(), "command")
        match = re.search(r"psfleet (agent --join \S+ --credentials \S+)", self.said())
        assert match, self.said()
        return shlex.split(match[1])

    def join(
        self, launcher: Launcher, name: str, address: str, *prefix: str, **variables: str
    ) -> "subprocess.Popen[str]":
        """Start the agent of one machine by hand."""
        words = self.invitation(launcher)
        self.agents.append(
            subprocess.Popen(
                [*prefix, *PSFLEET, *words, "--name", name, "--address", address],
                cwd="/",
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=_environment() | {_MARK: launcher.mark} | variables,
            )
        )
        return self.agents[-1]

    def said(self) -> str:
        """Standard error of the launcher so far."""
        return (self.folder / "err").read_text()

    def ends(self, launcher: Launcher) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        code = launcher.process.wait(_PATIENCE)
        return code, (self.folder / "out").read_text(), self.said()

    def ends_with(self, code: int, launcher: Launcher) -> tuple[str, str]:
        """Standard output and standard error of one that ends with this code."""
        found, out, err = self.ends(launcher)
        assert found == code, err
        return out, err

    def agent_pid(self, launcher: Launcher, host: str) -> int:
        """The agent of a machine."""
        for agent in self.agents:
            if host in agent.args:  # type: ignore[operator]
                return agent.pid
        for pid, line in launcher.family().items():
            if f"--name {host}" in line and " agent " in line and not line.startswith("ssh "):
                return pid
        raise AssertionError(f"no agent {host} in {launcher.family()}")

    def launcher_pid(self, launcher: Launcher) -> int:
        """The process that runs the job; what was started may only follow it."""
        if self.engine != "slurm":
            return launcher.process.pid
        for pid, line in launcher.family().items():
            if " -m psfleet_launch " in line and any(
                word.startswith("SLURM_JOB_ID=") for word in _words(pid)
            ):
                return pid
        raise AssertionError(f"no launcher in {launcher.family()}")

    def close(self) -> None:
        """End what is left, and see that nothing of a job is."""
        for launcher in self.launchers:
            if launcher.process.poll() is None:
                launcher.process.terminate()
                launcher.process.wait(60)
        if self.engine == "slurm" and self.lab is not None:
            cancel_all(self.lab)
        for agent in self.agents:
            agent.communicate(timeout=60)
        for launcher in self.launchers:
            launcher.until(lambda one=launcher: not one.family(), "end of the family")  # type: ignore[misc]
        for folder in self.folder.glob("psfleet-logs/*"):
            assert not (folder / "agent.json").exists()


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Hosts with an sshd, for all tests of the session."""
    with ssh_hosts(tmp_path_factory.mktemp("lab")) as hosts:
        yield hosts


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Nodes of Slurm, for all tests of the session."""
    with slurm_cluster(tmp_path_factory.mktemp("cluster")) as slurm:
        yield slurm


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Lab]:
    """Two machines."""
    has("join", (), "iproute2")
    with laboratory(tmp_path) as machines_pair:
        yield machines_pair


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Lab]:
    """Three machines that may lose their power."""
    has("join", (), "iproute2")
    with laboratory(tmp_path, ("alpha", "beta", "gamma")) as laboratory_machines:
        yield laboratory_machines


_CLUSTERS = ("slurm", "ray")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave ssh, Slurm and Ray to `make test-engines`: there every process is a new interpreter."""
    runs_all = bool(os.environ.get("PSFLEET_TEST_ENGINES"))
    for item in items:
        call = getattr(item, "callspec", None)
        name = call and call.params.get("engine")
        if "lab" in getattr(item, "fixturenames", ()):
            name = "ssh"
        if name in _CLUSTERS:
            item.add_marker(pytest.mark.timeout(600))
        if not runs_all and name in ("ssh", *_CLUSTERS):
            item.add_marker(pytest.mark.skip(f"engine {name}: make test-engines runs this test"))


@pytest.fixture(scope="session")
def ray_nodes() -> Iterator[Lab]:
    """Nodes of Ray, for all tests of the session."""
    with ray_cluster() as nodes:
        yield nodes


_LABS = {"ssh": "lab", "slurm": "cluster", "ray": "ray_nodes"}


@pytest.fixture(scope="session", params=["local", "join", "ssh", "slurm", "ray"])
def engine(request: pytest.FixtureRequest) -> tuple[str, Lab | None]:
    """An engine; its machines are made before the first test, which is to leave nothing behind."""
    name = _LABS.get(request.param)
    return request.param, request.getfixturevalue(name) if name else None


@pytest.fixture
def site(engine: tuple[str, Lab | None], tmp_path: Path) -> Iterator[Site]:
    """An engine with two machines; at the end nothing of its jobs is left anywhere."""
    site_made = Site(engine[0], tmp_path, engine[1])
    try:
        yield site_made
    finally:
        site_made.close()
