"""Jobs with --replicas 1: the launcher promotes standbys and starts new ones."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).with_name("scripts") / "killing.py")


def job(folder: Path, *blows: str, replicas: int = 1) -> tuple[str, str]:
    """Output and messages of a job of two servers and two workers that ends well."""
    command = [sys.executable, "-m", "psfleet_launch", "--servers", "2", "--workers", "2"]
    command += ["--no-progress", "--log-dir", str(folder / "logs"), "--replicas", str(replicas)]
    done = subprocess.run(
        [*command, SCRIPT, *blows], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the job prints if nothing happens to it."""
    return job(tmp_path_factory.mktemp("calm"), replicas=0)[0]


def test_a_job_survives_two_deaths_of_a_server(tmp_path: Path, calm: str) -> None:
    """Server 0, the coordinator's, is killed, and then its standby that took over: no bit changes."""
    found, said = job(tmp_path, "5:KILL:ready.0:ready.0.1", "20:KILL:ready.0.1:ready.0.2")
    assert "server 0 ended with signal 9; server 0 copy 1 takes over" in said
    assert "server 0 copy 1 ended with signal 9; server 0 copy 2 takes over" in said
    assert found == calm


def test_a_job_survives_servers_and_standbys_that_hang(tmp_path: Path, calm: str) -> None:
    """The coordinator's server and another one's standby are stopped for good: no bit changes."""
    found, said = job(tmp_path, "5:STOP:ready.0:ready.0.1", "20:STOP:ready.1.1:ready.1.1")
    assert "server 0 was silent for 5 s and is killed" in said
    assert "server 0 copy 1 takes over" in said
    assert "server 1 copy 1 was silent for 5 s and is killed" in said
    assert found == calm
