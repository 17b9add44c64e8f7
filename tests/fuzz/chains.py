"""Chains of files: snapshots that say the changes of others, and logs in several files.

Files are changed, and whole ones are missing, doubled, or of another chain. The promise: what is read of a
chain is bit for bit what was written, or it is refused. Only a log may have lost its end, as when a server
dies while it writes: then the server is as after the last record that is whole.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from psfleet.checkpoint import (
    CutPosition,
    Manifest,
    SnapshotDraft,
    load_shard,
    save_fleet,
    write_frozen,
)
from psfleet.core.base.errors import PsfleetError
from psfleet.core.base.object_store import own_name
from psfleet.core.engine.consistency import find_mode
from psfleet.core.engine.runtime_interface import Gradient, Read
from psfleet.core.engine.shard.events import BeginCut, Join, Push, WriteSnapshot
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.shard.snapshot_cuts import PendingCut
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.durability.journal import Journal
from psfleet_server.durability.log import LogHeader, ServerLog, records
from psfleet_server.durability.records import server_state
from psfleet_server.durability.recovery import take
from tests.fuzz.files import SPECS, Reader, of_folder, reseal_log, seal_manifest
from tests.fuzz.frames import Broken
from tests.server.seating import register

TIP = "2"
"""The last of three snapshots that build on each other: `0`, `1`, `2`."""
LOG = "server.0.log"
"""The first of the files of a log."""

_IDS = np.array([3, -9, 2**63 - 1, 5, 8])


def push(shard: Shard, number: int, seed: int) -> None:
    """The number-th push; of another seed with other values."""
    dice = np.random.default_rng((seed, number))
    ids = _IDS[(number + np.arange(2)) % len(_IDS)]
    values = {
        SPECS[0].key: Gradient(SPECS[0].key, dice.standard_normal(6, np.float32), None, 0.1),
        SPECS[1].key: Gradient(SPECS[1].key, dice.standard_normal((2, 2), np.float32), ids, 0.1),
    }
    gradients = tuple(values[key] for key in values if key in shard.tables)
    [reply] = shard.handle(Push(0, 1, number, gradients, 1, 0.5), "push")
    assert not hasattr(reply, "error"), reply


def content(shard: Shard) -> list[object]:
    """What a user can pull, and what the server has had of whom."""
    reads = [
        Read(spec.key, _IDS if spec.kind == "sparse" else None)
        for spec in SPECS
        if spec.key in shard.tables
    ]
    tables = [values.tobytes() for values in shard.tables.read(reads)]
    steps = [table.step for table in shard.tables.values()]
    return [tables, steps, dict(shard.workers.incarnations), dict(shard.workers.sequences)]


# -- snapshots -----------------------------------------------------------------------------------


def some_snapshots(folder: Path, seed: int, count: int = 3) -> dict[str, bytes]:
    """A base and the deltas after it, each in a folder with its number."""
    shard = Shard(workers=1)
    shard.handle(Join(0, 1, find_mode("async")), "join")
    shard.create(SPECS[0], np.zeros(6, np.float32), 0)
    shard.create(SPECS[1], np.zeros(0, np.float32), 0)
    for number in range(count):
        push(shard, number + 1, seed)
        cutting = PendingCut(number + 1, since=number, remember=True)
        base = str(folder / str(number - 1)) if number else None
        save_fleet(str(folder / str(number)), [shard], cutting, base)
    return of_folder(folder)


def loaded(snapshot: Path) -> list[object]:
    """What a fresh server is that begins with this snapshot."""
    shard = Shard()
    try:
        load_shard(snapshot, shard)
    except PsfleetError:
        if shard.tables:
            raise Broken("a snapshot was refused and has changed the shard") from None
        raise
    return content(shard)


def reseal_snapshots(folder: Path) -> None:
    """Give every manifest the checksums of the files that are there, and of the manifest before it."""
    for number in range(int(TIP) + 1):
        with contextlib.suppress(Exception):  # where nothing fits, nothing need be made to fit
            seal_manifest(folder / str(number))


def _reads_the_same(good: Path) -> Callable[[Path], None]:
    expected = loaded(good)

    def read(folder: Path) -> None:
        if loaded(folder / TIP) != expected:
            raise Broken("a chain was read as what it is not")

    return read


# -- logs ----------------------------------------------------------------------------------------


class Server:
    """A server without a network that keeps a log, and snapshots beside it."""

    def __init__(self, folder: Path, job: str = "j", index: int = 0) -> None:
        header = LogHeader(job=job, server=index, servers=index + 1, workers=1)
        self.folder = folder
        self.log = ServerLog(folder / LOG, header)
        self.shard, self.coordinator = Shard(0, 1, 1), Coordinator(1)
        try:
            Journal(self.log, self.shard, self.coordinator, str(folder / "snapshots")).start()
        except BaseException:
            self.log.close()
            raise

    def snapshot(self, number: int, *, complete: bool) -> None:
        """Cut here, which begins a file of the log; write the snapshot, or leave it incomplete."""
        cutting = PendingCut(number, members={})
        [kept] = [
            i for i in self.shard.handle(BeginCut(cutting), "begin") if isinstance(i, WriteSnapshot)
        ]
        with contextlib.closing(kept.frozen):
            if complete:
                path = str(self.folder / "snapshots" / own_name(number))
                state = server_state(kept.frozen.state, self.coordinator)
                with SnapshotDraft(path) as draft:
                    file = write_frozen(draft.folder, kept.frozen, state)
                    draft.finish(Manifest(SPECS[1:], (file,), CutPosition(number, "async")))


@dataclass(frozen=True)
class ChainedLog:
    """A log in three files.

    Attributes:
        files: They, and the complete snapshots with which some of them begin.
        ends: Of each file of the log, where its header and each of its records ends.
        states: What the server was after each record of all files; the first: before any.
    """

    files: dict[str, bytes]
    ends: dict[str, list[int]]
    states: list[list[object]]

    def may_be(self, found: Mapping[str, bytes]) -> list[list[object]]:
        """What a server may be that starts from these files."""
        *_, last = self.ends
        if [name for name in self.files if self.files[name] != found.get(name)] != [last]:
            return self.states[-1:]
        good, bad = self.files[last], found.get(last, b"")
        same = next(
            (i for i, (a, b) in enumerate(zip(good, bad, strict=False)) if a != b), len(bad)
        )
        lost = sum(end > same for end in self.ends[last][1:])
        return [self.states[-1], self.states[len(self.states) - 1 - lost]]

    def read(self, folder: Path) -> None:
        """Start a server from the files, and compare."""
        files = of_folder(folder)
        server = Server(folder)
        server.log.close()
        if content(server.shard) not in self.may_be(files):
            raise Broken("a server started that is what no server was")


def a_log(
    folder: Path, seed: int, job: str = "j", index: int = 0, complete: tuple[int, ...] = ()
) -> ChainedLog:
    """Six pushes, and after each second one of the first four a cut; those named are complete."""
    folder.mkdir(exist_ok=True)
    server = Server(folder, job, index)
    register(server.coordinator, 0, 70, 1)
    server.shard.handle(Join(0, 1, find_mode("async")), "join")
    server.shard.create(SPECS[1], np.empty(0, np.float32), 0)
    for number in range(1, 7):
        push(server.shard, number, seed)
        if number in (2, 4):
            server.snapshot(number // 2, complete=number // 2 in complete)
    paths = server.log.files.values()
    server.log.close()
    ends, states = {}, [content(Shard(0, 1, 1))]
    shard, coordinator = Shard(0, 1, 1), Coordinator(1)
    for path in paths:
        ends[path.name] = [end for _, _, end, _ in records(path)]
        for kind, body, *_ in records(path):
            if kind:
                take(kind, body, shard, coordinator)
                states.append(content(shard))
    return ChainedLog(of_folder(folder), ends, states)


def _start(folder: Path) -> None:
    Server(folder).log.close()


def readers(folder: Path) -> list[Reader]:
    """Readers of chains, each with files of others that look the same from outside."""
    snapshots, others = (some_snapshots(folder / f"snapshots {seed}", seed) for seed in (1, 2))
    same = _reads_the_same(folder / "snapshots 1" / TIP)
    log = a_log(folder / "log", 1)
    strange: list[Any] = [
        *a_log(folder / "another job", 1, "k").files.values(),
        *a_log(folder / "another server", 1, "j", 1).files.values(),
    ]
    again = list(a_log(folder / "another run", 2).files.values())
    recent = a_log(folder / "recent log", 1, complete=(2,))
    short = a_log(folder / "short log", 1, complete=(1, 2))
    kept = {name: content for name, content in short.files.items() if name != LOG}
    short = replace(short, files=kept)
    return [
        Reader("chain", snapshots, same, True, None, [*others.values()]),
        Reader(
            "hostile chain",
            snapshots,
            lambda at: loaded(at / TIP),
            False,
            reseal_snapshots,
            [*others.values()],
        ),
        Reader("chained log", log.files, log.read, False, None, [*strange, *again]),
        Reader("log and snapshot", recent.files, recent.read, False, None, strange),
        Reader("short log", kept, short.read, False, None, strange),
        Reader("hostile chained log", recent.files, _start, False, reseal_log, strange),
    ]
