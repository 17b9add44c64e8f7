"""A plugin of pytest (-p tests.tables.on_disk): rows of tables that name no device are on disk.

Each table has as few rows in memory as it may have, so that they come and go all the time.
"""

import os
import tempfile

import pytest

from psfleet.core.engine.tables import disk_arena, disk_rows
from psfleet.core.engine.tables.budget import MemoryBudget
from psfleet.core.engine.tables.disk_rows import DiskRowMemory
from psfleet.core.engine.tables.memory_choice import MemoryChoice
from psfleet.core.engine.tables.sparse import SparseTable

_folder = tempfile.TemporaryDirectory()
disk_rows.LEAST = disk_arena.LEAST = 1 << 14  # type: ignore[attr-defined]
_keep_ahead = DiskRowMemory.keep_ahead


def keep_ahead(self: DiskRowMemory, available: int | None = None) -> None:
    """Let no more rows stay, whatever there is."""
    _keep_ahead(self, 0)


DiskRowMemory.keep_ahead = keep_ahead  # type: ignore[method-assign]
os.environ["PSFLEET_DISK"] = _folder.name
SparseTable.__init__.__defaults__ = (2**28, 1, None, "disk", MemoryBudget(folder=_folder.name))
MemoryChoice.__init__.__defaults__ = ("disk", True, {}, False, _folder.name)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what means host memory, or devices by their names."""
    others = (
        "test_arena.py",
        "test_memory.py",
        "test_device.py",
        "test_disk.py",
        "test_room.py",
        "test_refusals.py",
    )
    for item in items:
        if item.path.name in others:
            item.add_marker(pytest.mark.skip(reason="it is not of rows on disk"))
