"""The cluster of docker-compose.yml, with real containers."""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.conftest import Launch, digest
from tests.launch.docker_engine import Engine, base_image, build, engine
from tests.programs import ended

TRAINER = Path(__file__).with_name("trainer.py")
IMAGE = "psfleet-test"
STEPS = "20"

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def docker() -> Iterator[Engine]:
    """An engine that has the project's image, built again."""
    folder = Path(tempfile.mkdtemp(prefix="psfleet-docker-"))
    try:
        with engine(folder) as own:
            build(own, base_image(own, folder), IMAGE, folder)
            yield own
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def composition(docker: Engine, tmp_path: Path) -> Iterator[list[str]]:
    """Options of compose for the project's file with the small trainer as its script."""
    override = tmp_path / "override.yml"
    override.write_text(
        "services:\n"
        + "".join(
            f"  worker-{rank}:\n"
            f'    command: ["python", "/trainer.py", "{STEPS}"]\n'
            f'    volumes: ["{TRAINER}:/trainer.py:ro"]\n'
            for rank in (0, 1)
        )
    )
    options = ["-p", "psfleet-test", "-f", "docker-compose.yml", "-f", str(override)]
    yield options
    docker.compose(*options, "down", "--volumes", variables={"PSFLEET_IMAGE": IMAGE})


def test_the_cluster_trains_in_containers(
    docker: Engine, composition: list[str], launch: Launch
) -> None:
    """Every container ends with 0, and the rows are the very bits of a job without containers.

    The containers talk TLS with certificates that the first of them has made.
    """
    up = docker.compose(*composition, "up", "--no-build", variables={"PSFLEET_IMAGE": IMAGE})
    ids = docker.compose(*composition, "ps", "-a", "-q", variables={"PSFLEET_IMAGE": IMAGE})
    states = docker.docker(
        "inspect", "--format", "{{.State.Status}} {{.State.ExitCode}}", *ids.stdout.split()
    ).stdout.splitlines()
    assert states == ["exited 0"] * 5, up.stdout
    assert "for servers: PSFLEET_TLS=/tls/server" in up.stdout
    _, out, _ = launch("--servers", "2", "--workers", "2", str(TRAINER), STEPS).ends()
    assert digest(up.stdout) == digest(out)


def test_the_image_runs_a_script_embedded(docker: Engine) -> None:
    """Without a role in the environment the image trains in one process, as any Python does."""
    words = ("--rm", "--network", "none", "-v", f"{TRAINER}:/trainer.py:ro", IMAGE)
    ran = docker.docker("run", *words, "python", "/trainer.py", "3")
    embedded = ended([sys.executable, TRAINER, "3"], check=True)
    assert digest(ran.stdout) == digest(embedded.stdout)
