"""A disk that is full for a while holds a job up and does nothing else to it.

The disk is a real one: a file system in memory, mounted small for the test and filled to the last byte.
"""

import contextlib
import errno
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.programs import ended
from tests.waiting import until

SCRIPT = str(Path(__file__).with_name("scripts") / "filled.py")
FULL = "No space left on device; make room for it. Pushes wait"
AGAIN = "can be written again, after"
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


class Disk:
    """A small disk of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def fill(self) -> None:
        """Leave no byte."""
        with self._ballast.open("ab", buffering=0) as file:
            size = 1 << 20
            while size:
                try:
                    file.write(bytes(size))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 2

    def stays_full(self) -> bool:
        """Fill what has become free meanwhile; True."""
        self.fill()
        return True

    def free(self) -> None:
        """Give the room back."""
        self._ballast.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A disk of 64 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = ended(["mount", "-t", "tmpfs", "-o", "size=64m", "psfleet-test", path])
    if mounted.returncode:
        pytest.skip(f"NOT TESTED: no disk can be mounted here: {mounted.stderr}")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", path], check=True)


def hold_up(folder: Path, logs: Path, fill: int, seconds: float, disk: Disk) -> set[Path]:
    """Let the disk be full for so long from the moment on in which the screen says so.

    The job itself makes room when it gives up a snapshot or drops a log; until it says that it waits,
    that room is filled too.

    Returns:
        The snapshots that there were when the disk got room.
    """
    full, again = (said(folder).count(word) for word in (FULL, AGAIN))
    workers = (0, 1) if fill == 1 else (0,)
    until(lambda: all((folder / f"at.{worker}.{fill}").exists() for worker in workers), "step")
    disk.fill()
    (folder / f"full.{fill}").touch()
    until(lambda: disk.stays_full() and said(folder).count(FULL) > full, "word of the full disk")
    time.sleep(seconds)
    there = snapshots(logs)
    disk.free()
    until(lambda: said(folder).count(AGAIN) > again, "word of the room")
    return there


def snapshots(logs: Path) -> set[Path]:
    """The whole ones."""
    return set(logs.glob("*/snapshots/snapshot-*"))


def takes_turns(screen: str, server: int) -> bool:
    """Whether this server said each time once that its disk is full and once that it has room again."""
    words = re.findall(rf"^server {server}: .*({FULL}|{AGAIN})", screen, re.MULTILINE)
    return words == [FULL, AGAIN] * (len(words) // 2)


def said(folder: Path) -> str:
    """The messages of the job."""
    return (folder / "screen").read_text()


@contextlib.contextmanager
def running(
    folder: Path, logs: Path, mode: str, fills: int, every: str = "0.3s"
) -> Iterator["subprocess.Popen[str]"]:
    """A job whose script waits so many times, with snapshots at this interval; it is over in the end."""
    folder.mkdir()
    command = [sys.executable, "-m", "psfleet_launch", "--servers", "2", "--workers", "2"]
    command += ["--durability", "log", "--restart-workers", "3", "--snapshot-every", every]
    command += ["--no-progress", "--log-dir", str(logs), SCRIPT, mode, str(folder), str(fills)]
    with (folder / "screen").open("wb") as stream:
        job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stream, text=True)
    try:
        yield job
    finally:
        if job.poll() is None:
            job.terminate()
            job.communicate(timeout=60)


def train(
    folder: Path, logs: Path, mode: str, fills: int, seconds: float, disk: Disk | None
) -> str:
    """The output of a job whose disk is full so many times for so long."""
    with running(folder, logs, mode, fills) as job:
        for fill in range(1, fills + 1):
            assert disk is not None
            before = hold_up(folder, logs, fill, seconds, disk)
        if fills and mode == "sync":  # the job goes on when it has taken a snapshot again
            until(lambda: bool(snapshots(logs) - before), "snapshot after the full disk")
            (folder / "taken").touch()
        out, _ = job.communicate(timeout=300)
    assert job.returncode == 0, said(folder)
    return str(out)


def test_a_sync_job_waits_for_room_and_keeps_its_bits(tmp_path: Path, disk: Disk) -> None:
    """A disk full once for long: the job waits, a worker that died meanwhile gets its seat, snapshots are
    taken again, and the final bits are those of a job with room.
    """
    expected = train(tmp_path / "plain", tmp_path / "logs", "sync", 0, 0, None)
    assert train(tmp_path / "full", disk.path / "logs", "sync", 1, 4.0, disk) == expected
    screen = said(tmp_path / "full")
    assert screen.count("a new process takes its seat") == 1, screen
    assert all(takes_turns(screen, server) for server in (0, 1)), screen


def test_an_async_job_counts_every_push_once(tmp_path: Path, disk: Disk) -> None:
    """In async mode, with a disk that is full twice for a while, every sample has been used exactly twice."""
    out = train(tmp_path / "full", disk.path / "logs", "async", 2, 0.7, disk)
    assert out.startswith(f"used {[2] * 160}")
    assert all(takes_turns(said(tmp_path / "full"), server) for server in (0, 1))


def test_a_job_on_a_full_disk_ends_when_it_is_asked(tmp_path: Path, disk: Disk) -> None:
    """SIGTERM while the disk is full and a snapshot waits for its cut: all processes end by themselves."""
    folder = tmp_path / "full"
    # The first snapshot comes when the disk is full already: one that was complete would cover the last
    # round, and no other would be tried.
    with running(folder, disk.path / "logs", "sync", 1, every="5s") as job:
        until(lambda: all((folder / f"at.{me}.1").exists() for me in (0, 1)), "step")
        disk.fill()
        (folder / "full.1").touch()
        until(lambda: disk.stays_full() and "could not be taken" in said(folder), "failed cut")
        until(lambda: any(disk.path.glob("logs/*/snapshots/.*.partial")), "next snapshot")
        job.terminate()
        job.communicate(timeout=60)
    assert "(asked to stop, clean)" in said(folder), said(folder)
