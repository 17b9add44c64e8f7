"""Jobs with --replicas 1: the launcher promotes standbys and starts new ones."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import ended

SCRIPT = str(Path(__file__).with_name("scripts") / "killing.py")


def job(folder: Path, *blows: str, replicas: int = 1, options: str = "") -> tuple[str, str]:
    """Output and messages of a job of two servers and two workers that ends well."""
    command = [*command_of(folder, replicas, options), SCRIPT, *blows]
    process = ended(command)
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("stopped")), process.stderr


def command_of(folder: Path, replicas: int, options: str) -> list[str]:
    """The launcher of such a job, without its script."""
    command = [sys.executable, "-m", "psfleet_launch", "--servers", "2", "--workers", "2"]
    command += ["--no-progress", "--log-dir", str(folder / "logs"), "--replicas", str(replicas)]
    return [*command, *options.split()]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the job prints if nothing happens to it."""
    return job(tmp_path_factory.mktemp("calm"), replicas=0)[0]


def test_a_job_survives_servers_that_die_and_hang(tmp_path: Path, calm: str) -> None:
    """Server 0, the coordinator's, is killed, then its standby that took over is stopped for good, and then
    another server's standby: no bit changes."""
    blows = ["5:KILL:ready.0:ready.0.1", "15:STOP:ready.0.1:ready.0.2"]
    actual, output = job(tmp_path, *blows, "25:STOP:ready.1.1:ready.1.1")
    assert "server 0 ended with signal 9; server 0 copy 1 takes over" in output
    assert "server 0 copy 1 was silent for 5 s and is killed" in output
    assert "server 0 copy 2 takes over" in output
    assert "server 1 copy 1 was silent for 5 s and is killed" in output
    assert actual == calm


@pytest.mark.long
def test_a_job_with_a_log_survives_servers_that_hang(tmp_path: Path, calm: str) -> None:
    """Without standbys both servers are stopped for good: each goes on from its log, and no bit changes."""
    options = "--durability log --hung-after 2s --restart-hung"
    blows = ["5:STOP:ready.0:ready.0", "20:STOP:ready.1:ready.1"]
    actual, output = job(tmp_path, *blows, replicas=0, options=options)
    for server in (0, 1):
        assert f"server {server} was silent for 2 s and is killed" in output
    assert actual == calm


def test_a_job_without_a_log_says_that_a_server_hangs(tmp_path: Path, calm: str) -> None:
    """The server is left alone, and the job goes on when it wakes."""
    command = [*command_of(tmp_path, 0, "--hung-after 1s"), SCRIPT, "5:STOP:ready.0:ready.0"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        stopped, server = running.stdout.readline().split()
        output = next((line for line in running.stderr if "silent" in line), "")
        os.kill(int(server), signal.SIGCONT)
        actual, rest = running.communicate(timeout=150)
    assert stopped == "stopped"
    assert "server 0 has been silent for 1 s; workers wait for it" in output
    assert running.returncode == 0, rest
    assert actual == calm
