"""A disk that is full for a while holds a job up and does nothing else to it.

The disk is a real one: a file system in memory, mounted small for the test and filled to the last byte.
"""

import errno
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from psfleet.errors import NoRoom
from psfleet_server.log import Log

SCRIPT = str(Path(__file__).with_name("scripts") / "filled.py")
FULL = "cannot be written: No space left on device; make room for it. Pushes wait"
AGAIN = "is written again, after"
pytestmark = pytest.mark.timeout(600)


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

    def free(self) -> None:
        """Give the room back."""
        self._ballast.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A disk of 64 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "psfleet-test", path],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"NOT TESTED: no disk can be mounted here: {mounted.stderr}")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", path], check=True)


def until(happens: Callable[[], bool], what: str) -> None:
    """Wait for it."""
    deadline = time.monotonic() + 120
    while not happens():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.02)


def hold_up(folder: Path, fill: int, seconds: float, disk: Disk) -> None:
    """Let the disk be full for so long from the moment on in which the screen says so."""
    screen = folder / "screen"
    full, again = (screen.read_text().count(said) for said in (FULL, AGAIN))
    workers = (0, 1) if fill == 1 else (0,)
    until(lambda: all((folder / f"at.{worker}.{fill}").exists() for worker in workers), "step")
    disk.fill()
    (folder / f"full.{fill}").touch()
    until(lambda: screen.read_text().count(FULL) > full, "word of the full disk")
    time.sleep(seconds)
    disk.free()
    until(lambda: screen.read_text().count(AGAIN) > again, "word of the room")


def train(
    folder: Path, logs: Path, mode: str, fills: int, seconds: float, disk: Disk | None
) -> str:
    """The output of a job whose disk is full so many times for so long; its messages are in `screen`."""
    folder.mkdir()
    screen = folder / "screen"
    command = [sys.executable, "-m", "psfleet_launch", "--servers", "2", "--workers", "2"]
    command += ["--durability", "log", "--restart-workers", "3", "--snapshot-every", "0.3s"]
    command += ["--no-progress", "--log-dir", str(logs), SCRIPT, mode, str(folder), str(fills)]
    with screen.open("wb") as stream:
        job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stream, text=True)
    try:
        for fill in range(1, fills + 1):
            assert disk is not None
            hold_up(folder, fill, seconds, disk)
        out, _ = job.communicate(timeout=300)
    finally:
        if job.poll() is None:
            job.terminate()
            job.communicate(timeout=60)
    assert job.returncode == 0, screen.read_text()
    return out


@pytest.mark.parametrize(("fills", "seconds"), [(1, 4.0), (4, 0.7)])
def test_a_sync_job_waits_for_room_and_keeps_its_bits(
    tmp_path: Path, disk: Disk, fills: int, seconds: float
) -> None:
    """A disk full once for long or often for a while: the job waits, a worker that died meanwhile gets its
    seat, snapshots are taken again, and the final bits are those of a job with room.
    """
    expected = train(tmp_path / "plain", tmp_path / "logs", "sync", 0, 0, None)
    assert train(tmp_path / "full", disk.path / "logs", "sync", fills, seconds, disk) == expected
    screen = (tmp_path / "full" / "screen").read_text()
    assert screen.count("a new process takes its seat") == 1, screen
    assert 1 <= screen.count(FULL) <= 2 * fills, screen  # once by each server
    assert sorted((disk.path / "logs").glob("*/snapshots/snapshot-*"))


@pytest.mark.parametrize(("fills", "seconds"), [(1, 4.0), (4, 0.7)])
def test_an_async_job_counts_every_push_once(
    tmp_path: Path, disk: Disk, fills: int, seconds: float
) -> None:
    """In async mode, with the same full disk, every sample has been used exactly twice."""
    out = train(tmp_path / "full", disk.path / "logs", "async", fills, seconds, disk)
    assert out.startswith(f"used {[2] * 160}")


def test_a_record_without_room_leaves_the_log_as_it_was(disk: Disk) -> None:
    """A record for which there is no room is refused and said once; the next follows the last whole one."""
    said: list[str] = []
    log = Log(disk.path / "server.0.log", {"job": "j"}, tell=said.append)
    log.forget()
    log.append(9, [b"first"])
    end = log.end
    disk.fill()
    for _ in range(3):
        with pytest.raises(NoRoom, match="No space left on device; make room"):
            log.append(9, [bytes(1 << 20)])
    assert (log.end, len(said)) == (end, 1)
    disk.free()
    log.append(9, [b"second"])
    log.close()
    assert AGAIN in said[1]
    again = Log(disk.path / "server.0.log", {"job": "j"})
    assert [bytes(body) for _, body in again.recover()] == [b"first", b"second"]
    again.close()
