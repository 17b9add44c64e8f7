"""Rows on disk: the same bits as in memory, whatever stays in memory and whatever the disk refuses."""

import ctypes
import mmap
import os
import resource
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.settings.environment import Environment
from psfleet.core.engine.rules import SGD, make_rule
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.tables import arena, disk_arena, disk_rows
from psfleet.core.engine.tables.budget import MemoryBudget
from psfleet.core.engine.tables.disk_arena import PAGE, DiskArena
from psfleet.core.engine.tables.host_rows import HostRowMemory
from psfleet.core.engine.tables.memory_choice import MemoryChoice
from psfleet.core.engine.tables.row_data import RowData
from psfleet.core.engine.tables.sparse import SparseTable
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from tests.tables.test_freezing import PLAIN, SPECS, change, content
from tests.tables.test_freezing import read as read_frozen
from tests.tables.test_sparse import SPEC, Model
from tests.waiting import until


@pytest.fixture(autouse=True)
def one_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A table may keep one page in memory, and half of those of a call."""
    monkeypatch.setattr(disk_rows, "LEAST", 4096)
    monkeypatch.setenv("PSFLEET_DISK", str(tmp_path / "rows"))


def on_disk(spec: TableSpec, max_rows: int = 2**20) -> SparseTable:
    host, own = MemoryBudget(limit=1 << 30), MemoryBudget(folder=os.environ["PSFLEET_DISK"])
    own.charge("another table", 1 << 30)  # which leaves no more
    return SparseTable(spec, max_rows, 1, host, "disk", own)


class DiskModel(Model):
    """The model of a table in memory, of one on disk."""

    def make(self, max_rows: int) -> SparseTable:
        return on_disk(SPEC, max_rows)


TestDiskModel = DiskModel.TestCase
TestDiskModel.settings = settings(max_examples=3, stateful_step_count=12, deadline=None)


def state(table: SparseTable) -> list[object]:
    rows = table.rows(table.ids())
    assert isinstance(rows, RowData)
    return [table.clock, *(part.tobytes() for part in (rows.ids, rows.values, rows.touched))]


ON_DISK = SPECS | {
    f"rows of {dim}": TableSpec("wide", "sparse", (dim,), make_rule("adam", {}), seed=1)
    for dim in (101, 341)  # padded, the latter to whole pages
}


@pytest.mark.parametrize("name", ON_DISK)
def test_rows_on_disk_are_those_in_memory(name: str) -> None:
    """After updates, removals, expiry, eviction and shrinks, and in snapshots that are read meanwhile."""
    tables = [on_disk(ON_DISK[name]), SparseTable(ON_DISK[name])]
    snapshots = []
    for table in tables:
        dice = np.random.default_rng(5)
        for number in range(120):
            change(table, dice)
            if number == 60:
                frozen = table.freeze()
        snapshots.append(content(read_frozen(frozen)))
        frozen.close()
    assert snapshots[0] == snapshots[1]
    assert state(tables[0]) == state(tables[1])
    paging = tables[0].paging
    assert (paging is None) == (name == "every row")
    assert paging is None or min(paging.read, paging.written) > 0
    if paging is not None and name != "rows of 341":  # the page of memory has no room for these
        assert paging.found > 0


def test_a_full_disk_refuses_new_rows_alone() -> None:
    """Known rows train on, nothing is lost, and with room again the refused push is taken."""
    there, memory = on_disk(PLAIN), SparseTable(PLAIN)
    known, more = np.arange(2000), np.arange(10**6, 10**6 + 100_000)
    for table in (there, memory):
        table.push(known, np.ones((2000, PLAIN.dim), np.float32), 0.1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, before[1]))
    try:
        with pytest.raises(
            UsageError, match=r"rows on disk in .*/rows' cannot grow to .* Make room"
        ):
            there.check_room([more])
        with pytest.raises(
            UsageError, match=r"rows on disk in .*/rows' cannot grow to .* Make room"
        ):
            there.push(more, np.ones((100_000, PLAIN.dim), np.float32), 0.1)
        assert state(there) == state(memory)
        for table in (there, memory):
            table.push(known, np.ones((2000, PLAIN.dim), np.float32), 0.1)
        assert state(there) == state(memory)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    for table in (there, memory):
        table.push(more, np.ones((100_000, PLAIN.dim), np.float32), 0.1)
    assert state(there) == state(memory)


@pytest.mark.parametrize("name", ["plain", "every row"])
def test_no_more_rows_are_reserved_than_a_table_can_hold(name: str) -> None:
    """A number above its limit takes no more of the disk than the limit."""
    sizes = []
    for rows in (1000, 1_000_000):
        table = on_disk(SPECS[name], max_rows=1000)
        table.reserve(rows)
        file: Any = table._index
        sizes.append(os.fstat(file._disk._file).st_size)
    assert sizes[0] == sizes[1] > 0


def test_rows_on_disk_are_no_device_memory() -> None:
    """`device_bytes` of stats and metrics is memory of a GPU; what is on the disk is told beside it."""
    table = on_disk(PLAIN)
    table.push(np.arange(20_000), np.ones((20_000, PLAIN.dim), np.float32), 0.1)
    assert table.device_bytes == 0
    assert table.paging is not None
    assert 0 < table.paging.disk_bytes < table.bytes


def test_the_folder_is_empty_and_snapshots_move_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files have no names, so that no kill leaves one; what was saved on disk loads in memory, and back."""
    saved, contents = [str(tmp_path / name) for name in ("first", "second")], []
    rows = Gradient(PLAIN.key, np.ones((3000, PLAIN.dim), np.float32), np.arange(3000), 0.1)
    there = EmbeddedRuntime()
    there.create(PLAIN)
    there.push([rows])
    assert there._shard.tables[PLAIN.key].device == "disk"
    assert os.listdir(os.environ["PSFLEET_DISK"]) == []
    contents.append(there.read_table(PLAIN.key).values)
    there.save(saved[0])
    for path, device in zip([*saved, ""], ["cpu", "disk"], strict=False):
        monkeypatch.setenv("PSFLEET_DISK", "" if device == "cpu" else str(tmp_path / "rows"))
        runtime = EmbeddedRuntime()
        runtime.load(path)
        assert runtime._shard.tables[PLAIN.key].device == device
        contents.append(runtime.read_table(PLAIN.key).values)
        runtime.save(saved[1])
    expected = [[part.tobytes() for part in one] for one in contents]
    assert expected[0] == expected[1] == expected[2]


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes_all", "what"),
    [(False, "does not keep the rows of table 't'"), (True, "does not give back rows of tables")],
)
def test_a_page_that_cannot_be_read_ends_the_process(changes_all: bool, what: str) -> None:
    """It says which disk failed, and what to do; whether rows are read by calls or by their addresses."""
    code = f"""
import os, numpy as np
from tests.tables.test_disk import on_disk, disk_rows
from tests.tables.test_freezing import EVERY_ROW, PLAIN
disk_rows.LEAST = 4096
table = on_disk(EVERY_ROW if {changes_all} else PLAIN)
for first in range(0, 40000, 4000):
    ids = np.arange(first, first + 4000)
    table.push(ids, np.ones((4000, PLAIN.dim), np.float32), 0.1)
disk = table._index._disk
os.ftruncate(disk._file, 4096)
os.dup2(os.open("/dev/null", os.O_RDWR), disk._direct)
table.pull_into(np.arange(40000), np.empty((40000, PLAIN.dim), np.float32))
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert process.returncode == 1, process.stderr
    sentence = (
        f"the disk of '{os.environ['PSFLEET_DISK']}' {what}; start again from the log or a snapshot"
    )
    assert process.stderr.splitlines()[-1] == sentence


@pytest.fixture
def failing_disk(tmp_path: Path) -> list[str]:
    """The beginning of a command that runs another one, for which `tmp_path / "disk"` is a file system of
    200 MiB whose disk fails after 8 MiB."""
    if os.geteuid() != 0 or not os.path.exists("/dev/loop-control"):
        pytest.skip("only root may mount a file system")
    words = (
        f"cd {tmp_path} && mkdir -p backing disk && mount -t tmpfs -o size=8m none backing && "
        "truncate -s 200m backing/image && mkfs.ext4 -q -O ^has_journal backing/image && "
        'mount -o loop backing/image disk && exec "$@"'
    )
    command = ["unshare", "--mount", "sh", "-c", words, "sh"]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"this machine mounts no image: {tried.stderr}")
    return command


@pytest.mark.parametrize("limit", [6 << 20, 1 << 30], ids=["memory is short", "memory suffices"])
def test_a_page_that_cannot_be_written_ends_the_process(
    failing_disk: list[str], tmp_path: Path, limit: int
) -> None:
    """Linux forgets such a page after it has reported the error once, and then reads its old bytes."""
    code = f"""
