"""Jobs with --replicas 1: the launcher promotes standbys and starts new ones."""

import subprocess
import sys
from pathlib import Path

SCRIPT = str(Path(__file__).with_name("scripts") / "killing.py")


def job(folder: Path, kills: int, *options: str) -> tuple[str, str]:
    """Output and messages of a job of two servers and two workers that ends well."""
    command = [sys.executable, "-m", "psfleet_launch", "--servers", "2", "--workers", "2"]
    command += ["--no-progress", "--log-dir", str(folder / "logs"), *options]
    done = subprocess.run(
        [*command, SCRIPT, str(kills)], capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_a_job_survives_two_deaths_of_a_server(tmp_path: Path) -> None:
    """Server 0, the coordinator's, is killed, and then its standby that took over: no bit changes."""
    expected, _ = job(tmp_path, 0)
    found, said = job(tmp_path, 2, "--replicas", "1")
    assert "server 0 ended with signal 9; server 0 copy 1 takes over" in said
    assert "server 0 copy 1 ended with signal 9; server 0 copy 2 takes over" in said
    assert found == expected
