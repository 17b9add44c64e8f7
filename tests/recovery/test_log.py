"""The log of a server: taken again it gives the same server, and damage is never taken for truth.

PSFLEET_TORTURE flips all bits of a log and cuts it everywhere. Otherwise it flips one bit of three bytes, and
cuts around the ends of records and at every fifth byte.
"""

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psfleet.core.base.errors import LogError
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine.consistency import find_mode
from psfleet.core.engine.rules import SGD, make_rule
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.engine.schema.entry import CapacityEntry
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.events import Join, Leave, PartState, Pull, Push, WriteState
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.tables.dense import DenseTable
from psfleet_server.coordinator.barriers import Arrival
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.durability.journal import Journal
from psfleet_server.durability.log import LogHeader, ServerLog, chained, records
from psfleet_server.durability.records import encode
from tests.programs import ended
from tests.server.seating import register

DENSE = TableSpec("d", "dense", (3,), make_rule("adam", {}))
SPARSE = TableSpec("s", "sparse", (2,), make_rule("adam", {}), seed=5)
HEADER = LogHeader(job="j")
PAGE, HEAD = 4096, 20  # bytes of a page of the disk, and of a record's head
ALL = bool(os.environ.get("PSFLEET_TORTURE"))


def kept(path: Path) -> tuple[ServerLog, Shard, Coordinator]:
    """A server that is what the log says and goes on writing it."""
    log, shard, coordinator = ServerLog(path, HEADER), Shard(workers=2), Coordinator(2)
    Journal(log, shard, coordinator).start()
    return log, shard, coordinator


def push(worker: int, number: int) -> Push:
    """The number-th push of a worker in its first incarnation."""
    dice = np.random.default_rng((worker, number))
    rows = dice.standard_normal((3, 2), np.float32)
    dense = Gradient(DENSE.key, dice.standard_normal(3, np.float32), None, 0.1)
    sparse = Gradient(SPARSE.key, rows, dice.permutation(9)[:3].astype(np.int64), 0.1)
    return Push(worker, 1 + worker, number, (dense, sparse), 4, 0.5)


def begin(shard: Shard, coordinator: Coordinator, mode: Mode) -> None:
    """Two workers and two tables."""
    for worker in range(2):
        register(coordinator, worker, 70 + worker, 2)
        shard.handle(Join(worker, 1 + worker, find_mode(mode)), "join")
    shard.create(DENSE, np.ones(3, np.float32), 0)
    shard.create(SPARSE, np.empty(0, np.float32), 0)


def train(shard: Shard, mode: Mode, numbers: range) -> None:
    """Every worker pushes; in sync mode it commits too."""
    for number in numbers:
        for worker in range(2):
            shard.handle(push(worker, number), "push")
        if mode == "sync":
            for worker in range(2):
                shard.handle(Pull(worker, 1 + worker, (), number), f"pull {worker}")


def content(shard: Shard) -> list[bytes]:
    """Every bit of the tables, and who has done what."""
    workers, rounds = shard.workers, shard.rounds
    done = workers.incarnations, workers.sequences, workers.writes, shard.tables.makers
    in_rounds = rounds.closed, sorted(rounds.held), rounds.resting, rounds.rests, rounds.left
    contents = [repr((shard.mode, done, in_rounds)).encode()]
    for table in shard.tables.values():
        parts = table.state() if isinstance(table, DenseTable) else table.state(0, len(table))
        contents += [repr(table.step).encode(), *(part.tobytes() for part in parts)]
    return contents


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_server_comes_back_as_it_was(tmp_path: Path, mode: Mode) -> None:
    """Tables, optimizer state, lives, sequences, held pushes, rests and leaves are all in the log."""
    log, shard, coordinator = kept(tmp_path / "log")
    begin(shard, coordinator, mode)
    train(shard, mode, range(1, 5))
    part = PartState(SPARSE.key, 9, np.ones((1, 6), np.float32), np.array([77]))
    shard.handle(WriteState((part,), 0, 1, 1), "write")
    shard.handle(Leave(1, 2, 4, 1), "rest")
    shard.handle(push(0, 5), "push")
    shard.handle(Leave(1, 2, 4), "leave")
    before = content(shard)
    log.close()
    log, again, _ = kept(tmp_path / "log")
    assert content(again) == before
    train(again, mode, range(5, 8))
    log.close()
    assert before != content(again)


