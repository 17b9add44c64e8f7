"""Jobs that go back to their last snapshot, and jobs that resume from one."""

import os
import re
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from psfleet.checkpoint import compare, read_manifest
from psfleet.core.base.files import exchange
from tests.launch.conftest import Launch, launches

SCRIPT = str(Path(__file__).with_name("resuming.py"))
SNAPSHOTS = ("--durability", "snapshot", "--snapshot-every", "3 rounds")


TWO = ("--servers", "2", "--workers", "2", "--no-progress")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tells what a job without faults saves that gets its samples so."""

    @cache
    def saved(samples: str) -> Path:
        folder = tmp_path_factory.mktemp("plain")
        with launches(folder) as launch:
            assert launch(*TWO, SCRIPT, "30", "0", samples, samples).ends()[0] == 0
        return folder / samples

    return saved


def complete(folder: Path) -> list[Path]:
    """The whole snapshots of job j; one that was given up has a number too."""
    return [*folder.glob("psfleet-logs/j/snapshots/snapshot-*/manifest.json")]


def equal(first: Path, second: Path) -> bool:
    """Whether two saved models are equal in every bit, optimizer state included."""
    return all(difference.is_equal for difference in compare(str(first), str(second)))


def test_a_killed_server_takes_the_job_back(
    launch: Launch, tmp_path: Path, plain: Callable[[str], Path]
) -> None:
    """The whole job starts again from the last snapshot, in which is the plan of its fleet.dataset, says so,
    and gives the bits of a plain run. (With fleet.shard: the job that must end, below.)

    A job of another number of servers that resumes from the last snapshot does too.
    """
    launcher = launch(*TWO, *SNAPSHOTS, "--job", "j", SCRIPT, "30", "0.5", "killed", "dataset")
    launcher.until(lambda: len(complete(tmp_path)) >= 2, "second snapshot")
    os.kill(launcher.pid_of("server", 1), signal.SIGKILL)
    (tmp_path / "hurry").touch()
    out, err = launcher.ends_with(0)
    assert re.search(r"generation 1 starts from .*snapshot-00000", err), err
    assert int(out.split()[-1]) < 30  # steps of worker 0 since
    assert equal(plain("dataset"), tmp_path / "killed")
    three = ("--servers", "3", *TWO[2:], "--resume", "psfleet-logs/j")
    out, err = launch(*three, SCRIPT, "30", "0", "resumed", "dataset").ends_with(0)
    assert int(out.split()[-1]) < 30
    assert len(read_manifest(tmp_path / "resumed").files) == 3
    assert equal(plain("dataset"), tmp_path / "resumed")


def test_a_job_goes_back_after_a_worker_was_restarted(job: Launch) -> None:
    """The restart is told once; that the worker starts again with the whole job is none."""
    launcher = job("hangs", "--durability", "snapshot", "--restart-workers", "1")

    def hangs(starts: int) -> None:
        """Wait until worker 0 has been started so often."""
        launcher.until(
            lambda: launcher.log("workerlog.0").count("hanging") == starts, f"start {starts}"
        )

    hangs(1)
    os.kill(launcher.pid_of("worker", 0), signal.SIGKILL)
    hangs(2)
    os.kill(launcher.pid_of("server", 0), signal.SIGKILL)
    hangs(3)
    launcher.process.terminate()
    _, err = launcher.ends_with(128 + signal.SIGTERM)
    assert "generation 1 starts from the beginning" in err
    assert err.count("(restart 1 of 1)") == 1


@pytest.mark.long
def test_snapshots_that_fail_are_told_on_the_screen(launch: Launch, tmp_path: Path) -> None:
    """A job whose snapshots cannot be written says so at once, trains on, and says when they can be."""
    options = ("--servers", "2", "--workers", "1", "--no-progress")
    launcher = launch(*options, *SNAPSHOTS, "--job", "j", SCRIPT, "100", "0.4", "model")
    job = tmp_path / "psfleet-logs/j"
    log = job / "serverlog.0"
    launcher.until(lambda: complete(tmp_path), "first snapshot")
    (job / "away").write_text("no folder")
    assert exchange(job / "snapshots", job / "away")
    launcher.until(lambda: "could not be taken" in log.read_text(), "a failure")
    assert exchange(job / "snapshots", job / "away")
    launcher.until(lambda: "taken again" in log.read_text(), "a success")
    (tmp_path / "hurry").touch()
    _, err = launcher.ends_with(0)
    assert re.search(r"server 0: a snapshot could not be taken: .+; it is tried again", err), err
    assert "server 0: snapshots are taken again, after" in err


@pytest.mark.long
def test_a_job_that_must_end_takes_a_snapshot(
    launch: Launch, tmp_path: Path, plain: Callable[[str], Path]
) -> None:
    """SIGUSR1 ends a job with a snapshot; a job that resumes from it gives the bits of a plain run."""
    keeps = ("--snapshot-every", "3 rounds", "--job", "j")
    launcher = launch(*TWO, *keeps, SCRIPT, "30", "0.5", "model")
    launcher.until(lambda: complete(tmp_path), "first snapshot")
    launcher.process.send_signal(signal.SIGUSR1)
    _, err = launcher.ends_with(128 + signal.SIGUSR1)
    match = re.search(r"the snapshot is complete; continue with --resume (\S+)", err)
    assert match, err
    assert "stopped by SIGUSR1" in err
    resumed = launch(*TWO, "--resume", match[1], SCRIPT, "30", "0", "resumed")
    out, err = resumed.ends_with(0)
    assert int(out.split()[-1]) < 60  # steps of worker 0 since
    assert equal(plain("shard"), tmp_path / "resumed")


def test_a_job_without_snapshots_ends_without_one(job: Launch) -> None:
    """SIGUSR1 ends it at once, and the launcher says how it could have gone on."""
    launcher = job("hangs")
    launcher.until_logged("workerlog.0", "hanging")
    launcher.process.send_signal(signal.SIGUSR1)
    _, err = launcher.ends_with(128 + signal.SIGUSR1)
    assert "the job keeps no snapshots, so it ends without one; see --snapshot-every" in err
