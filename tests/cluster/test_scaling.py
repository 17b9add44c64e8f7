"""Another number of servers while workers train: rows move at a collective, and nothing else changes."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import psfleet
from psfleet.core.base.errors import ProtocolError, ServerUnavailable
from psfleet.core.base.job_files import write_running_job
from psfleet.core.base.scaling_files import write_scale_ready
from psfleet.core.base.settings.environment import Environment
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Read, Runtime, TableState
from psfleet.core.engine.schema.entry import CountFilterEntry
from psfleet.core.engine.schema.table import InitializerSpec, TableSpec
from psfleet.core.engine.tables import disk_arena, disk_rows
from psfleet.core.net.message_codec import decode
from psfleet.core.runtime.modes.switch import ModeSwitchRuntime
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_server.coordinator.request_files import ScaleRequest, ScaleRequestFile
from psfleet_server.engine.server_messages import OpenMoveRequest, SendRowsRequest
from psfleet_server.rpc.endpoints import Peer
from tests.pools import started_pool
from tests.trainings import one_more, zero_rows
from tests.waiting import until

WORKERS, STEPS = 2, 9
WIDE = TableSpec("wide", "dense", (90_001,), make_rule("adam", {}))
BIAS = TableSpec("bias", "dense", (7, 3), make_rule("lamb", {}))
ROWS = TableSpec(
    "rows",
    "sparse",
    (5,),
    make_rule("adam", {}),
    initializer=InitializerSpec("uniform", -0.1, 0.1),
    seed=7,
)
RARE = TableSpec(
    "rare", "sparse", (2,), make_rule("adagrad", {}), entry=CountFilterEntry(4), servers=1
)
TABLES = (WIDE, BIAS, ROWS, RARE)


def train(runtime: Runtime, fleet: LocalFleet, moves: Sequence[int]) -> list[TableState]:
    """One worker's steps, whose gradients depend on all that was pulled; after every third one a barrier,
    before which worker 0 asks for another number of servers."""
    for spec in TABLES:
        runtime.create(spec, None if spec.kind == "sparse" else np.ones(spec.shape, np.float32))
    for step in range(STEPS):
        asks = moves and step % 3 == 2 and runtime.worker_index == 0
        if asks:  # the step after it is made while rows are on their way
            fleet.scale(moves[step // 3])
        runtime.push(gradients_of(runtime, TABLES, step))
        if step % 3 == 2:
            runtime.barrier()
            if asks:
                assert not fleet.settle()
                assert runtime.server_num == fleet.servers == moves[step // 3]
    runtime.barrier()
    return [runtime.read_table(spec.key) for spec in TABLES]


def gradients_of(runtime: Runtime, specs: Sequence[TableSpec], step: int) -> list[Gradient]:
    """Gradients of a step, which depend on all that they pull."""
    dice = np.random.default_rng((runtime.worker_index, step))
    ids = np.unique(dice.integers(-300, 300, 200))
    reads = [Read(spec.key, ids if spec.kind == "sparse" else None) for spec in specs]
    pulled = zip(reads, runtime.pull(reads), strict=True)
    return [Gradient(r.table, values * np.float32(0.3) - 1, r.ids, 0.01) for r, values in pulled]


def meet(runtime: Runtime, fleet: LocalFleet, servers: int) -> None:
    """Come to a barrier, at which the fleet gets that many servers unless it is 0."""
    if servers:
        fleet.scale(servers)
    runtime.barrier()
    if servers:
        assert not fleet.settle()
        assert runtime.server_num == fleet.servers == servers


def trained(mode: Mode, moves: Sequence[int], workers: int = WORKERS) -> list[TableState]:
    """What the tables hold after training with these numbers of servers."""
    with LocalFleet(2, workers, in_process=True) as fleet, started_pool(workers) as pool:

        def work(worker: int) -> list[TableState]:
            runtime = fleet.connect(worker, mode)
            try:
                return train(runtime, fleet, moves)
            finally:
                runtime.close()

        return next(iter(pool.map(work, range(workers))))


def assert_same(one: list[TableState], other: list[TableState]) -> None:
    """Both are the same in every bit."""
    for left, right in zip(one, other, strict=True):
        assert left.step == right.step
        assert [a.tobytes() for a in left.values] == [a.tobytes() for a in right.values]
        for name in ("ids", "touched", "scores"):
            mine, theirs = getattr(left, name), getattr(right, name)
            assert (mine is None) == (theirs is None)
            assert mine is None or mine.tobytes() == theirs.tobytes()


def test_sync_mode_keeps_its_bits() -> None:
    """A job whose servers become four, then three, then one ends with the bits of one that stays as it is:
    dense tables that are cut again, rows, ids that wait for theirs, and what rules remember."""
    assert_same(trained("sync", (4, 3, 1)), trained("sync", ()))


def test_rows_are_followed_until_the_workers_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that trains on for a while before it meets the others finds what it has pushed meanwhile: rows
    that changed, rows that came, and rows that went."""
    monkeypatch.setattr("psfleet_server.engine.server_scaling._FOLLOW", 0.0)
    states = []
    for servers in (3, 0):
        with LocalFleet(2, 1, in_process=True) as fleet:
            runtime = fleet.connect(0, "async")
            runtime.create(ROWS)
            dice = np.random.default_rng(3)
            for step in range(300):
                if servers and step == 10:
                    fleet.scale(servers)
                ids = np.unique(dice.integers(0, 40 * (step + 1), 50))
                [values] = runtime.pull([Read(ROWS.key, ids)])
                runtime.push([Gradient(ROWS.key, values - 1, ids, 0.01)])
                if step % 40 == 39:
                    runtime.shrink(ROWS.key, unseen=30)
            runtime.barrier()
            assert not servers or not fleet.settle()
            states.append([runtime.read_table(ROWS.key)])
            runtime.close()
    assert_same(*states)