def test_no_reply_goes_before_its_record_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `log+fsync` a log has synced each record when its settling is over, once for all before it; with
    `log` the page cache has it."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", lambda file: synced.append(os.fstat(file).st_size))
    for fsync in (True, False):
        log = ServerLog(tmp_path / f"{fsync}.log", HEADER, fsync=fsync)
        shard, coordinator = Shard(workers=2), Coordinator(2)
        Journal(log, shard, coordinator).start()
        begin(shard, coordinator, "async")
        synced.clear()  # those of the file's head
        for number in (1, 2):
            shard.handle(push(0, number), number)
            assert log.is_settled(log.end) is not fsync
            log.settle(log.end)
            assert log.is_settled(log.end)
            if fsync:
                assert synced[number - 1 :] == [log.end]
            log.settle(log.end)
        log.close()
    assert not synced


@pytest.mark.parametrize("step", ["settle(log.end)", "turn(1, 1, [])"])
def test_a_failed_sync_ends_the_process(tmp_path: Path, step: str) -> None:
    """A later sync could succeed without the lost pages. Here the descriptor of the log becomes one that the
    system cannot sync."""
    script = (
        "import os, pathlib, sys",
        "from psfleet_server.durability.log import LogHeader, ServerLog",
        "log = ServerLog(pathlib.Path(sys.argv[1]), LogHeader(job='j'), fsync=True)",
        "log.forget()",
        "log.append(10, [])",
        "os.dup2(os.open(os.devnull, os.O_RDWR), log._file)",
        f"log.{step}",
        "print('lives on')",
    )
    process = ended([sys.executable, "-c", "\n".join(script), tmp_path / "log"])
    assert process.returncode == 1
    assert process.stdout == ""
    assert "cannot be synced to disk: Invalid argument" in process.stderr


def test_records_written_without_fsync_are_synced_before_others_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is started again with `log+fsync` builds on all files that the one before it has left."""
    log = ServerLog(tmp_path / "log", HEADER)
    log.forget()
    log.append(10, [b"first"])
    log.turn(1, 1, [])
    log.append(10, [b"second"])
    log.close()
    again = ServerLog(tmp_path / "log", HEADER, fsync=True)
    synced, sync = list[str](), os.fsync

    def note(file: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        sync(file)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "fdatasync", note)
    assert len(list(again.recover())) == 3
    assert sorted(synced) == ["log", "log.000001"]
    again.close()


def test_a_cut_that_is_given_up_is_gone_after_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new file's name leaves the disk before the record of the cut does. A replay would refuse the name
    behind a file without that record."""
    log = ServerLog(tmp_path / "log", HEADER, fsync=True)
    opened, steps, contents = os.open, list[object](), list[bytes]()
    log.forget()
    log.append(10, [b"whole"])
    new_file = tmp_path / "log.000001"

    def open_(path: Any, *arguments: Any, **named: Any) -> int:
        if path == new_file:
            contents.append(new_file.read_bytes())
            raise OSError(24, "Too many open files")
        return opened(path, *arguments, **named)

    def noted(name: str) -> None:
        function = getattr(os, name)

        def note(file: int, *arguments: Any) -> None:
            function(file, *arguments)
            what = "folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "file"
            steps.append((name, what, new_file.exists()))

        monkeypatch.setattr(os, name, note)

    for name in ("fsync", "fdatasync", "ftruncate"):
        noted(name)
    monkeypatch.setattr(os, "open", open_)
    with pytest.raises(LogError, match="cannot be opened"):
        log.turn(1, 1, [])
    assert steps[-3:] == [
        ("fsync", "folder", False),
        ("ftruncate", "file", False),
        ("fdatasync", "file", False),
    ]
    log.append(10, [b"later"])
    log.close()
    assert [bytes(body) for _, body, _, _ in chained(log.first)] == [b"", b"whole", b"later"]
    monkeypatch.undo()
    new_file.write_bytes(contents[0])
    with pytest.raises(LogError, match="does not go on where the file before it ends"):
        list(chained(log.first))


