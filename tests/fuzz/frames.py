"""Every method of a server with changed requests, against the real handlers in this process.

The promise: whatever the bytes, the call gets an answer or an error of one sentence (never the word
of a bug), soon and for little memory; and a call that gets an error has changed no parameter.
"""

import contextlib
import os
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message
from msgspec import Struct, msgpack

from psfleet.core.base.settings.declared_settings import ServerLimits
from psfleet.core.engine.shard.membership_view import (
    Incarnation,
    InstallView,
    PrepareView,
    SeatView,
)
from psfleet.core.engine.shard.rescaled_rows import dealt
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.net import message_codec
from psfleet.core.net.connections.access import Access
from psfleet.core.net.server_state import write_state
from psfleet.core.net.shared_memory import SharedMemory
from psfleet.core.net.v1 import coordinator_pb2, frame_pb2, membership_pb2, shard_pb2, snapshot_pb2
from psfleet.core.net.v1.frame_pb2 import Frame, Header, Segment
from psfleet.core.net.v1.replica_pb2 import FollowRequest
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.durability.log_shipping import joined
from psfleet_server.durability.records import encode, server_state
from psfleet_server.engine.server_messages import (
    AbandonMoveRequest,
    AdoptRowsRequest,
    FillRowsRequest,
    FreezeRequest,
    InstallRequest,
    MovedRecord,
    OpenMoveRequest,
    PrepareMoveRequest,
    SendRowsRequest,
)
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.replies import Deadlines
from psfleet_server.server_metrics import MetricsService, ServerMetrics
from psfleet_server.services.method_handlers import handlers, tensor_methods
from psfleet_server.services.scaling_service import scaling_handler
from psfleet_server.services.snapshot_services import snapshot_handlers
from psfleet_server.services.standby_service import feeds_standby, replica_handler
from psfleet_server.snapshots.snapshot_runner import SnapshotRunner
from tests.fuzz.lasting import Staying, Undying
from tests.fuzz.mutations import mutated_bytes, mutated_message, mutated_tree
from tests.server.seating import register

IDS = np.arange(1, 4, dtype="<i8")
MEMORY = 1 << 16
SLOW = 10.0
"""Seconds of processor time that no call may take."""

Pb: Any = shard_pb2
Cb: Any = coordinator_pb2


class Broken(AssertionError):
    """A promise is broken; the text holds what repeats it."""


