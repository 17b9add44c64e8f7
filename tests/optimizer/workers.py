"""Two worker processes on a fleet of this process."""

import os
import subprocess
import sys
from pathlib import Path

from psfleet.fleet.testing.local_fleet import LocalFleet

__all__ = ["run_two_workers"]


def run_two_workers(script: Path, servers: int) -> list[str]:
    """What each of two workers prints that run the script in its folder, in sync mode."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    with LocalFleet(servers, 2, in_process=True) as fleet:
        workers = [
            subprocess.Popen(
                [sys.executable, str(script)],
                stdout=subprocess.PIPE,
                text=True,
                cwd=script.parent,
                env={
                    **os.environ,
                    "PYTHONPATH": path,
                    "PSFLEET_ROLE": "worker",
                    "PSFLEET_RANK": str(rank),
                    "PSFLEET_SERVERS": ",".join(fleet.endpoints),
                    "PSFLEET_WORKERS": "2",
                },
            )
            for rank in (0, 1)
        ]
        printed = [worker.communicate(timeout=100)[0] for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0]
    return [text.strip() for text in printed]