import contextlib, os, numpy as np
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.tables.budget import MemoryBudget
from psfleet.core.engine.tables.sparse import SparseTable
spec = TableSpec("wide", "sparse", (1024,), make_rule("sgd", {{}}), every_row=True)
host, own = MemoryBudget(limit={limit}), MemoryBudget(folder={str(tmp_path / "disk")!r})
table = SparseTable(spec, 2**20, 1, host, "disk", own)
values = np.ones((500, 1024), np.float32)
file = os.open(f"/proc/self/fd/{{table._index._disk._file}}", os.O_RDWR)
for first in range(0, 10_000, 500):
    table.push(np.arange(first, first + 500), values, 0.1)
    with contextlib.suppress(OSError):
        os.fsync(file)  # as Linux does by itself, up to half a minute later
print("lives on")
"""
    command = [*failing_disk, sys.executable, "-c", code]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.stdout == ""
    assert process.returncode == 1, process.stderr
    sentence = (
        f"the disk of '{tmp_path}/disk' does not keep the rows of table 'wide'; start again from the "
        "log or a snapshot"
    )
    assert process.stderr.splitlines()[-1] == sentence


def test_ids_that_cannot_be_written_end_the_process() -> None:
    """A row that compaction moves by the id of another row would be lost."""
    code = """