@pytest.mark.parametrize(
    ("fault", "step", "line"),
    [
        # A write to this device fails for want of space, and it cannot be shortened.
        (
            "os.dup2(os.open('/dev/full', os.O_RDWR), log._file)",
            "append(10, [b'12345678'])",
            "cannot be shortened to",
        ),
        # The folder of the new file fails after the file has its name.
        (
            "files.replace = broken(files.replace); pathlib.Path.unlink = broken(lambda *_, **__: 0)",
            "turn(1, 1, [])",
            "cannot be removed",
        ),
    ],
)
def test_a_log_that_cannot_be_mended_ends_the_process(
    tmp_path: Path, fault: str, step: str, line: str
) -> None:
    """A record behind a torn one would be lost without a word, as would those behind a file's true end. The
    next process reads every whole record."""
    script = (
        "import os, pathlib, sys",
        "from psfleet.core.base import files",
        "from psfleet_server.durability.log import LogHeader, ServerLog",
        "def broken(function):",
        "    def fail(*arguments, **named):",
        "        function(*arguments, **named)",
        "        raise OSError(5, 'Input/output error')",
        "    return fail",
        "log = ServerLog(pathlib.Path(sys.argv[1]), LogHeader(job='j'))",
        "log.forget()",
        "log.append(10, [b'whole'])",
        fault,
        "try:",
        f"    log.{step}",
        "finally:",
        "    print('lives on')",
    )
    process = ended([sys.executable, "-c", "\n".join(script), tmp_path / "log"])
    assert process.returncode == 1
    assert process.stdout == ""
    assert line in process.stderr
    again = ServerLog(tmp_path / "log", LogHeader(job="j"))
    assert (10, b"whole") in [(kind, bytes(body)) for kind, body in again.recover()]
    again.append(10, [b"later"])
    again.close()
    assert bytes([*chained(tmp_path / "log")][-1][1]) == b"later"


def test_repeats_get_the_reply_of_before(tmp_path: Path) -> None:
    """After a restart a repeated push, write or registration has no effect."""
    log, shard, coordinator = kept(tmp_path / "log")
    begin(shard, coordinator, "async")
    train(shard, "async", range(1, 3))
    write = WriteState((PartState(DENSE.key, 1, np.ones((3, 3), np.float32)),), 0, 1, 1)
    shard.handle(write, "write")
    train(shard, "async", range(3, 4))
    log.close()
    log, again, coordinator = kept(tmp_path / "log")
    before = content(again)
    train(again, "async", range(1, 4))
    again.handle(write, "write")
    assert content(again) == before
    assert [register(coordinator, worker, 70 + worker, 2) for worker in range(2)] == [1, 2]
    assert register(coordinator, 0, 99, 2) == 3
    log.close()


def test_a_collective_that_was_over_is_over(tmp_path: Path) -> None:
    """Who has not heard the result of a reduction before the server died gets it afterwards."""
    log, shard, coordinator = kept(tmp_path / "log")
    begin(shard, coordinator, "async")
    arrivals = [Arrival(worker, 1 + worker, 1, "sum", np.arange(4.0)) for worker in range(2)]
    for arrival in arrivals:
        last = coordinator.arrive(arrival, arrival.worker)
    log.close()
    log, _, coordinator = kept(tmp_path / "log")
    again = coordinator.arrive(arrivals[0], "call")
    np.testing.assert_array_equal(again[0].value, last[0].value)  # type: ignore[union-attr]  # a Release
    log.close()