class Context:
    """What a handler sees of a call: it can end it with a status, and no more."""

    def __init__(self) -> None:
        self.code: Any = None
        self.details = ""

    def set_code(self, code: Any) -> None:
        """Of the answer."""
        self.code = code

    def set_details(self, details: str) -> None:
        """Of the answer."""
        self.details = details

    def set_trailing_metadata(self, metadata: Any) -> None:
        """Of the answer."""

    def time_remaining(self) -> float:
        """Until its deadline."""
        return 60.0

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Its end is never heard of."""
        return True


@dataclass(frozen=True)
class Details:
    """Which method is called."""

    method: str
    invocation_metadata: tuple[Any, ...] = ()


class Ground:
    """A server without its sockets: two tables and a worker that has joined.

    It is alone: its snapshots have no other server to ask, whatever a request says.

    Args:
        mode: Of the fleet, as the protocol has it.
    """

    def __init__(self, mode: int) -> None:
        self.deadlines = Deadlines()
        self.coordinator = Coordinator(2)
        self.shard = Shard(0, 1, 2)
        limits = ServerLimits(tables=24, waiting_calls=64, lane=1 << 20)
        self.host = ShardHost(self.shard, self.coordinator, self.deadlines, limits)
        self.host.feed = Undying()
        self._released = 0
        self._snapshots = SnapshotRunner(self.host, Access())
        self._snapshots.start()
        metrics = ServerMetrics(self.host, self._snapshots, None)
        self._services = [
            *handlers(self.host),
            *snapshot_handlers(self.host, self._snapshots),
            replica_handler(self.host, moves := Staying(self.host, Access())),
            scaling_handler(self.host, moves),
            MetricsService(self.host, metrics).handler,
        ]
        self._tensors = tensor_methods(self.host)
        served = [getattr(service, "_method_handlers", ()) for service in self._services]
        self.methods = sorted(path for paths in (*served, self._tensors) for path in paths)
        self.mode = mode
        self.incarnation = register(self.coordinator, 0, 5, 2)
        self._ask("Shard/Join", Pb.JoinRequest(incarnation=self.incarnation, mode=mode))
        self._make_tables()
        feeds_standby(self.host)
        self._share()
        self._requests: dict[str, Message | Struct] = dict(self._valid())
        self._requests |= dict(self._valid_of_servers())
        for method in self.unknown():
            self._requests[method.removeprefix("/psfleet.v1.")] = self._plain(method)

    def close(self) -> None:
        """Let go of the shared memory, and of what watches over it; no file is being written."""
        self._snapshots.close()
        self.host.parts.stop()
        self.host.lanes.start()
        self.host.lanes.stop()

    # -- calls -----------------------------------------------------------------------------------

    def send(self, method: str, request: bytes) -> tuple[Any, str, list[bytes | None]]:
        """Status (None: fine), text and answers of one call."""
        details: Any = Details(method)
        context: Any = Context()
        replies: list[bytes | None] = []
        self._snapshots.endpoints = ()
        if method in self._tensors:
            context.end = replies.append
            self._tensors[method].serve_call(request, context)
            return context.code, context.details, replies
        for service in self._services:
            handler: Any = service.service(details)
            if handler is None:
                continue
            if handler.unary_unary is not None:
                replies.append(handler.unary_unary(request, context))
            elif handler.stream_stream is not None:
                replies += handler.stream_stream(iter([request, request]), context)
                with contextlib.suppress(DecodeError):
                    self._release(FollowRequest.FromString(request).attach)
            else:
                handler.unary_stream(request, context, replies.append)
            return context.code, context.details, replies
        raise Broken(f"no method {method}")

    def _release(self, attach: int) -> None:
        """Nobody waits for that standby any more, as its stream is over."""
        self.host.feed.release(attach)
        self._released = max(self._released, attach)

    def _ask(self, method: str, request: Message) -> bytes:
        code, text, replies = self.send(f"/psfleet.v1.{method}", request.SerializeToString())
        if code is not None or not replies or replies[0] is None:
            raise Broken(f"a valid {method} is refused: {text}")
        return replies[0]

    def _parsed(self, kind: Any, method: str, request: Message) -> Any:
        return kind.FromString(self._ask(method, request))

    # -- state -----------------------------------------------------------------------------------

    def state(self) -> tuple[Any, ...]:
        """All that training depends on: tables with their state, lives, sequences, rounds."""
        shard, rounds = self.shard, self.shard.rounds
        tables = [
            (key, self._ask("Shard/ReadState", Pb.StateRequest(table=key, limit=64)))
            for key in shard.tables
        ]
        return (
            tables,
            dict(shard.workers.incarnations),
            dict(shard.workers.sequences),
            shard.mode,
            rounds.closed,
            sorted(rounds.held),
            sorted(rounds.left),
            repr(self.coordinator.members.seats),
            self.coordinator.collectives.completed,
        )

    # -- valid requests --------------------------------------------------------------------------

    def _make_tables(self) -> None:
        tables: Any = self._requests_for_tables()
        self.rows, self.whole = (
            self._parsed(Pb.CreateTableReply, "Shard/CreateTable", request).table
            for request in tables[:2]
        )
        self._ask("Shard/WriteState", self._state_frame())

    def _requests_for_tables(self) -> list[Message]:
        common = {"rule": "adagrad", "initializer": "uniform", "low": -0.1, "high": 0.1}
        sparse = Pb.TableSpec(name="rows", kind="sparse", shape=[3], **common)
        dense = Pb.TableSpec(name="whole", kind="dense", shape=[2, 2], **common)
        entry = Pb.TableSpec(name="new", kind="sparse", shape=[2], entry="probability", **common)
        entry.entry_values["probability"] = 0.5
        for spec in (sparse, dense, entry):
            spec.hyperparameters["epsilon"] = 1e-6
        value = struct.pack("<4f", 1, 2, 3, 4)
        return [
            Pb.CreateTableRequest(spec=sparse),
            Pb.CreateTableRequest(spec=dense, value=value),
            Pb.CreateTableRequest(spec=entry, worker=1),
        ]

    def _share(self) -> None:
        """Memory that the worker shares with the server, if this machine has such."""
        self.generation = 0
        memory = SharedMemory.make(MEMORY)
        if memory is None:
            return
        self.memory, offer = memory
        try:
            self.attach = Pb.AttachRequest(
                incarnation=self.incarnation,
                generation=77,
                boot=offer.boot,
                pid=offer.pid,
                descriptor=offer.descriptor,
                bytes=offer.size,
                token=offer.token,
            )
            self._ask("Shard/Attach", self.attach)
            self.generation = 77
        finally:
            os.close(offer.descriptor)
        self.memory.part(64, 24).view(np.int64)[:] = IDS

    def _valid(self) -> Iterator[tuple[str, Message]]:
        """A good request of every method, by a name that begins with the method's."""
        me: Any = {"worker": 0, "incarnation": self.incarnation}
        read = Segment(table=self.rows, content=frame_pb2.CONTENT_IDS, count=3)
        whole = Segment(table=self.whole, content=frame_pb2.CONTENT_WHOLE)
        yield "Shard/Push", Frame()
        yield "Shard/Push halves", Frame()
        yield "Shard/Push lane", Frame()
        yield (
            "Shard/Pull",
            Frame(header=Header(**me, segments=[read, whole]), payload=IDS.tobytes()),
        )
        reader = Header(seatless=True, segments=[read, whole])
        yield "Shard/Pull without a seat", Frame(header=reader, payload=IDS.tobytes())
        yield "Shard/Exchange", Frame()
        yield "Shard/Exchange lane", Frame()
        yield "Shard/WriteState", self._state_frame()
        if self.generation:
            yield "Shard/Attach", self.attach
        yield "Shard/Join", Pb.JoinRequest(worker=1, incarnation=1, mode=self.mode)
        yield "Shard/Leave", Pb.LeaveRequest(**me, last=1, rest=1)
        for number, request in enumerate(self._requests_for_tables()):
            yield f"Shard/CreateTable {number}", request
        yield "Shard/ReadState", Pb.StateRequest(table=self.rows, limit=10)
        yield "Shard/Status", Pb.StatusRequest()
        yield "Coordinator/Register", Cb.RegisterRequest(worker=1, boot=9, workers=2)
        yield "Coordinator/Barrier", Cb.BarrierRequest(**me, number=1)
        yield (
            "Coordinator/AllReduce",
            Cb.AllReduceRequest(
                **me, number=1, mode="sum", dtype="float32", shape=[2], value=bytes(8)
            ),
        )
        membership: Any = membership_pb2
        yield (
            "Coordinator/Heartbeat",
            membership.HeartbeatRequest(incarnation=self.incarnation, boot=5, step=1),
        )
        yield "Shard/Load", Pb.LoadRequest(path="checkpoint")  # within the present folder
        yield from self._valid_for_snapshots()
        yield "Replica/Follow", FollowRequest(attach=1, taken=1, version=1, servers=1)

    def _valid_of_servers(self) -> Iterator[tuple[str, Struct]]:
        """Requests of servers, which have no other definition than their classes."""
        yield "Scaling/Open", OpenMoveRequest(1, 1, True)
        moved = [
            MovedRecord(kind, joined(parts))
            for kind, parts in map(encode, (record for _, record in dealt(self.shard, {}, 1)))
        ]
        yield "Scaling/Fill", FillRowsRequest(1, moved)
        yield "Scaling/Send", SendRowsRequest(1, ())
        state = joined(write_state(server_state(self.shard.state(), None)))
        yield "Scaling/Prepare", PrepareMoveRequest(1, state)
        yield "Scaling/Adopt", AdoptRowsRequest(1)
        yield "Scaling/Abandon", AbandonMoveRequest(1)
        boot = self.host.boot
        view = self.coordinator.view + 1
        yield "Membership/Freeze", FreezeRequest(boot, PrepareView(view, {0: 1}), "localhost:0")
        seats = {0: SeatView((Incarnation(self.incarnation),)), 1: SeatView((Incarnation(0),))}
        yield "Membership/Install", InstallRequest(boot, InstallView(view, seats, 0))

    def _valid_for_snapshots(self) -> Iterator[tuple[str, Message]]:
        cut: Any = snapshot_pb2
        folder = {"number": 1, "folder": "checkpoint"}
        yield "Snapshots/Begin", cut.BeginCutRequest(**folder, members={0: self.incarnation})
        yield "Snapshots/Begin of rounds", cut.BeginCutRequest(**folder, at_round=True, round=1)
        yield "Snapshots/Begin and hold", cut.BeginCutRequest(**folder, hold=True, remember=True)
        yield "Snapshots/Finish", cut.FinishRequest(number=1, cut=True)
        yield (
            "SnapshotCoordinator/Keep",
            cut.KeepRequest(incarnation=self.incarnation, state=b'[[1, {"a": 2}]]'),
        )
        yield (
            "SnapshotCoordinator/Kept",
            cut.KeptRequest(incarnation=self.incarnation, keeps=True, servers=["localhost:0"]),
        )
        yield "SnapshotCoordinator/Take", cut.TakeRequest(path="checkpoint", kind="full", base=True)

    def _plain(self, method: str) -> Message:
        """A request of a method that nobody has written a better one for, from its definition."""
        service, name = method.rsplit("/", 1)
        pool: Any = descriptor_pool.Default()  # type: ignore[no-untyped-call, unused-ignore]
        definition = pool.FindServiceByName(service.removeprefix("/")).methods_by_name[name]
        request = message_factory.GetMessageClass(definition.input_type)()
        known = {
            "worker": 0,
            "incarnation": self.incarnation,
            "table": self.rows,
            "index": 0,
            "number": 1,
        }
        for each in definition.input_type.fields:
            if each.name in known and not each.is_repeated:
                setattr(request, each.name, known[each.name])
        return request

    def _state_frame(self) -> Frame:
        segments = [
            Segment(table=self.rows, content=frame_pb2.CONTENT_STATE, count=3, step=1),
            Segment(table=self.whole, content=frame_pb2.CONTENT_STATE, count=4, step=1),
        ]
        rows = self._parsed_state(self.rows, 3)
        whole = self._parsed_state(self.whole, 4)
        return Frame(header=Header(segments=segments), payload=rows + whole)

    def _parsed_state(self, table: int, count: int) -> bytes:
        """A state of the size that this server's tables have today."""
        if table == self.rows:
            planes = 1 + len(self.shard.tables[table].spec.rule.slots)
            body = IDS.tobytes() + np.ones((count, 3 * planes), "<f4").tobytes()
        else:
            body = np.ones((2, count), "<f4").tobytes()
        return body + bytes(-len(body) % 8)

    def _push(self, name: str) -> Frame:
        """The next push in sequence."""
        last = self.shard.rounds.closed if self.shard.mode == "sync" else 0
        header = Header(
            incarnation=self.incarnation,
            sequence=min(self.shard.workers.sequences.get(0, last) + 1, 2**64 - 1),
            samples=4,
            loss=1,
        )
        rows = Segment(
            table=self.rows, content=frame_pb2.CONTENT_ID_ROWS, count=3, learning_rate=0.1
        )
        payload = IDS.tobytes() + np.ones((3, 3), "<f4").tobytes() + bytes(4)
        header.segments.append(rows)
        if name == "Shard/Push halves":
            header.segments.add(
                table=self.whole,
                content=frame_pb2.CONTENT_ELEMENTS,
                count=2,
                learning_rate=0.1,
                precision=frame_pb2.PRECISION_FLOAT16,
                scale=4,
            )
            payload += struct.pack("<2I2e", 0, 3, 4, 8) + bytes(4)
        elif name.endswith(" lane"):
            header.lane.generation, header.lane.turn = 77, self._turn()
            header.segments[0].offset = 64
            payload = b""
        else:
            header.segments.add(
                table=self.whole, content=frame_pb2.CONTENT_VALUES, count=4, learning_rate=0.1
            )
            payload += np.ones(4, "<f4").tobytes()
        if name == "Shard/Exchange":
            header.segments.add(table=self.rows, content=frame_pb2.CONTENT_IDS, count=3)
            payload += IDS.tobytes()
        elif name == "Shard/Exchange lane":
            header.segments.add(
                table=self.rows, content=frame_pb2.CONTENT_IDS, count=3, offset=64, reply=1024
            )
        return Frame(header=header, payload=payload)

    def _good(self, name: str) -> Message | Struct:
        """The request as it is good now: some have numbers that must rise."""
        if name.startswith(("Shard/Push", "Shard/Exchange")):
            return self._push(name)
        good = self._requests[name]
        if name.startswith("Snapshots/"):
            cast("Any", good).number = min(self.shard.cuts.last + 1, 2**64 - 1)
        elif name.startswith("Replica/"):
            cast("Any", good).attach = min(self._released + 1, 2**64 - 1)
        return good

    def _turn(self) -> int:
        shared = self.host.lanes._shared.get(0)
        return 1 if shared is None else min(shared.turn + 1, 2**64 - 1)

    # -- changed requests ------------------------------------------------------------------------

    def changed(self, dice: random.Random) -> tuple[str, bytes]:
        """A method and a request for it that differs from a good one, mostly a little."""
        names = list(self._requests)
        name = dice.choice(names)
        if name == "Shard/Load" and dice.randrange(50):
            name = "Shard/Push"  # that reads files
        good = self._good(name)
        kind = dice.randrange(10)
        method = name.split()[0]
        times = dice.choice((1, 1, 2, 3)) if kind < 6 else 0
        if isinstance(good, Struct):
            tree: Any = msgpack.decode(message_codec.encode(good), strict=False)
            for _ in range(times):
                tree = mutated_tree(dice, tree)
            request = msgpack.encode(tree)
        else:
            message = type(good)()
            message.CopyFrom(good)
            for _ in range(times):
                mutated_message(dice, message)
            with contextlib.suppress(DecodeError):
                request = message.SerializeToString()
        if kind >= 6:
            others = [_bytes_of(self._requests[dice.choice(names)])]
            request = mutated_bytes(dice, request, others)
        if kind == 9:
            method = dice.choice(names).split()[0]
        return f"/psfleet.v1.{method}", request

    def unknown(self) -> set[str]:
        """Methods without a request here."""
        return set(self.methods) - {f"/psfleet.v1.{name.split()[0]}" for name in self._requests}


def _bytes_of(request: Message | Struct) -> bytes:
    """The request on the wire."""
    if isinstance(request, Struct):
        return message_codec.encode(request)
    return request.SerializeToString()