import os, numpy as np
from tests.tables.test_disk import on_disk, disk_rows
from tests.tables.test_freezing import PLAIN
disk_rows.LEAST = 4096
table = on_disk(PLAIN)
os.dup2(os.open("/dev/null", os.O_RDWR), table._index._owners._file)
for first in range(0, 40000, 4000):
    table.push(np.arange(first, first + 4000), np.ones((4000, PLAIN.dim), np.float32), 0.1)
"""
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert process.returncode == 1, process.stderr
    assert "does not keep the rows of table 't'" in process.stderr.splitlines()[-1]


def test_a_file_stays_small_and_snapshots_hold_what_was() -> None:
    """Rows come and go ten times over: the file is not larger than for half as many rows again."""
    there, memory = on_disk(PLAIN), SparseTable(PLAIN)
    dice = np.random.default_rng(3)
    for number in range(60):
        ids = dice.permutation(20_000)[:4000]
        for table in (there, memory):
            table.push(ids, np.full((4000, PLAIN.dim), 0.01 * number, np.float32), 0.1)
        if number == 30:
            frozen = [table.freeze() for table in (there, memory)]
    assert content(read_frozen(frozen[0])) == content(read_frozen(frozen[1]))
    assert state(there) == state(memory)
    index = there._index
    assert isinstance(index, disk_rows.DiskRowMemory)
    assert index._traffic.written > 200_000
    assert len(index._there) * index._row < 1.5 * 20_000 * index._row + (2 << 20)
    assert index._in_file == index._held.sum() == index._there.sum() > 15_000


def test_many_rows_are_copied_and_moved_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux moves less than 2 GiB at once, and the budget does not count the buffers of a call."""
    sizes, transfer = [0], DiskArena.transfer

    def noted(self: DiskArena, *arguments: Any) -> bool:
        sizes.extend(arguments[3] if len(arguments) > 3 else ())
        return transfer(self, *arguments)

    monkeypatch.setattr(DiskArena, "transfer", noted)
    host, own = MemoryBudget(limit=1 << 30), MemoryBudget(folder=os.environ["PSFLEET_DISK"])
    table = SparseTable(
        TableSpec("wide", "sparse", (1024,), SGD(), seed=3), 2**20, 1, host, "disk", own
    )
    index, ids = table._index, np.arange(8000)
    table.push(ids, np.ones((8000, 1024), np.float32), 0.1)
    expected = table.page(0, 8000).values
    index.keep_ahead(0)  # the memory of other tables has grown
    table.pull_into(ids[:1], np.empty((1, 1024), np.float32))
    slots = index.locate(ids)[0]
    tracemalloc.start()
    rows = index.gather(slots)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows.tobytes() == expected.tobytes()
    assert peak < rows.nbytes + (16 << 20)
    assert 1 << 20 < max(sizes) <= 8 << 20


@pytest.mark.parametrize("dim", [8, 1024])
def test_the_budget_covers_what_the_file_takes_in_memory(dim: int) -> None:
    """The host's budget counts the arrays that say which slots of the file have rows.

    A row of 4,096 bytes is a block of its own, for which these take 13 bytes.
    """
    table = on_disk(TableSpec("wide", "sparse", (dim,), SGD(), seed=3))
    index = table._index
    assert isinstance(index, disk_rows.DiskRowMemory)
    promised = index.most_bytes_with(4000)
    table.push(np.arange(4000), np.ones((4000, dim), np.float32), 0.1)
    beside = index._there.nbytes + index._held.nbytes
    assert index.bytes >= beside + 4000 * 4 * dim
    arenas = HostRowMemory.most_bytes_with(index, 0)
    assert index.most_bytes_with(0) == arenas + beside <= promised