def small(path: Path) -> tuple[bytes, list[tuple[int, list[bytes]]]]:
    """A small log, and after each of its records where that ends and what the server was then."""
    log, shard, coordinator = kept(path)
    states = [(log.end, content(shard))]

    def watch(function: Callable[[], object]) -> None:
        function()
        states.append((log.end, content(shard)))

    begin(shard, coordinator, "async")
    states.append((log.end, content(shard)))
    for number in range(1, 3):
        watch(lambda number=number: shard.handle(push(0, number), "push"))  # type: ignore[misc]
    log.close()
    return path.read_bytes(), states


def test_every_truncation_is_recovered_from(tmp_path: Path) -> None:
    """A log that was cut anywhere after its header gives what its whole records say."""
    path = tmp_path / "log"
    whole, states = small(path)
    ends = [end for _, _, end, _ in records(path)]
    for length in range(len(whole)):
        if not ALL and length % 5 and not any(abs(length - end) <= HEAD + 1 for end in ends):
            continue
        path.write_bytes(whole[:length])
        if length < ends[0]:
            with pytest.raises(LogError, match=r"no log|damaged"):
                kept(path)
            continue
        last = max(end for end in ends if end <= length)
        assert [end for _, _, end, _ in records(path)][-1] == last
        if length - 1 in ends or length == last:
            log, shard, _ = kept(path)
            log.close()
            assert os.path.getsize(path) == max(last, ends[1])
            expected = [state for end, state in states if end == last]
            assert not expected or content(shard) == expected[0]


def test_every_flipped_bit_is_refused(tmp_path: Path) -> None:
    """No bit of a log can change without notice."""
    path = tmp_path / "log"
    whole, _ = small(path)
    for bit in range(8 * len(whole)):
        if not ALL and bit % 24 != bit // 24 % 24:
            continue
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(LogError, match=r"no log|damaged"):
            list(records(path))


def test_a_push_that_cannot_be_applied_is_refused(tmp_path: Path) -> None:
    """Earlier versions could log a push that a full table then refused half-way, and a restart went on with
    the other half."""
    full = TableSpec("full", "sparse", (2,), SGD(), entry=CapacityEntry(rows=2, full="refuse"))
    log, shard, coordinator = kept(tmp_path / "log")
    begin(shard, coordinator, "async")
    shard.create(full, np.empty(0, np.float32))
    gradient = Gradient(full.key, np.ones((3, 2), np.float32), np.arange(3), 0.1)
    log.append(*encode(Push(0, 1, 1, (gradient,))))
    log.close()
    with pytest.raises(
        LogError, match=r"record \d+ of log .* cannot be taken: table 'full' is full"
    ):
        kept(tmp_path / "log")


def test_records_cannot_move(tmp_path: Path) -> None:
    """A record that is missing, doubled or in another place is noticed."""
    path = tmp_path / "log"
    whole, _ = small(path)
    ends = [end for _, _, end, _ in records(path)]
    first, second = (slice(*pair) for pair in zip(ends[-3:-1], ends[-2:], strict=True))
    for middle in (whole[second], whole[first] * 2 + whole[second], whole[second] + whole[first]):
        path.write_bytes(whole[: ends[-3]] + middle)
        with pytest.raises(LogError, match="damaged at byte"):
            list(records(path))


