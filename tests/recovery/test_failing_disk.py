"""A disk that loses pages cannot make a server acknowledge what it has lost.

The disk is a real one: a file system on a loop device, whose file lies on a disk that is too small for it.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from psfleet.core.base.errors import LogError
from psfleet_server.durability.log import records
from tests.programs import ended

_SERVER = """
import itertools, os, pathlib, sys
from psfleet_server.durability.log import LogHeader, ServerLog
log = ServerLog(pathlib.Path(sys.argv[1]), LogHeader(job="j"), fsync=True)
log.forget()
for number in itertools.count(1):
    log.append(10, [os.urandom(1 << 20)])
    log.settle(log.end)
    print(number, flush=True)
"""


@pytest.fixture
def failing(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk that has 64 MB, and fails after 4."""
    below, folder = tmp_path / "below", tmp_path / "disk"
    image = below / "image"
    steps: list[list[str | Path]] = [
        ["mount", "-t", "tmpfs", "-o", "size=4m", "psfleet-test", below],
        ["truncate", "-s", "64M", image],
        ["mkfs.ext4", "-q", "-O", "^has_journal", image],
        ["mount", "-o", "loop", image, folder],
    ]
    below.mkdir()
    folder.mkdir()
    try:
        for step in steps:
            if (process := ended(step)).returncode:
                pytest.skip(f"NOT TESTED: no disk can be made here: {process.stderr}")
        yield folder
    finally:
        for path in folder, below:
            if path.is_mount():
                subprocess.run(["umount", path], check=True)


@pytest.mark.long
def test_lost_pages_are_not_read_from_memory(failing: Path) -> None:
    """A server whose log cannot be synced ends. The next process does not find the record whose pages only
    the page cache still had."""
    process = ended([sys.executable, "-c", _SERVER, failing / "log"])
    assert process.returncode == 1
    assert "cannot be synced to disk" in process.stderr
    acknowledged, whole = len(process.stdout.split()), 0
    assert acknowledged
    # A kernel may report the loss one sync late, so the record before may be damaged too.
    with contextlib.suppress(LogError):
        for kind, *_ in records(failing / "log"):
            whole += kind > 0
    assert whole <= acknowledged
