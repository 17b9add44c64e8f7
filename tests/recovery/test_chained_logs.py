"""A log in several files, each of which begins with a snapshot."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from psfleet.checkpoint import CutPosition, Manifest, SnapshotDraft, write_frozen
from psfleet.core.base.errors import LogError
from psfleet.core.base.object_store import own_name, own_place
from psfleet.core.engine.consistency import find_mode
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.events import BeginCut, Join, Push, WriteSnapshot
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.shard.snapshot_cuts import PendingCut
from psfleet.core.engine.tables.dense import DenseTable
from psfleet.core.net.server_state import ServerState
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.durability.inspect_log import replay, verify
from psfleet_server.durability.journal import Journal
from psfleet_server.durability.log import LogHeader, ServerLog, files_of, records
from psfleet_server.durability.records import write_coordinator
from tests.server.seating import register

DENSE = TableSpec("d", "dense", (3,), make_rule("adam", {}))
HEADER = LogHeader(job="j", server=0, servers=1, workers=1)


class Server:
    """A server without a network, that keeps a log in a folder, and snapshots there or at a URL."""

    def __init__(self, folder: Path, snapshots: str = "", fsync: bool = False) -> None:
        self.folder = folder
        self.snapshots = snapshots or str(folder / "snapshots")
        self.log = ServerLog(folder / "server.0.log", HEADER, fsync=fsync)
        self.shard, self.coordinator = Shard(), Coordinator(1)
        self.taken = Journal(self.log, self.shard, self.coordinator, self.snapshots)
        self.records = self.taken.start()

    def restarted(self) -> "Server":
        """The server after a restart, of which no bit has changed."""
        expected = self.content()
        self.log.close()
        again = Server(self.folder, self.snapshots)
        assert again.content() == expected
        return again

    def begin(self) -> None:
        """A worker and a table."""
        register(self.coordinator, 0, 70, 1)
        self.shard.handle(Join(0, 1, find_mode("async")), "join")
        self.shard.create(DENSE, np.ones(3, np.float32), 0)

    def push(self, *numbers: int) -> None:
        """The pushes of these numbers."""
        for number in numbers:
            values = np.random.default_rng(number).standard_normal(3, np.float32)
            self.shard.handle(Push(0, 1, number, (Gradient(DENSE.key, values, None, 0.1),)), "push")

    def snapshot(
        self,
        number: int,
        *,
        complete: bool,
        decisions: Callable[[Coordinator], bytes | None] = write_coordinator,
    ) -> None:
        """Cut here; write the snapshot, with these decisions of the coordinator, or leave it incomplete."""
        cutting = PendingCut(number, members={})
        [kept] = [
            i for i in self.shard.handle(BeginCut(cutting), "begin") if isinstance(i, WriteSnapshot)
        ]
        path = own_place(self.snapshots, number)
        if complete:
            state = ServerState(kept.frozen.state, decisions(self.coordinator))
            with SnapshotDraft(path) as draft:
                file = write_frozen(draft.folder, kept.frozen, state)
                draft.finish(Manifest((DENSE,), (file,), CutPosition(number, "async")))
        kept.frozen.close()

    def content(self) -> list[object]:
        """Every bit of it."""
        table = self.shard.tables[DENSE.key]
        assert isinstance(table, DenseTable)
        core = (
            self.shard.workers.incarnations,
            self.shard.workers.sequences,
            self.shard.tables.makers,
            self.shard.cuts.last,
        )
        members = repr(self.coordinator.members)
        return [table.step, [plane.tobytes() for plane in table.state()], repr(core), members]


def test_files_before_a_snapshot_are_not_needed(tmp_path: Path) -> None:
    """Complete, incomplete, complete: a server comes back from any of them and the log since."""
    server = Server(tmp_path)
    server.begin()
    server.push(1, 2)
    server.snapshot(1, complete=True)
    server.push(3)
    server.snapshot(2, complete=False)
    server.push(4, 5)
    assert list(files_of(tmp_path / "server.0.log")) == [0, 1, 2]
    again = server.restarted()  # from snapshot 1 and two files
    assert again.records == 4  # push 3, the second cut, pushes 4 and 5
    again.taken.shorten(1)
    again.snapshot(3, complete=True)
    last = again.restarted()
    assert last.records == 0
    last.taken.shorten(3)
    last.push(6)
    assert list(files_of(tmp_path / "server.0.log")) == [3]
    end = last.restarted()
    assert end.records == 1
    end.log.close()
    assert "1 file(s), 1 records (1 push)" in verify(str(tmp_path / "server.0.000003.log"))
    assert "after 1 records: mode async, round 0, pushes {0: 6}" in replay(
        str(tmp_path / "server.0.log"), save=str(tmp_path / "saved")
    )


@pytest.mark.parametrize("fsync", [False, True])
def test_a_cut_that_gets_no_file(tmp_path: Path, fsync: bool) -> None:
    """The log is as if nobody had asked for it: a replay does not know it, and later ones go on."""
    server = Server(tmp_path, fsync=fsync)
    server.begin()
    server.push(1)
    server.log.settle(server.log.end)
    blocked = tmp_path / "server.0.000001.log"
    blocked.mkdir()
    begun = server.shard.handle(BeginCut(PendingCut(1, members={})), "begin")
    assert not any(isinstance(instruction, WriteSnapshot) for instruction in begun)
    blocked.rmdir()
    server.push(2)
    server.log.settle(server.log.end)
    again = server.restarted()
    assert again.shard.cuts.last == 0
    again.snapshot(1, complete=True)
    again.push(3)
    again.restarted().log.close()


def test_damage_between_files_is_noticed(tmp_path: Path) -> None:
    """A file that is missing, or whose end is, does not pass for a shorter log."""
    server = Server(tmp_path)
    server.begin()
    server.push(1)
    server.snapshot(1, complete=False)
    server.push(2)
    server.log.close()
    first, second = (files_of(tmp_path / "server.0.log")[number] for number in (0, 1))
    whole, later = first.read_bytes(), second.read_bytes()
    ends = [end for _, _, end, _ in records(first)]
    for length in (*range(ends[0], len(whole), 5), *(end - 1 for end in ends[1:])):
        first.write_bytes(whole[:length])
        with pytest.raises(LogError, match=r"does not go on|damaged"):
            Server(tmp_path)
    first.write_bytes(whole)
    for bit in range(0, 8 * len(later), 25):  # one of three bytes, each in another place
        damaged = bytearray(later)
        damaged[bit // 8] ^= 1 << bit % 8
        second.write_bytes(damaged)
        with pytest.raises(LogError, match=r"no log|damaged|does not go on"):
            list(records(second))
    second.write_bytes(later)
    first.unlink()
    with pytest.raises(LogError, match="goes on from snapshot 1, which cannot be had"):
        Server(tmp_path)


@pytest.mark.parametrize("decisions", [None, b"of another version"])
def test_a_snapshot_that_no_server_can_start_from(tmp_path: Path, decisions: bytes | None) -> None:
    """Its state is found to be useless before a table is loaded: the log before the snapshot is used, or the
    server refuses to start in a sentence."""
    server = Server(tmp_path)
    server.begin()
    server.push(1, 2)
    server.snapshot(1, complete=True, decisions=lambda _: decisions)
    server.push(3)
    again = server.restarted()
    again.taken.shorten(1)
    again.log.close()
    with pytest.raises(LogError, match=r"snapshot 1, which cannot be had: .*snapshot"):
        Server(tmp_path)


def test_a_damaged_snapshot_is_not_believed(tmp_path: Path) -> None:
    """While the log before it is there, that is used instead; then the server refuses to start."""
    server = Server(tmp_path)
    server.begin()
    server.push(1, 2)
    server.snapshot(1, complete=True)
    server.push(3)
    file = tmp_path / "snapshots" / own_name(1) / "shard-0-of-1.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    again = server.restarted()
    again.taken.shorten(1)
    again.log.close()
    with pytest.raises(LogError, match="its checksum is not the manifest's"):
        Server(tmp_path)