def test_zeros_at_the_end_are_a_torn_tail(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A machine without power may leave a file longer than what was written. The server says that it has cut
    off the rest, once."""
    path = tmp_path / "log"
    whole, states = small(path)
    path.write_bytes(whole + bytes(5000))
    for _ in range(2):
        log, shard, _ = kept(path)
        log.close()
        assert content(shard) == states[-1][1]
    assert caplog.messages == [
        f"log {str(path)!r} ended in an incomplete record, which was never acknowledged: its 5,000 bytes "
        "are cut off"
    ]


def whole_records(path: Path, content: bytes) -> int | None:
    """The number of records that a log file with this content has, or None if the file is refused."""
    path.write_bytes(content)
    try:
        return len(list(records(path))) - 1
    except LogError:
        return None


def test_only_the_last_record_may_lack_pages(tmp_path: Path) -> None:
    """A loss of power leaves any pages of the last record unwritten, and it is cut off. A record with another
    one behind it is not, and neither is one with a changed bit."""
    log = ServerLog(tmp_path / "log", HEADER)
    log.forget()
    dice = np.random.default_rng(0)
    # The head of the last record is on two pages, and its body ends within the fifth page after them.
    for size in (10_000, 4 * PAGE - 10_000 - 10 - log.end - 2 * HEAD, 4 * PAGE + 1000):
        log.append(1, [dice.bytes(size)])
    log.close()
    whole = log.path.read_bytes()
    ends = [end for _, _, end, _ in records(log.path)]
    assert ends[2] == 4 * PAGE - 10
    pages = range(PAGE, len(whole), PAGE)
    assert len(pages) == 8
    for start in pages:
        before = sum(end <= start for end in ends[1:])
        size = min(PAGE, len(whole) - start)
        head, tail = whole[:start], whole[start + size :]
        changed = bytearray(whole)
        changed[start + 100] ^= 1
        assert whole_records(log.path, head) == before
        assert whole_records(log.path, head + bytes(len(whole) - start)) == before
        assert whole_records(log.path, head + bytes(len(whole) - start) + bytes(PAGE)) == before
        assert whole_records(log.path, bytes(changed)) is None
        assert whole_records(log.path, bytes(changed) + bytes(PAGE)) is None
        is_in_body = start >= ends[2] + HEAD
        assert whole_records(log.path, head + bytes(size) + tail) == (2 if is_in_body else None)
        assert whole_records(log.path, head + bytes(size) + tail + b"\1" + bytes(HEAD)) is None


def test_an_emptied_log_has_no_earlier_files(tmp_path: Path) -> None:
    """A new standby follows in the folder of one that has died after a cut."""
    log = ServerLog(tmp_path / "log", HEADER)
    log.forget()
    log.append(1, [b"before"])
    log.turn(1, 2, [b"cut"])
    log.append(1, [b"behind"])
    log.close()
    log = ServerLog(tmp_path / "log", HEADER)
    log.forget()
    log.append(1, [b"new"])
    log.close()
    assert set(log.files) == {0}
    log = ServerLog(tmp_path / "log", HEADER)
    assert [bytes(body) for _, body in log.recover()] == [b"new"]
    log.close()


def test_a_log_of_another_server_is_refused(tmp_path: Path) -> None:
    """A log names its job, its server and the layout of the fleet."""
    small(tmp_path / "log")
    with pytest.raises(LogError, match="this process is server 0 of 0 of job 'other'"):
        ServerLog(tmp_path / "log", LogHeader(job="other"))


def test_a_full_disk_refuses_the_push_and_keeps_the_log(tmp_path: Path) -> None:
    """A record that cannot be written has no effect; once there is room the push is taken."""
    import resource
    import signal

    path = tmp_path / "log"
    log, shard, coordinator = kept(path)
    begin(shard, coordinator, "async")
    before = content(shard)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (log.end + 40, limits[1]))
    try:
        [refused] = shard.handle(push(0, 1), "push")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert "cannot be written" in str(refused.error)  # type: ignore[union-attr]  # a Refuse
    assert content(shard) == before
    train(shard, "async", range(1, 2))
    after = content(shard)
    log.close()
    log, again, _ = kept(path)
    log.close()
    assert content(again) == after
