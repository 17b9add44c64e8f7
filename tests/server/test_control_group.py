"""Rows on disk keep a server within a limit that the kernel enforces."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.control_group import memory_limit
from tests.programs import ended
from tests.server.test_process import ENV

pytestmark = pytest.mark.long

LIMIT, ROWS = (
    400 << 20,
    1_000_000,
)  # bytes; the rows take 192 MB with their state, and their index 36 MB
SCRIPT = f"""
import hashlib
import numpy as np
import psfleet

dice, digest = np.random.default_rng(0), hashlib.sha256()
with psfleet.connect() as ps:
    users = ps.sparse_table("users", dim=16, optimizer=psfleet.optimizer.Adam(1e-3))
    for first in range(0, {ROWS}, 20_000):
        ids = np.arange(first, first + 20_000)
        users.push(ids, np.full((20_000, 16), 0.5, np.float32)).wait()
    for _ in range(10):
        ids = dice.integers(0, {ROWS}, 20_000)
        digest.update(users.pull(ids))
        users.push(ids, np.ones((20_000, 16), np.float32)).wait()
print(digest.hexdigest())
"""


def worker(script: Path, **variables: str) -> str:
    """What the script prints, embedded unless the variables name a server."""
    script.write_text(SCRIPT)
    return ended([sys.executable, script], 240, env=ENV | variables, check=True).stdout


def test_rows_on_disk_fit_a_control_group(tmp_path: Path) -> None:
    """A server with --server-disk trains more rows than --server-memory holds in a control group of this
    limit, with the bits of a table in memory.
    """
    socket = f"unix:{tmp_path}/s"
    words = ["-m", "psfleet_server", "--index", "0", "--servers", socket, "--workers", "1"]
    variables = {"PSFLEET_MEMORY": str(LIMIT), "PSFLEET_DISK": str(tmp_path / "rows")}
    with (
        memory_limit(LIMIT) as limited,
        subprocess.Popen(
            [*limited, sys.executable, *words], env=ENV | variables, stdout=subprocess.PIPE
        ) as server,
    ):
        try:
            assert server.stdout is not None
            assert server.stdout.readline()
            role = {"PSFLEET_ROLE": "worker", "PSFLEET_RANK": "0", "PSFLEET_WORKERS": "1"}
            digest = worker(tmp_path / "train.py", PSFLEET_SERVERS=socket, **role)
            assert server.wait(60) == 0
        finally:
            server.kill()
    assert digest == worker(tmp_path / "train.py")
