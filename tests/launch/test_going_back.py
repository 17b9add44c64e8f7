"""Jobs that go back to their last snapshot, and jobs that resume from one."""

import os
import re
import signal
from pathlib import Path

from psfleet.checkpoint import compare, read_manifest
from tests.launch.conftest import Launch, job, launch

__all__ = ["job", "launch"]

SCRIPT = str(Path(__file__).with_name("resuming.py"))
SNAPSHOTS = ("--durability", "snapshot", "--snapshot-every", "3 rounds")


def equal(first: Path, second: Path) -> bool:
    """Whether two saved models are equal in every bit, optimizer state included."""
    return all(difference.is_equal for difference in compare(str(first), str(second)))


def killed(launch: Launch, tmp_path: Path, *arguments: str) -> None:
    """Run the script plainly, and with a server that is killed: the models are equal."""
    options = ("--servers", "2", "--workers", "2", "--no-progress")
    plain = launch(*options, SCRIPT, "30", "0", "plain", *arguments)
    launcher = launch(*options, *SNAPSHOTS, "--job", "j", SCRIPT, "30", "0.1", "killed", *arguments)
    second = tmp_path / "psfleet-logs/j/snapshots/snapshot-000002/manifest.json"
    launcher.until(second.exists, "second snapshot")
    os.kill(launcher.pid_of("server", 1), signal.SIGKILL)
    code, out, err = launcher.ends()
    assert code == 0, err
    assert re.search(r"generation 1 starts from .*snapshot-00000", err), err
    assert int(out.split()[-1]) < 30  # steps of worker 0 since
    assert plain.ends()[0] == 0
    assert equal(tmp_path / "plain", tmp_path / "killed")


def test_a_killed_server_takes_the_job_back(launch: Launch, tmp_path: Path) -> None:
    """The whole job starts again from the last snapshot, says so, and gives the bits of a plain run.

    A job of another number of servers that resumes from the last snapshot does too.
    """
    killed(launch, tmp_path)
    options = ("--servers", "3", "--workers", "2", "--no-progress", "--resume", "psfleet-logs/j")
    code, out, err = launch(*options, SCRIPT, "30", "0", "resumed").ends()
    assert code == 0, err
    assert int(out.split()[-1]) < 30
    assert len(read_manifest(tmp_path / "resumed").files) == 3
    assert equal(tmp_path / "plain", tmp_path / "resumed")


def test_samples_that_the_fleet_deals_are_dealt_again(launch: Launch, tmp_path: Path) -> None:
    """The same with fleet.dataset, whose plan is in the snapshot."""
    killed(launch, tmp_path, "dataset")


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
    code, _, err = launcher.ends()
    assert code == 128 + signal.SIGTERM, err
    assert "generation 1 starts from the beginning" in err
    assert err.count("(restart 1 of 1)") == 1


def test_resuming_from_nothing_is_a_sentence(launch: Launch) -> None:
    """A folder without a complete snapshot is refused before anything starts."""
    code, _, err = launch("--resume", "nowhere", SCRIPT, "1", "0", "x").ends()
    assert (code, "no complete snapshot" in err) == (2, True)


def test_snapshots_that_fail_are_told_on_the_screen(launch: Launch, tmp_path: Path) -> None:
    """A job whose snapshots cannot be written says so at once, trains on, and says when they can be."""
    options = ("--servers", "2", "--workers", "1", "--no-progress")
    launcher = launch(*options, *SNAPSHOTS, "--job", "j", SCRIPT, "60", "0.1", "model")
    job = tmp_path / "psfleet-logs/j"
    log = job / "serverlog.0"
    launcher.until((job / "snapshots/snapshot-000001/manifest.json").exists, "first snapshot")
    (job / "snapshots").rename(job / "away")
    (job / "snapshots").write_text("no folder")
    launcher.until(lambda: "could not be taken" in log.read_text(), "a failure")
    (job / "snapshots").unlink()
    (job / "away").rename(job / "snapshots")
    launcher.until(lambda: "taken again" in log.read_text(), "a success")
    code, _, err = launcher.ends()
    assert code == 0, err
    assert re.search(r"server 0: a snapshot could not be taken: .+ \(1 in a row\)", err), err
    assert "server 0: snapshots are taken again, after" in err


def test_a_job_that_must_end_takes_a_snapshot(launch: Launch, tmp_path: Path) -> None:
    """SIGUSR1 ends a job with a snapshot; a job that resumes from it gives the bits of a plain run."""
    options = ("--servers", "2", "--workers", "2", "--no-progress")
    keeps = ("--snapshot-every", "3 rounds", "--job", "j")
    launcher = launch(*options, *keeps, SCRIPT, "30", "0.5", "model")
    complete = "psfleet-logs/j/snapshots/snapshot-*/manifest.json"
    launcher.until(lambda: any(tmp_path.glob(complete)), "first snapshot")
    launcher.process.send_signal(signal.SIGUSR1)
    code, _, err = launcher.ends()
    assert code == 128 + signal.SIGUSR1, err
    found = re.search(r"the snapshot is complete; continue with --resume (\S+)", err)
    assert found, err
    assert "stopped by SIGUSR1" in err
    resumed = launch(*options, "--resume", found[1], SCRIPT, "30", "0", "resumed")
    code, out, err = resumed.ends()
    assert code == 0, err
    assert int(out.split()[-1]) < 60  # steps of worker 0 since
    assert launch(*options, SCRIPT, "30", "0", "plain").ends()[0] == 0
    assert equal(tmp_path / "plain", tmp_path / "resumed")


def test_a_job_without_snapshots_ends_without_one(job: Launch) -> None:
    """SIGUSR1 ends it at once, and the launcher says how it could have gone on."""
    launcher = job("hangs")
    launcher.until_logged("workerlog.0", "hanging")
    launcher.process.send_signal(signal.SIGUSR1)
    code, _, err = launcher.ends()
    assert code == 128 + signal.SIGUSR1, err
    assert "the job keeps no snapshots, so it ends without one; see --snapshot-every" in err
