"""A launched job is found by the folder of its logs: by a reader, and by a follower that serves on."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

import psfleet
from psfleet.core.base.errors import ConfigError, FrameError
from psfleet.core.base.job_files import SERVERS
from psfleet.serving.follower import Follower
from tests.launch.conftest import Launch
from tests.waiting import until

TRAINER = """
import pathlib, sys, time
import numpy as np
import psfleet
with psfleet.connect() as ps:
    users = ps.sparse_table("users", 3, psfleet.optimizer.SGD(0.5))
    users.push(np.arange(5), np.ones((5, 3))).wait()
    np.save(sys.argv[1], users.pull(np.arange(5)))
    ps.save(f"{sys.argv[1]}-snapshot")
    pathlib.Path(f"{sys.argv[1]}-trained").touch()
    deadline = time.monotonic() + 100
    while not pathlib.Path("seen").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
"""


def test_all_of_a_job_dies(
    launch: Launch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Launcher, servers and worker get SIGKILL: the follower serves on and its age rises; when the job is
    resumed in the same folder it catches up. It says both in a short sentence. A reader finds the job too,
    and is told when it is over. (Over TLS: tests/agents/test_lost_machines.py.)"""
    (tmp_path / "train.py").write_text(TRAINER)
    options = ("--servers", "2", "--job", "j", "--no-progress")
    job = launch(*options, "train.py", "first")
    job.until(lambda: (tmp_path / "first-trained").exists(), "trained rows")
    first = np.load(tmp_path / "first.npy")
    with Follower(tmp_path / "psfleet-logs" / "j") as follower:
        np.testing.assert_array_equal(follower.look_up("users", np.arange(5)), first)
        members = [job.pid_of("server", 0), job.pid_of("server", 1), job.pid_of("worker", 0)]
        for pid in (job.process.pid, *members):
            os.kill(pid, signal.SIGKILL)
        assert job.process.wait() == -signal.SIGKILL
        for pipe in (job.process.stdout, job.process.stderr):
            assert pipe is not None
            pipe.close()
        job.until(lambda: not job.family(), "end of all processes")
        until(lambda: follower.failure is not None)
        before = follower.age
        np.testing.assert_array_equal(follower.look_up("users", np.arange(5)), first)
        assert follower.age > before
        resumed = launch(*options, "--resume", "first-snapshot", "train.py", "second")
        resumed.until(lambda: (tmp_path / "second-trained").exists(), "trained rows")
        second = np.load(tmp_path / "second.npy")
        assert (second != first).all()
        until(lambda: np.array_equal(follower.look_up("users", np.arange(5)), second))
        assert follower.age < 60
        until(lambda: follower.failure is None)
        said = [one.message for one in caplog.records if one.name == "psfleet.serving.follower"]
        assert said == [
            "the follower has lost job 'j' (its servers do not answer); it serves what it has and tries on",
            "the follower follows job 'j' again",
        ]
        with psfleet.connect(job=tmp_path / "psfleet-logs" / "j") as reader:
            rows = reader.sparse_table("users").pull(np.arange(5))
            np.testing.assert_array_equal(rows, second)
            (tmp_path / "seen").touch()
        resumed.ends_with(0)
    with pytest.raises(ConfigError, match=r"no job runs in '.*/j': it has no servers.json"):
        psfleet.connect(job=tmp_path / "psfleet-logs" / "j")


def test_a_damaged_file(tmp_path: Path) -> None:
    """It is named, with what is wrong in it."""
    (tmp_path / SERVERS).write_text("{")
    with pytest.raises(FrameError, match=r"servers.json' is damaged"):
        psfleet.connect(job=tmp_path)
    (tmp_path / SERVERS).write_text(json.dumps({"format": "running job", "version": 2}))
    with pytest.raises(FrameError, match="has version 2"):
        psfleet.connect(job=tmp_path)
