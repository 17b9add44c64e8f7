"""A control group of the kernel with a memory limit, of version 1 or 2, which ends with its test."""

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import until

_LIMITS = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))


@contextmanager
def memory_limit(limit: int) -> Iterator[list[str]]:
    """Beginning of a command that runs with so many bytes at most."""
    group = _group(limit)
    try:
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        until(lambda: _removed(group), "end of the control group")


def _group(limit: int) -> Path:
    for folder, name in _LIMITS:
        group = Path(folder) / f"psfleet-{os.getpid()}"
        with contextlib.suppress(OSError):
            group.mkdir()
            if (group / name).exists():
                (group / name).write_text(str(limit))
                return group
        _removed(group)
    pytest.skip("a limit of memory needs a control group that this user may make")


def _removed(group: Path) -> bool:
    """Remove the group once its processes have ended."""
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()