@pytest.mark.parametrize("dim", [1, 63, 64, 67, 1023, 1024])
def test_no_width_of_rows_makes_large_blocks(dim: int) -> None:
    """An empty table takes 18 blocks, and a call may wait until 16 of them have moved."""
    table = on_disk(TableSpec("odd", "sparse", (dim,), make_rule("adam", {})))
    index = table._index
    assert isinstance(index, disk_rows.DiskRowMemory)
    assert index._block * index._row <= 256 << 10
    assert index._disk.made <= 6 << 20
    assert 0 <= index.pad <= 12 * dim / 32


@pytest.mark.parametrize("limit", [1 << 30, (1 << 30) + 12_345_678])
def test_a_file_is_mapped_at_large_pages_of_memory(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """Linux on ARM may have pages of 64 KiB, and maps nothing between them."""
    monkeypatch.setattr(mmap, "PAGESIZE", 1 << 16)
    host, own = MemoryBudget(limit=limit), MemoryBudget(folder=os.environ["PSFLEET_DISK"])
    index = SparseTable(TableSpec("odd", "sparse", (7,), SGD()), 2**20, 1, host, "disk", own)._index
    assert isinstance(index, disk_rows.DiskRowMemory)
    for file in (index._disk, index._owners):
        assert file._near % (1 << 16) == 0 < file._near


def test_requests_that_linux_has_no_room_for_are_repeated(tmp_path: Path) -> None:
    """Linux answers EAGAIN for want of memory; here for want of places for events. Or one by one."""
    disk, size, count = DiskArena(8 << 20, 0, str(tmp_path), PAGE), PAGE, 1000
    disk.grow(count * size)
    disk._set_up_requests()
    setup = disk._kernels.SETUP
    if setup < 0:
        pytest.skip("this processor makes requests one by one")
    context = ctypes.c_long()
    assert disk_arena._libc.syscall(setup, 1, ctypes.byref(context)) == 0
    places = ctypes.c_uint.from_address(context.value + 4).value  # struct aio_ring: id, nr
    if places > disk._kernels.AT_ONCE:
        pytest.skip(f"a machine with so many processors has {places} places at least")
    content, again = disk_rows._whole_pages(count * size), disk_rows._whole_pages(count * size)
    at, sizes = np.arange(count) * size, np.full(count, size)
    for disk._context in (context, ctypes.c_long()):
        content[:] = np.random.default_rng(1).integers(0, 256, len(content), np.uint8)
        again[:] = 0
        assert disk.transfer(True, at, content.ctypes.data + at, sizes)
        assert disk.transfer(False, at, again.ctypes.data + at, sizes)
        assert again.tobytes() == content.tobytes()


def resident(arena: arena.Arena, start: int, end: int) -> int:
    """Pages of these bytes that are in memory, in the page cache or in this process."""
    pages = (ctypes.c_ubyte * ((end - start) // PAGE))()
    libc = ctypes.CDLL(None)
    assert libc.mincore(ctypes.c_void_p(arena.address + start), end - start, pages) == 0
    return sum(page & 1 for page in pages)


def test_pages_made_ahead_are_not_those_of_the_file(tmp_path: Path) -> None:
    """The thread that makes them runs beside calls. If it read a page of the file that a call is writing past
    the map, Linux could write the old page over the new rows."""
    near = 8 << 20
    disk = DiskArena(64 << 20, near, str(tmp_path), PAGE)
    disk.grow(8 << 20)
    disk.keep_ahead(4 << 20)
    disk.keep_ahead(near - PAGE)
    until(lambda: not arena._runs)
    if disk.populate(0, PAGE):  # else Linux is older than 5.14
        assert resident(disk, 4 << 20, 6 << 20) == 512
    assert resident(disk, near, near + disk.made) == 0


def test_released_memory_is_not_allocated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread may come to a request only after the memory that it is for has been given back."""
    requests: list[Any] = []
    monkeypatch.setattr(arena, "make_pages", lambda *request: requests.append(request))
    disk = DiskArena(64 << 20, 32 << 20, str(tmp_path), PAGE)
    disk.keep_ahead(16 << 20)
    disk.release_behind(8 << 20)
    for allocate, start, end in requests:
        allocate(start, end)
    assert requests
    assert disk.near_bytes_of(0) == 8 << 20
    assert resident(disk, 8 << 20, 32 << 20) == 0


def test_the_map_and_transfers_past_it_show_the_same_bytes(tmp_path: Path) -> None:
    """Whether their pages are in the page cache or not, as long as they take turns."""
    disk, count = DiskArena(8 << 20, 0, str(tmp_path), PAGE), 512
    size = count * PAGE
    disk.grow(size)
    mapped = np.frombuffer(disk._map, np.uint8)[:size].reshape(count, PAGE)
    content, dice = disk_rows._whole_pages(size).reshape(count, PAGE), np.random.default_rng(1)
    content[:] = 0
    for number in range(30):
        pages = dice.choice(count, 60, replace=False)
        content[pages] = number + 1
        offsets, sizes = pages * PAGE, np.full(len(pages), PAGE)
        if number % 3 == 2:  # as kernels do
            mapped[pages] = number + 1
            assert disk.drop()
        else:
            assert disk.transfer(True, offsets, content.ctypes.data + offsets, sizes)
        assert mapped.tobytes() == content.tobytes()
        again = disk_rows._whole_pages(size)
        every = np.arange(count) * PAGE
        assert disk.transfer(False, every, again.ctypes.data + every, np.full(count, PAGE))
        assert again.tobytes() == content.tobytes()


def test_where_rows_lie(tmp_path: Path) -> None:
    """--server-disk is for sparse tables that name no device; without it a table may not ask for it."""

    named = MemoryChoice.of_settings(Environment(disk=str(tmp_path)))
    none, asked = MemoryChoice.of_settings(Environment()), replace(PLAIN, device="disk")
    dense = TableSpec("w", "dense", (4,), SGD())
    assert [named.kind_for(spec).name for spec in (PLAIN, asked, dense)] == ["disk", "disk", "cpu"]
    assert none.kind_for(asked, may_refuse=False).name == "cpu"
    with pytest.raises(ConfigError, match="asks for device='disk', but no folder for it is named"):
        none.kind_for(asked)
    with pytest.raises(ConfigError, match="'disk', but no folder for it is named"):
        MemoryChoice.of_settings(Environment(device="disk"))
    with pytest.raises(ConfigError, match="only the rows of sparse tables may be on disk"):
        named.kind_for(replace(dense, device="disk"))


def test_a_slice_of_a_call_has_no_more_ids_than_slots_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows leave memory only between slices. In a table of 12 million rows in memory, a quarter of them is
    more than the slots beyond the limit: rows of a pull got slots of the file."""
    monkeypatch.setattr(disk_rows, "_BEYOND", 300)
    host, own = MemoryBudget(limit=1 << 30), MemoryBudget(folder=os.environ["PSFLEET_DISK"])
    table = SparseTable(TableSpec("narrow", "sparse", (1,), SGD()), 2**20, 1, host, "disk", own)
    index, ids = table._index, np.arange(1000)
    assert isinstance(index, disk_rows.DiskRowMemory)
    index.keep_ahead(1 << 30)
    assert index._limit > 4 * 300
    slices = list(index.near(ids))
    assert np.concatenate([ids[part] for part in slices]).tolist() == ids.tolist()
    assert all(part.stop - part.start <= 300 for part in slices)


def test_a_shrink_gives_back_the_memory_of_ids_too() -> None:
    """An id takes 8 bytes for each slot, which `resident_bytes` counts only for the slots that are left."""
    host, own = MemoryBudget(limit=1 << 30), MemoryBudget(folder=os.environ["PSFLEET_DISK"])
    spec = TableSpec("narrow", "sparse", (1,), SGD(), seed=3)
    table = SparseTable(spec, 2**23, 1, host, "disk", own)
    index, count = table._index, 1 << 20
    assert isinstance(index, disk_rows.DiskRowMemory)
    table.push(np.arange(count), np.ones((count, 1), np.float32), 0.1)
    expected = table.page(0, 1000).values
    assert resident(index._owners, 4 << 20, 8 * count) > 0
    index.keep_ahead(0)  # the memory of other tables has grown
    table.pull_into(np.arange(1), np.empty((1, 1), np.float32))
    assert index.resident_bytes < 8 << 20
    assert resident(index._owners, 4 << 20, 8 * count) == 0
    assert table.page(0, 1000).values.tobytes() == expected.tobytes()
