"""Plain calls have the responses and the effects that the ordinary way gives them."""

import contextlib
import itertools
import os
import random
import weakref
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import psfleet
from psfleet.core.base.observability.exposition import LatencyHistogram
from psfleet.core.base.settings.declared_settings import ServerLimits
from psfleet.core.base.settings.environment import Environment
from psfleet.core.engine.consistency import AsyncMode, ConsistencyMode, GeoMode, SspMode, SyncMode
from psfleet.core.engine.kernels.initial_values import address_of
from psfleet.core.engine.rules import RULES, SGD, Adagrad, Adam, Ftrl, Lamb
from psfleet.core.engine.schema.entry import CapacityEntry, CountFilterEntry, TTLEntry
from psfleet.core.engine.schema.table import DecaySpec, TableSpec
from psfleet.core.engine.shard.events import BeginCut, EndCut, Join, Pull, Shrink
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.shard.snapshot_cuts import PendingCut
from psfleet.core.engine.tables.budget import MemoryBudget
from psfleet.core.engine.tables.sparse import SparseTable
from psfleet.core.net import frame, segments
from psfleet.core.net.shared_memory import FIRST, SharedMemory
from psfleet.core.net.v1.frame_pb2 import PRECISION_FLOAT32, Header, Segment
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.process import Server
from psfleet_server.rpc.call_layout import CallPlan, CallPlanner
from psfleet_server.rpc.replies import Deadlines, DeferredReply
from psfleet_server.services.shard_service import PlainCalls, ShardService
from psfleet_worker.tensors import push_queue

# Widths and rules whose kernels tests of tables compile.
SPECS = (
    TableSpec("adam", "sparse", (5,), Adam(), seed=5),
    TableSpec("bias", "dense", (5,), Adam()),
    TableSpec("sgd", "sparse", (5,), SGD(), DecaySpec(l1=1e-3, l2=1e-2)),
    TableSpec("ftrl", "sparse", (5,), Ftrl()),
    TableSpec("lamb", "sparse", (5,), Lamb()),
    TableSpec("halves", "sparse", (16,), SGD(), precision="bfloat16"),
    TableSpec("old", "sparse", (5,), Adam(), entry=TTLEntry(steps=6)),
    TableSpec("few", "sparse", (5,), SGD(), entry=CapacityEntry(rows=24)),
    TableSpec("full", "sparse", (5,), Adagrad()),
    TableSpec("seldom", "sparse", (5,), SGD(), entry=CountFilterEntry(2)),
    TableSpec("every", "sparse", (5,), Adam(), every_row=True),
)
WORKERS, LANE = 3, 1 << 19
COUNTS = (5, 5, 5, 5, 1, 8, 0, 70, 5, 5)


