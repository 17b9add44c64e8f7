"""A process without a seat finds a launched job by the folder of its logs."""

import json
from pathlib import Path

import numpy as np
import pytest

import psfleet
from psfleet.errors import ConfigError, FrameError
from psfleet.formats import SERVERS
from tests.launch.conftest import Launch

TRAINER = """
import pathlib, time
import numpy as np
import psfleet
with psfleet.connect() as ps:
    users = ps.sparse_table("users", 3, psfleet.optimizer.SGD(0.5))
    users.push(np.arange(5), np.ones((5, 3))).wait()
    np.save("rows.npy", users.pull(np.arange(5)))
    pathlib.Path("trained").touch()
    deadline = time.monotonic() + 100
    while not pathlib.Path("seen").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
"""


def test_a_launched_job_is_read(launch: Launch, tmp_path: Path) -> None:
    """When the job is over it is said so. (Over TLS: tests/agents/test_lost_machines.py.)"""
    (tmp_path / "train.py").write_text(TRAINER)
    job = launch("--servers", "2", "--job", "j", "--no-progress", "train.py")
    job.until(lambda: (tmp_path / "trained").exists(), "trained rows")
    folder = tmp_path / "psfleet-logs" / "j"
    with psfleet.connect(job=folder) as reader:
        rows = reader.sparse_table("users").pull(np.arange(5))
        np.testing.assert_array_equal(rows, np.load(tmp_path / "rows.npy"))
        (tmp_path / "seen").touch()
    job.ends_with(0)
    with pytest.raises(ConfigError, match=r"no job runs in '.*/j': it has no servers.json"):
        psfleet.connect(job=folder)


def test_a_damaged_file(tmp_path: Path) -> None:
    """It is named, with what is wrong in it."""
    (tmp_path / SERVERS).write_text("{")
    with pytest.raises(FrameError, match=r"servers.json' is damaged"):
        psfleet.connect(job=tmp_path)
    (tmp_path / SERVERS).write_text(json.dumps({"format": "running job", "version": 2}))
    with pytest.raises(FrameError, match="has version 2"):
        psfleet.connect(job=tmp_path)
