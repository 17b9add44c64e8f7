"""A Docker engine for tests: the one that runs, or one that root starts for the purpose.

An engine of our own writes to a temporary folder, leaves the host's packet filter alone, and gives
its containers addresses from 198.18.0.0/15, which is set apart for tests. Its containers cannot
reach the outside: images come from a Debian that debootstrap has made, packages from a wheelhouse.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import monotonic, sleep

import pytest

ROOT = Path(__file__).resolve().parents[2]
OFFICIAL_BASE = "python:3.11-slim-bookworm"
OWN_BASE = "psfleet-test-base"
_PACKAGES = ["docker.io", "docker-compose", "debootstrap", "iptables"]
_SWITCH = "PSFLEET_TEST_DOCKER"
_NETWORK = [
    *("--bip", "198.18.0.1/24", "--iptables=false", "--ip6tables=false"),
    *("--default-address-pool", "base=198.18.64.0/18,size=24"),
]
_NEEDED = [
    *("Dockerfile", ".dockerignore", "pyproject.toml", "README.md", "docker-compose.yml"),
    *("psfleet", "server", "worker", "launch", "protos", "examples"),
]
_PLATFORMS = ["manylinux2014_x86_64", "manylinux_2_27_x86_64", "manylinux_2_28_x86_64"]


class Engine:
    """The command lines of docker and of compose, with the address of an engine."""

    def __init__(self, host: str | None = None) -> None:
        self._environment = os.environ | ({"DOCKER_HOST": host} if host else {})
        self._docker = _distribution("docker")
        if self.docker("buildx", "version", check=False).returncode:
            self._environment["DOCKER_BUILDKIT"] = "0"  # the old builder needs no plug-in

    def docker(
        self, *arguments: str, check: bool = True, stdin: int | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `docker` and return what it says; a failure ends the test with its output."""
        return self._run([self._docker, *arguments], check, stdin)

    def replies(self) -> bool:
        """Whether an engine is there."""
        return self.docker("version", check=False).returncode == 0

    def compose(
        self, *arguments: str, check: bool = True, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run `docker compose`, or the older `docker-compose`."""
        plugin = self.docker("compose", "version", check=False).returncode == 0
        command = [self._docker, "compose"] if plugin else ["docker-compose"]
        return self._run([*command, *arguments], check, variables=variables)

    def _run(
        self,
        command: list[str],
        check: bool,
        stdin: int | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        process = subprocess.run(
            command,
            env={**self._environment, **(variables or {})},
            text=True,
            check=False,
            cwd=ROOT,
            stdin=stdin or subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert not check or process.returncode == 0, (
            f"{' '.join(command)}: {process.stdout[-4000:]}"
        )
        return process


def _distribution(program: str) -> str:
    """The distribution's program, which fits its engine, before any other of that name."""
    return next((path for path in (f"/usr/bin/{program}",) if os.access(path, os.X_OK)), program)


@contextlib.contextmanager
def engine(folder: Path) -> Iterator[Engine]:
    """The engine that runs, or one of our own; where neither can be, the test is skipped."""
    if shutil.which("docker") and Engine().replies():
        yield Engine()
        return
    if os.environ.get(_SWITCH) != "1":
        pytest.skip(f"no Docker engine runs; with {_SWITCH}=1 root starts one")
    if os.geteuid() != 0:
        pytest.skip(f"no Docker engine runs, and only root can start one ({_SWITCH} is 1)")
    _install()
    with _started(folder) as own:
        yield own


def _install() -> None:
    if shutil.which("dockerd") and shutil.which("debootstrap"):
        return
    quiet = {
        "stdout": subprocess.DEVNULL,
        "env": os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
    }
    for command in (
        ["update", "-qq"],
        ["install", "-qq", "-y", "--no-install-recommends", *_PACKAGES],
    ):
        if subprocess.run(["apt-get", *command], check=False, **quiet).returncode:  # type: ignore[call-overload]
            pytest.skip(f"no Docker engine: apt-get {' '.join(command)} failed")


@contextlib.contextmanager
def _started(folder: Path) -> Iterator[Engine]:
    host = f"unix://{folder}/docker.sock"
    with (folder / "dockerd.log").open("wb") as log:
        command: list[str | Path] = ["dockerd", "--host", host, *_NETWORK]
        command += ["--data-root", folder / "data", "--exec-root", folder / "exec"]
        command += ["--pidfile", folder / "dockerd.pid"]
        daemon = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        own = Engine(host)
        deadline = monotonic() + 30
        while not own.replies():
            if daemon.poll() is not None or monotonic() > deadline:
                text = (folder / "dockerd.log").read_text()[-800:]
                pytest.skip(f"the Docker engine does not start here: {text}")
            sleep(0.1)
        yield own
    finally:
        daemon.send_signal(signal.SIGTERM)
        daemon.wait(timeout=60)


def base_image(own: Engine, folder: Path) -> str:
    """An image with Python: the official one where it can be had, else a Debian made here."""
    for name in (OFFICIAL_BASE, OWN_BASE):
        if own.docker("image", "inspect", name, check=False).returncode == 0:
            return name
    if own.docker("pull", "--quiet", OFFICIAL_BASE, check=False).returncode == 0:
        return OFFICIAL_BASE
    if os.geteuid() != 0 or not shutil.which("debootstrap"):
        pytest.skip(f"image {OFFICIAL_BASE} cannot be pulled, and debootstrap is not there")
    tree = folder / "debian"
    subprocess.run(
        ["debootstrap", "--variant=minbase", "--include=python3,python3-venv", "bookworm", tree],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    packed = ["tar", "-C", str(tree), "-c", "."]
    packed[3:3] = ["--exclude=./var/cache/apt/archives/*.deb", "--exclude=./var/lib/apt/lists/*"]
    with subprocess.Popen(packed, stdout=subprocess.PIPE) as tar:
        assert tar.stdout is not None
        path = "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        own.docker("import", "--change", path, "-", OWN_BASE, stdin=tar.stdout.fileno())
    shutil.rmtree(tree)
    return OWN_BASE


def build(own: Engine, base: str, image: str, folder: Path) -> None:
    """Build the project's image without a network."""
    context = folder / "context"
    context.mkdir()
    for name in _NEEDED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, context / name)
    _wheelhouse(context / "wheels")
    settings = (f"BASE={base}", "EXTRAS=", "PIP_OPTIONS=--no-index --find-links wheels")
    words = [word for text in settings for word in ("--build-arg", text)]
    own.docker("build", "--network", "none", "--tag", image, *words, str(context))
    shutil.rmtree(context)


def _wheelhouse(folder: Path) -> None:
    """All that psfleet needs at run time and to be built, for the Python 3.11 of the base."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [*project["project"]["dependencies"], *project["build-system"]["requires"], "wheel"]
    platforms = [word for name in _PLATFORMS for word in ("--platform", name)]
    command: list[str | Path] = [sys.executable, "-m", "pip", "download", "--quiet"]
    command += ["--dest", folder, "--only-binary=:all:", "--python-version", "3.11"]
    command += [*platforms, *needed]
    subprocess.run(command, check=True)