WIDE_ROWS = TableSpec("wide rows", "sparse", (64,), make_rule("adam", {}), seed=3)


@pytest.mark.long
def test_rows_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows on disk move to tables on disk, which have half of the memory meanwhile; afterwards the bits are
    those of a job in memory that has kept its servers, and a server has no more in memory than it may."""
    limit, states, disk = 6 << 20, [], ""
    for module in (disk_rows, disk_arena):
        monkeypatch.setattr(module, "LEAST", 4096)
    monkeypatch.setattr(
        "psfleet_server.process.table_limit", lambda memory: limit if disk else None
    )
    monkeypatch.setattr("psfleet_server.process.spare", lambda memory: 0)
    for disk in (str(tmp_path), ""):
        monkeypatch.setenv("PSFLEET_DISK", disk)
        with LocalFleet(2, 1, in_process=True) as fleet:
            runtime = fleet.connect(0, "sync")
            runtime.create(WIDE_ROWS)
            dice = np.random.default_rng(5)
            for step in range(12):
                ids = np.unique(dice.integers(0, 12_000, 3000))
                [values] = runtime.pull([Read(WIDE_ROWS.key, ids)])
                runtime.push([Gradient(WIDE_ROWS.key, values - 1, ids, 0.01)])
                if step % 3 == 2:
                    meet(runtime, fleet, (4, 1, 3, 1)[step // 3] if disk else 0)
            states.append([runtime.read_table(WIDE_ROWS.key)])
            if disk:
                tables = fleet.processes[0]._server.host.shard.tables
                rows = tables[WIDE_ROWS.key]._index
                assert tables.budget.limit == limit
                assert rows.resident_bytes <= limit
                assert rows.paging.disk_bytes > 0
            runtime.close()
    assert_same(*states)


@pytest.mark.parametrize("mode", [pytest.param("ssp", marks=pytest.mark.long), "geo"])
def test_one_worker_has_the_same_bits_in_every_mode(mode: Mode) -> None:
    """Where one worker decides the order, no update is lost or counted twice in other modes either."""
    assert_same(trained(mode, (4, 1, 3), 1), trained(mode, (), 1))


COUNTS = zero_rows("counts")


def test_snapshots_before_and_after(tmp_path: Path) -> None:
    """Snapshots are of the servers that there were, and both load; a delta after a move holds everything."""
    before, after = str(tmp_path / "before"), str(tmp_path / "after")
    with LocalFleet(2, 1, in_process=True) as fleet:
        runtime = fleet.connect(0, "async")
        runtime.create(ROWS)
        runtime.push([Gradient(ROWS.key, np.ones((40, 5), np.float32), np.arange(40), 0.1)])
        runtime.save(before, base=True)
        kept = {before: [runtime.read_table(ROWS.key)]}
        meet(runtime, fleet, 3)
        runtime.push([Gradient(ROWS.key, np.ones((40, 5), np.float32), np.arange(20, 60), 0.1)])
        runtime.save(after, delta=True)
        kept[after] = [runtime.read_table(ROWS.key)]
        runtime.close()
    for path, states in kept.items():
        with LocalFleet(4, 1, in_process=True, resume=path) as fleet:
            runtime = fleet.connect(0, "async")
            runtime.create(ROWS)
            assert_same([runtime.read_table(ROWS.key)], states)
            runtime.close()


@pytest.mark.long
def test_a_new_server_that_is_killed_while_rows_move() -> None:
    """A kill -9 of a new server that has a part of the rows, and not all, gives the move up: the job has the
    rows that it had, and the next request is carried out."""
    with LocalFleet(2, 1, crashes={2: ["filled:1"]}) as fleet:
        runtime = fleet.connect(0, "async")
        runtime.create(COUNTS)
        ids = np.arange(90)
        runtime.push([one_more(COUNTS, ids)])
        fleet.scale(3)
        runtime.barrier()
        assert "server 2" in fleet.settle()
        runtime.push([one_more(COUNTS, ids)])
        assert np.all(runtime.read_table(COUNTS.key).values[0] == 2)
        meet(runtime, fleet, 3)
        runtime.push([one_more(COUNTS, ids)])
        assert np.all(runtime.read_table(COUNTS.key).values[0] == 3)
        runtime.close()


def test_a_worker_that_dies_while_it_waits_for_a_move() -> None:
    """A worker that is gone when rows begin to move is replaced; what it has pushed counts once, and its
    successor goes on with the new servers."""
    ids = np.arange(90)
    with LocalFleet(2, 2, in_process=True) as fleet, started_pool(2) as pool:

        def work(worker: int, steps: int) -> ModeSwitchRuntime:
            runtime = fleet.connect(worker, "async")
            runtime.create(COUNTS)
            for _ in range(steps):
                runtime.push([one_more(COUNTS, ids)])
            return runtime

        first, second = pool.map(work, range(2), (3, 3))
        second.flush()
        fleet.scale(4)
        arrives = pool.submit(second.barrier)
        second.abandon()  # before it has come to the barrier or while it waits there
        arrives.exception()
        waits = pool.submit(first.barrier)
        again = work(1, 0)
        again.barrier()
        waits.result()
        assert not fleet.settle()
        assert again.server_num == first.server_num == 4
        assert np.all(first.read_table(COUNTS.key).values[0] == 6)
        first.close()
        again.close()


def test_readers_and_followers(tmp_path: Path) -> None:
    """A reader that knows the old number of servers is refused rather than given rows of other ids, and reads
    when it connects again; a follower finds the new servers by itself, and the number of its cut does not
    fall with their number."""
    ids, ones = np.arange(200), np.ones((200, 1), np.float32)
    with LocalFleet(2, 1, in_process=True) as fleet:
        runtime = fleet.connect(0, "async")
        runtime.create(COUNTS)
        runtime.push([one_more(COUNTS, ids)])
        runtime.flush()
        write_running_job(tmp_path, Environment(servers=fleet.endpoints))
        with psfleet.connect(job=tmp_path) as reader, psfleet.connect(follow=tmp_path) as follower:
            read, followed = reader.sparse_table("counts"), follower.sparse_table("counts")
            assert np.array_equal(read.pull(ids), ones)
            meet(runtime, fleet, 3)
            write_running_job(tmp_path, Environment(servers=fleet.endpoints))
            runtime.push([one_more(COUNTS, ids)])
            runtime.flush()
            with pytest.raises(ServerUnavailable, match="has 3 servers by now"):
                read.pull(ids)
            with psfleet.connect(job=tmp_path) as again:
                assert np.array_equal(again.sparse_table("counts").pull(ids), 2 * ones)
            until(lambda: np.array_equal(followed.pull(ids), 2 * ones), lambda: "rows of the move")
            before = follower.cut
            assert before is not None
            meet(runtime, fleet, 1)
            write_running_job(tmp_path, Environment(servers=fleet.endpoints))
            runtime.push([one_more(COUNTS, ids)])
            runtime.flush()
            until(
                lambda: np.array_equal(followed.pull(ids), 3 * ones), lambda: "rows of one server"
            )
            assert follower.cut is not None
            assert follower.cut.number > before.number
        runtime.close()


def test_a_request_is_not_taken_for_another(tmp_path: Path) -> None:
    """Server 0 that gives a request up late leaves the file of the next one alone."""
    file = ScaleRequestFile(tmp_path)
    write_scale_ready(tmp_path, 5, ["unix:/0"])
    file.take(4)
    assert file.look() == ScaleRequest(5, ("unix:/0",))
    file.take(5)
    assert file.look() is None


@pytest.mark.long
def test_a_server_that_misses_the_end_of_a_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that cannot be told that a move is given up takes pushes once it can be; what comes late of
    that move begins nothing."""
    call, lost = Peer.call, ["Scaling/Send", "Scaling/Abandon", "Scaling/Abandon"]
    late: list[bytes] = []

    def lossy(peer: Peer, method: str, request: bytes, seconds: float) -> bytes:
        is_ahead = method == "Scaling/Send" and decode(SendRowsRequest, request).ahead
        if method in lost and not is_ahead and "server 1" in peer.name:
            lost.remove(method)
            raise ServerUnavailable("it is paused")
        if method == "Scaling/Open" and not decode(OpenMoveRequest, request).ahead:
            late.append(request)
        reply = call(peer, method, request, seconds)
        if method == "Scaling/Abandon" and "server 1" in peer.name:
            with pytest.raises(ProtocolError, match="has ended"):
                call(peer, "Scaling/Open", late[-1], seconds)
            late.append(b"")
        return reply

    monkeypatch.setattr(Peer, "call", lossy)
    ids = np.arange(90)
    with LocalFleet(2, 1, in_process=True) as fleet:
        runtime = fleet.connect(0, "async")
        runtime.create(COUNTS)
        fleet.scale(3)
        runtime.barrier()
        assert "paused" in fleet.settle()
        runtime.push([one_more(COUNTS, ids)])
        assert np.all(runtime.read_table(COUNTS.key).values[0] == 1)
        runtime.close()
    assert not lost
    assert late[-1] == b""