class Side:
    """A server with three workers that share memory with it. `chance`: that a call may be taken plainly."""

    def __init__(self, mode: ConsistencyMode, chance: float) -> None:
        self.shard = Shard(0, 1, WORKERS)
        self.host = ShardHost(self.shard, None, Deadlines(), ServerLimits(waiting_calls=64))
        self.service = ShardService(self.host)
        pulls, exchanges = LatencyHistogram(), LatencyHistogram()
        self.times = {"push": self.host.latencies.push, "pull": pulls, "exchange": exchanges}
        self.plain = PlainCalls(self.host, pulls, exchanges)
        self.chance, self.dice = chance, random.Random(3)
        self.replies: list[Any] = []
        self.memories = []
        for spec in SPECS:
            self.shard.create(spec, np.zeros(5 if spec.kind == "dense" else 0, np.float32), 0)
        self.shard.tables[SPECS[8].key] = SparseTable(SPECS[8], max_rows=20)
        for worker in range(WORKERS):
            self.host.ask(Join(worker, 1, mode))
            made = SharedMemory.make(LANE)
            assert made is not None
            memory, handle = made
            assert self.host.lanes.attach(worker, 1, 2**63 + worker, handle)
            os.close(handle.descriptor)
            self.memories.append(memory)

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *error: object) -> None:
        for worker in range(WORKERS):
            self.host.lanes.drop(worker)

    def call(self, method: str, request: bytes) -> None:
        """Keep the answer, or the error."""
        place = len(self.replies)
        self.replies.append("waits")

        def end(message: bytes | None) -> None:
            self.replies[place] = message if message is not None else context.details

        context: Any = SimpleNamespace(
            time_remaining=lambda: 60.0,
            add_callback=lambda callback: True,
            set_code=lambda code: None,
            set_details=lambda details: setattr(context, "details", details),
            set_trailing_metadata=lambda metadata: None,
        )
        if self.dice.random() < self.chance:
            message: bytes | None = getattr(self.plain, method)(request)
            if message is not None:
                end(message)
                return
        reply = DeferredReply(context, end, self.times[method])
        try:
            if method == "push":
                reply.complete(self.service.push(request))
            else:
                getattr(self.service, method)(request, reply)
        except Exception as error:
            end(f"{type(error).__name__}: {error}".encode())

    def signature(self) -> list[Any]:
        """All that calls change, and what lies in shared memory."""
        shard, tables = self.shard, []
        for table in shard.tables.values():
            if isinstance(table, SparseTable):
                rows = table.page(0, 1000)
                columns: list[Any] = [rows.ids, rows.values, rows.touched, rows.scores]
                tables.append(
                    [*(one.tobytes() for one in columns), asdict(table.traffic), table.clock]
                )
            else:
                tables.append([[one.tobytes() for one in table.state()], table.step])
        return [
            tables,
            asdict(shard.workers),
            (shard.consistency.gate.at, shard.consistency.gate.leading_steps),
            asdict(shard.staleness),
            asdict(shard.counters),
            asdict(self.host.bytes) | {"plain": 0},
            [sum(times.counts) for times in self.times.values()],
            shard.recent.lines(),
            [memory.bytes[64:].tobytes() for memory in self.memories],
        ]


class Program:
    """A random program of calls, the same for each side."""

    def __init__(self, mode: ConsistencyMode, seed: int, *sides: Side) -> None:
        self.dice, self.mode, self.sides = random.Random(seed), mode, sides
        self.values = np.random.default_rng(seed)
        self.turns = [itertools.count(1) for _ in range(WORKERS)]
        self.incarnations = [1] * WORKERS
        self.earlier: list[tuple[str, bytes]] = []
        # Few layouts, so that most are known: each push names some tables, and so many ids of each.
        kinds = ("push", "pull", "exchange", "exchange")
        self.shapes = [
            (
                kinds[k % 4],
                self.dice.sample(SPECS[: 11 if k > 7 else 9], 1 + k % 3),
                COUNTS[k],
                k % 2,
            )
            for k in range(10)
        ]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if self.dice.random() < 0.04:
                self.event()
            elif self.earlier and self.dice.random() < 0.06:
                self.call(*self.dice.choice(self.earlier))
            else:
                self.next_call()
            for side in self.sides if self.dice.random() < 0.3 else ():
                for _, expire in [*side.host._deadlines.live.values()]:
                    expire()
            self.compare()

    def compare(self) -> None:
        one, other = self.sides
        assert one.replies == other.replies
        for mine, its in zip(one.signature(), other.signature(), strict=True):
            assert mine == its

    def event(self) -> None:
        """Something else happens, in all sides."""
        worker, kind = self.dice.randrange(WORKERS), self.dice.randrange(8)
        for side in self.sides:
            host, shard = side.host, side.shard
            if kind == 0:
                host.ask(Shrink(SPECS[0].key, unseen=1))
            elif kind == 1:
                host.ask(Join(worker, self.incarnations[worker] + 1, self.mode))
            elif kind == 2:
                shard.tables.changes.since(0, shard.tables)
            elif kind == 3:
                host.ask(BeginCut(PendingCut(9, members=None if self.mode.has_rounds else {99: 1})))
            elif kind == 4:
                shard.tables[SPECS[2].key] = SparseTable(SPECS[2])
            else:
                host.ask(EndCut(9, 0))
                shard.tables.changes.is_kept = False
        if kind == 1:
            self.incarnations[worker] += 1

    def ids(self, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return self.values.choice(30 if count < 30 else 90, count, replace=False).astype(np.int64)

    def next_call(self) -> None:
        dice, worker = self.dice, self.dice.randrange(WORKERS)
        method, specs, count, in_lane = dice.choice(self.shapes)
        last = self.sides[1].shard.workers.sequences[worker]
        sequence = last + (method != "pull")
        header = Header(worker=worker, incarnation=self.incarnations[worker], clock=sequence)
        if method != "pull":
            header.sequence = sequence
        payload, at, replies = [], 64, 1 << 16
        layout = b""
        for kind in ("push", "pull"):
            for spec in specs if method in (kind, "exchange") else ():
                segment = Segment(table=spec.key, count=count if spec.kind == "sparse" else 0)
                ids = self.ids(count)
                if dice.random() < 0.02 and count > 1 and kind == "push":
                    ids[0] = ids[-1]
                arrays: list[np.ndarray[Any, Any]] = [ids] if spec.kind == "sparse" else []
                if kind == "push":
                    shape = (count, *spec.shape) if arrays else spec.shape
                    segment.count = shape[0]
                    values = self.values.standard_normal(shape).astype(np.float32)
                    arrays.append(values)
                    segment.learning_rate = 0.1
                    segment.content = segments.ID_ROWS if len(arrays) > 1 else segments.VALUES
                else:
                    segment.content = segments.IDS if arrays else segments.WHOLE
                    if in_lane:
                        segment.reply, replies = replies, replies + 64 * 80
                segment.offset = at if in_lane else 0
                content = b"".join(array.tobytes() for array in arrays)
                payload.append(content + bytes(-len(content) % 8))
                at += len(payload[-1])
                layout += segments.written(segment)
        self.vary(header, method)
        content = b"".join(payload)
        if in_lane:
            header.lane.generation, header.lane.turn = 2**63 + worker, next(self.turns[worker])
            for side in self.sides:
                side.memories[worker].bytes[64 : 64 + len(content)] = np.frombuffer(
                    content, np.uint8
                )
            request = frame.encode_header(header, layout)
        else:
            request = frame.encode(header, [content] if content else [], layout)
        if dice.random() < 0.05:
            request = self.damaged(request)
        self.earlier = [*self.earlier[-6:], (method, request)]
        self.call(method, request)

    def vary(self, header: Header, method: str) -> None:
        """Say in the header what most calls say, and sometimes what few do."""
        dice = self.dice
        if method != "pull":
            header.samples = dice.choice([0, 8, 2**40])
            if dice.random() < 0.5:
                header.loss = dice.choice([0.0, 0.25, -1e300])
            if dice.random() < 0.3:
                header.leases, header.lease_samples = dice.randrange(3), dice.randrange(300)
            header.progress = dice.choice(["", "", '{"epoch": 1}', "große Schritte"])
            header.addressed.extend(dice.choice([[], [], [0, 300, 2**40], [2**64 - 1]]))
            if dice.random() < 0.3:
                header.cut, header.cut_after = dice.choice(
                    [(8, 3), (9, header.sequence), (9, 2**40)]
                )
        if dice.random() < 0.15:
            name, value = dice.choice(
                [
                    ("incarnation", 0), ("incarnation", 9), ("sequence", header.sequence + 3),
                    ("sequence", 0), ("skipped", 1), ("cut", 2**64 - 1), ("withdrawn", True),
                    ("commit", 1), ("seatless", True), ("traceparent", "00-1"), ("worker", 7),
                    ("clock", 50), ("outcome", 1), ("incarnation", 2**64 - 1),
                ]
            )  # fmt: skip
            setattr(header, name, value)

    def damaged(self, request: bytes) -> bytes:
        """Bytes that differ from these at one place, or end before."""
        place = self.dice.randrange(min(len(request), 200))
        if self.dice.randrange(2):
            return request[:place]
        return request[:place] + bytes([self.dice.randrange(256)]) + request[place + 1 :]

    def call(self, method: str, request: bytes) -> None:
        for side in self.sides:
            side.call(method, request)


@pytest.mark.parametrize(
    "mode", [AsyncMode(), SspMode(12), SyncMode(), GeoMode()], ids=lambda mode: mode.name
)
@pytest.mark.parametrize("seed", [4, 7])
def test_plain_calls_do_what_others_do(mode: ConsistencyMode, seed: int) -> None:
    """After each call of a random program responses, tables and state of a server that takes calls plainly
    are those of one that does not, byte for byte. Calls come again and late, are damaged, name ids twice,
    fill tables; incarnations change, rows are evicted, tables are replaced, somebody follows."""
    with Side(mode, 0.8) as one, Side(mode, 0.0) as other:
        Program(mode, seed, one, other).run(150)
        assert not other.host.bytes.plain
        assert (one.host.bytes.plain > 5) == isinstance(mode, AsyncMode | SspMode)


def exchange(side: Side, cut: int = 0, addressed: tuple[int, ...] = ()) -> bool:
    """Make an exchange with the next push of worker 0, which has marked this snapshot and says which pushes
    it has sent to whom; whether it was taken plainly."""
    before, key = side.host.bytes.plain, SPECS[0].key
    sequence = side.shard.workers.sequences[0] + 1
    ids, values = np.arange(2), np.ones((2, 5), np.float32)
    push = Segment(table=key, content=segments.ID_ROWS, count=2, learning_rate=0.1)
    pull = Segment(table=key, content=segments.IDS, count=2)
    header = Header(worker=0, incarnation=1, sequence=sequence, clock=sequence, cut=cut)
    header.addressed.extend(addressed)
    layout = segments.written(push) + segments.written(pull)
    side.call("exchange", segments.joined(header, [(ids, values), (ids,)], layout))
    assert side.shard.workers.sequences[0] == sequence
    return side.host.bytes.plain > before


def test_no_call_is_plain_that_others_wait_for() -> None:
    """With a log or a standby, a follower, a cut or a pull that waits a call goes the ordinary way; not so
    after the cut, which each later push names."""
    with Side(SspMode(12), 1.0) as side:
        shard = side.shard
        assert exchange(side)  # the first of its layout too
        assert exchange(side, addressed=(2, 300, 2**40))
        assert shard.workers.addressed == {0: (2, 300, 2**40)}
        records: list[Any] = []
        shard.journal = records.append
        assert not exchange(side)
        assert len(records) == 1
        shard.journal = None
        assert exchange(side)
        shard.tables.changes.since(0, shard.tables)
        assert not exchange(side)
        shard.tables.changes.is_kept = False
        side.host.ask(BeginCut(PendingCut(1, members={99: 1})))
        assert not exchange(side)
        assert not exchange(side, cut=1)
        side.host.ask(EndCut(1))
        assert exchange(side, cut=1)
        shard.handle(Pull(1, 1, (), clock=20), "waits")  # for worker 2
        assert not exchange(side)


@pytest.mark.parametrize("name", RULES)
def test_places_stand_for_arrays(name: str) -> None:
    """Under each rule a table that is pushed and pulled by places has the bits of one that gets arrays."""
    spec = TableSpec("t", "sparse", (5,), RULES[name](), seed=2)
    one, other = SparseTable(spec), SparseTable(spec)
    rows, dice = one.placed(), np.random.default_rng(1)
    assert rows is not None
    for count in (6, 90, 0, 600, 6):
        ids = dice.choice(max(99, count + 50), count, replace=False).astype(np.int64)
        values = dice.standard_normal((count, spec.push_width)).astype(np.float32)
        assert rows.can_push(address_of(ids), count)
        rows.push(address_of(ids), count, address_of(values), 0.1)
        other.push(ids, values, 0.1)
        outs = np.empty((2, count, 5), np.float32)
        rows.pull(address_of(ids), count, address_of(outs[0]))
        other.pull_into(ids, outs[1])
        np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(one.page(0, 999).values, other.page(0, 999).values)
    assert (one.traffic, one.clock) == (other.traffic, other.clock)


def test_tables_elsewhere_need_arrays(tmp_path: Path) -> None:
    """Rows on disk or on a device, and tables with rules of their own for ids, are not reached by places."""
    tables = [SparseTable(spec) for spec in SPECS if spec.kind == "sparse"]
    plain = {table.spec.name for table in tables if table.placed() is not None}
    assert plain == {spec.name for spec in SPECS} - {"bias", "seldom", "every"}
    own = MemoryBudget(folder=str(tmp_path))
    assert SparseTable(SPECS[0], max_rows=1000, device="disk", device_budget=own).placed() is None


def test_calls_that_need_arrays_are_not_planned_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with a table that needs arrays has the same segments each time, and a plan is tried once."""
    shard, attempts, make = Shard(0, 1, 1), list[int](), CallPlan.__init__

    def noted(*arguments: Any) -> None:
        attempts.append(1)
        make(*arguments)

    monkeypatch.setattr(CallPlan, "__init__", noted)
    spec = SPECS[-1]
    assert spec.every_row
    shard.create(spec, np.zeros(0, np.float32), 0)
    pull = segments.written(
        Segment(table=spec.key, content=segments.IDS, count=5, precision=PRECISION_FLOAT32)
    )
    planner = CallPlanner()
    for _ in range(3):
        planner.renew(shard.tables)
        assert planner.plan_message(pull, 40) is None
    assert len(attempts) == 1
    shard.create(SPECS[2], np.zeros(0, np.float32), 0)  # tables have changed
    assert planner.renew(shard.tables)
    assert planner.plan_message(pull, 40) is None
    assert len(attempts) == 2


def test_a_plan_keeps_the_memory_of_its_worker() -> None:
    """A worker that dies during a plain push leaves its memory until the push has ended."""
    shard = Shard(0, 1, 1)
    shard.create(SPECS[0], np.zeros(0, np.float32), 0)
    made = SharedMemory.make(LANE)
    assert made is not None
    memory, handle = made
    os.close(handle.descriptor)
    mapping = weakref.ref(memory.bytes)
    push = segments.field_of(SPECS[0].key, segments.ID_ROWS, 1, 0.1, FIRST)
    plan = CallPlan(shard.tables, {}, push, memory, 0)
    del made, memory
    assert mapping() is not None
    del plan
    assert mapping() is None


def fields(seed: int) -> tuple[str, list[Segment]]:
    """Segments of a push, a pull or an exchange, at random places and mostly wrong in one field."""
    dice = random.Random(seed)
    method, at, made = dice.choice(["push", "pull", "exchange"]), FIRST, []
    for kind in ("push", "pull"):
        for spec in dice.sample(SPECS[:9], 2) if method in (kind, "exchange") else ():
            sparse, count = spec.kind == "sparse", dice.choice([0, 1, 4])
            segment = Segment(table=spec.key, count=count if sparse else 5, offset=at)
            if kind == "push":
                segment.content = segments.ID_ROWS if sparse else segments.VALUES
                segment.learning_rate = 0.1
            else:
                segment.content = segments.IDS if sparse else segments.WHOLE
                segment.reply = at + 1024
            at += 2048
            made.append(segment)
    if dice.random() < 0.8:
        name, value = dice.choice(
            [
                *(("count", count) for count in (2, 3, 6, 513, 2**40, 2**63)),
                *(("offset", place) for place in (0, 8, 4, LANE - 8, LANE, 2**40, 2**63)),
                *(("reply", place) for place in (0, 2, 60, LANE - 4, LANE, 2**40, 2**63)),
                *(("learning_rate", rate) for rate in (0.0, float("nan"), float("inf"), 1e300)),
                *(("content", content) for content in range(9)),
                *(("precision", precision) for precision in range(5)),
                ("table", SPECS[0].key),
                ("table", SPECS[9].key),
                ("table", 7),
            ]
        )
        setattr(dice.choice(made), name, value)
    if dice.random() < 0.1:
        made = made[::-1]
    return method, made


@pytest.mark.parametrize("in_lane", [True, False])
def test_segments_are_checked_as_on_the_ordinary_way(in_lane: bool) -> None:
    """Calls of layouts that nobody has sent before, most with a wrong field, have the replies, errors and
    effects on a server that takes calls plainly that they have on another."""
    with Side(AsyncMode(), 1.0) as one, Side(AsyncMode(), 0.0) as other:
        program, taken = Program(AsyncMode(), 0, one, other), 0
        for side in one, other:
            words = side.memories[0].bytes.view(np.int64)
            words[:] = np.arange(len(words))
        for turn in range(1, 401):
            method, made = fields(turn)
            sequence = one.shard.workers.sequences[0] + (method != "pull")
            header = Header(worker=0, incarnation=1, clock=sequence)
            header.sequence = sequence * (method != "pull")
            layout, before = b"".join(map(segments.written, made)), one.host.bytes.plain
            if in_lane:
                header.lane.generation, header.lane.turn = 2**63, turn
                request = frame.encode_header(header, layout)
            else:
                size = sum(
                    8 * segment.count * (segment.content in (segments.IDS, segments.ID_ROWS))
                    + 20 * segment.count * (segment.content in (segments.VALUES, segments.ID_ROWS))
                    for segment in made
                )
                size = min(size + turn % 9 % 2 * 8, 1 << 16)
                ids = np.arange(size // 8).tobytes()
                request = frame.encode(header, [ids] if ids else [], layout)
            program.call(method, request)
            program.compare()
            taken += one.host.bytes.plain - before
        assert taken > 40


@pytest.mark.parametrize("in_lane", [True, False])
def test_calls_of_many_ids_are_plain(in_lane: bool) -> None:
    """Exchanges of more ids than kernels keep the GIL for, and with longer replies than are copied whole, do
    what they do on the ordinary way. One that names an id twice is refused."""
    with Side(AsyncMode(), 1.0) as one, Side(AsyncMode(), 0.0) as other:
        dice = np.random.default_rng(5)
        specs = [
            SPECS[5],
            SPECS[0],
        ]  # a row of 16 values, and of 5: an odd number of these needs padding
        for turn, count in enumerate((511, 513, 1201, 1201, 1400), 1):
            ids = dice.choice(2000, count, replace=False).astype(np.int64)
            if turn == 4:
                ids[-1] = ids[0]
            header = Header(worker=0, incarnation=1, sequence=turn - (turn > 4), clock=turn)
            layout, content, reply = b"", b"", 1 << 18
            for spec in specs:
                values = dice.standard_normal((count, *spec.shape)).astype(np.float32)
                content += bytes(-len(content) % 8)
                offset = in_lane * (FIRST + len(content))
                fields: dict[str, Any] = {"table": spec.key, "count": count, "offset": offset}
                push = Segment(content=segments.ID_ROWS, learning_rate=0.1, **fields)
                layout += segments.written(push)
                content += ids.tobytes() + values.tobytes()
            for spec in specs[::-1]:
                content += bytes(-len(content) % 8)
                offset = in_lane * (FIRST + len(content))
                fields = {"table": spec.key, "count": count, "offset": offset}
                pull = Segment(content=segments.IDS, reply=in_lane * reply, **fields)
                layout += segments.written(pull)
                content, reply = content + ids.tobytes(), reply + 4 * count * spec.shape[0]
            content += bytes(-len(content) % 8)
            for side in one, other:
                message = content
                if in_lane:
                    header.lane.generation, header.lane.turn = 2**63, turn
                    memory = side.memories[0].bytes[FIRST:]
                    memory[: len(content)], message = np.frombuffer(content, np.uint8), b""
                request = frame.encode(header, [message] if message else [], layout)
                side.call("exchange", request)
            assert one.replies == other.replies
            assert ("twice" in str(one.replies[-1])) == (turn == 4)
            for mine, its in zip(one.signature(), other.signature(), strict=True):
                assert mine == its
        assert one.host.bytes.plain == 4
        assert not other.host.bytes.plain


def test_a_push_that_memory_suffices_for_table_by_table_only_is_refused_whole() -> None:
    """Two tables that may each grow, but not both, keep their rows: the call goes the ordinary way, which
    refuses it before the first table changes."""
    with Side(AsyncMode(), 1.0) as side:
        budget, keys = side.shard.tables.budget, (SPECS[0].key, SPECS[3].key)
        tables = [table for key in keys if isinstance(table := side.shard.tables[key], SparseTable)]
        pushes = [
            Segment(table=key, content=segments.ID_ROWS, count=64, learning_rate=0.1)
            for key in keys
        ]
        layout = b"".join(map(segments.written, pushes))
        grown = []
        for first in range(0, 1 << 16, 64):
            ids, values = np.arange(first, first + 64), np.ones((64, 5), np.float32)
            rows = [len(table) for table in tables]
            bounds = [table.growth_bound([ids], counts_rows=False) for table in tables]
            if first >= 128 and all(bounds):
                budget.limit = budget.charged() + int(sum(bounds)) - 1
            sequence = side.shard.workers.sequences[0] + 1
            header = Header(worker=0, incarnation=1, sequence=sequence, clock=sequence)
            before = side.host.bytes.plain
            side.call("push", segments.joined(header, [(ids, values), (ids, values)], layout))
            grown = [len(table) - count for table, count in zip(tables, rows, strict=True)]
            if budget.limit is not None:
                break
            assert grown == [64, 64]
        assert side.host.bytes.plain == before
        assert grown in ([0, 0], [64, 64])


@pytest.mark.parametrize("lane", ["", "inline"])
def test_most_calls_of_a_job_are_plain(
    lane: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an asynchronous job without a log all calls are taken plainly, those with new numbers of ids too."""
    endpoint = f"unix:{tmp_path}/server"
    variables = {"ROLE": "worker", "RANK": "0", "SERVERS": endpoint, "WORKERS": "1"}
    for name, value in (variables | ({"LANE": lane} if lane else {})).items():
        monkeypatch.setenv(f"PSFLEET_{name}", value)
    with Server(Environment("server", 0, (endpoint,), 1)) as server:
        with psfleet.connect(mode="async") as fleet:
            table = fleet.sparse_table("adam", 5, psfleet.optimizer.Adam())
            bias = fleet.dense_table("bias", np.zeros(5), psfleet.optimizer.Adam())
            for step in range(60):
                ids = np.arange(20 * step + 1)  # up to 1,181: more than HTTP/2 reads at once
                fleet.pull({table: ids, bias: None})
                fleet.push({table: (ids, np.ones((len(ids), 5))), bias: np.ones(5)})
        assert server.host.bytes.plain > 55


def test_steps_of_a_job_with_several_servers_have_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors of a call to a server lie where those of its last one lay, so that its plan is known."""
    monkeypatch.setattr(push_queue, "LINGER", 60.0)  # so that each push leaves with a pull
    endpoints = tuple(f"unix:{tmp_path}/server{index}" for index in range(3))
    variables = {"ROLE": "worker", "RANK": "0", "SERVERS": ",".join(endpoints), "WORKERS": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(f"PSFLEET_{name}", value)
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(Server(Environment("server", index, endpoints, 1)))
            for index in range(3)
        ]
        with psfleet.connect(mode="async") as fleet:
            table = fleet.sparse_table("adam", 5, psfleet.optimizer.Adam())
            for _ in range(30):
                fleet.pull({table: np.arange(30)})
                fleet.push({table: (np.arange(30), np.ones((30, 5)))})
            for server in servers:
                plans = server.host.lanes._shared[0].plans.values()
                assert len([plan for plan in plans if plan and plan.pushes and plan.pulls]) == 1
