"""The gRPC methods of a server: bytes in, checked; bytes out."""

import time
from collections.abc import Sequence
from typing import Any

import grpc
import numpy as np

from psfleet.checkpoint import Snapshot
from psfleet.consistency import NO_MODE
from psfleet.data.assignment import RoundPlan
from psfleet.errors import (
    CheckpointError,
    ConfigError,
    FrameError,
    IdError,
    LimitExceeded,
    NotReady,
    ShapeError,
)
from psfleet.kernels.dedup import first_repeat
from psfleet.runtime.interface import Gradient, Read
from psfleet.schema.table import MAX_AXES, TableSpec
from psfleet.shard.dense_partition import dense_range
from psfleet.shard.events import CreateTable, PartState, Pull, Push, WriteState
from psfleet.shard.membership_view import PrepareView
from psfleet.tables.dense import DenseTable
from psfleet.wire import frame, segments
from psfleet.wire.membership_messages import read_install, write_plan, write_ranges, write_report
from psfleet.wire.shared_memory import MemoryHandle, SharedMemory
from psfleet.wire.table_messages import read_spec, write_mode
from psfleet.wire.v1 import coordinator_pb2, membership_pb2, shard_pb2
from psfleet.wire.v1.frame_pb2 import Header
from psfleet.wire.worker_requests import read_join, read_leave, read_push, read_shrink
from psfleet_server.coordinator.barriers import ModeRequest
from psfleet_server.coordinator.coordinator import DTYPES, Arrival, Coordinator, Heartbeat, Outcome
from psfleet_server.coordinator.data_dispatch import DatasetRequest
from psfleet_server.engine.shard_host import OUTCOMES, ShardHost
from psfleet_server.rpc.deferred_reply import DeferredReply, immediate, parkable, prompt
from psfleet_server.rpc.http2_listener import MeasuredMethod
from psfleet_server.rpc.pull_response import ResponsePlaces

__all__ = ["handlers", "tensor_methods"]

_PAGE = 256 << 20  # bytes of an answer to ReadState


def handlers(host: ShardHost) -> Sequence["grpc.GenericRpcHandler[Any, Any]"]:
    """What a server with this host answers."""
    shard, coordinator = _ShardService(host), _CoordinatorService(host)
    found: list[grpc.GenericRpcHandler[Any, Any]] = [
        _ImmediateHandlers(host, shard),
        grpc.method_handlers_generic_handler(
            "psfleet.v1.Shard",
            {
                "Push": immediate(shard.push, host.latencies.push),
                "Pull": parkable(shard.pull, host.latencies.pull),
                "Exchange": parkable(shard.exchange, host.latencies.exchange),
                "Attach": immediate(shard.attach),
                "Join": immediate(shard.join),
                "Leave": immediate(shard.leave),
                "CreateTable": immediate(shard.create_table),
                "ReadState": immediate(shard.read_state),
                "WriteState": immediate(shard.write_state),
                "Load": immediate(shard.load),
                "Shrink": immediate(shard.shrink),
                "Status": immediate(shard.status),
                "Transport": immediate(shard.transport),
            },
        ),
    ]
    members = _MembershipService(host)
    found.append(
        grpc.method_handlers_generic_handler(
            "psfleet.v1.Membership",
            {"Freeze": immediate(members.freeze), "Install": immediate(members.install)},
        )
    )
    if host.coordinator is not None:
        found.append(
            grpc.method_handlers_generic_handler(
                "psfleet.v1.Coordinator",
                {
                    "Register": parkable(coordinator.register),
                    "Barrier": parkable(coordinator.barrier),
                    "AllReduce": parkable(coordinator.all_reduce),
                    "Beat": immediate(coordinator.beat),
                    "Deal": immediate(coordinator.deal),
                },
            )
        )
    return found


def tensor_methods(host: ShardHost) -> dict[str, MeasuredMethod]:
    """The methods that carry tensors, by path: Push, Pull and Exchange."""
    shard = _ShardService(host)
    return {
        "/psfleet.v1.Shard/Push": (
            lambda request, reply: reply.answer(shard.push(request)),
            host.latencies.push,
        ),
        "/psfleet.v1.Shard/Pull": (shard.pull, host.latencies.pull),
        "/psfleet.v1.Shard/Exchange": (shard.exchange, host.latencies.exchange),
    }


class _ImmediateHandlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not generic at run time
    """Pulls and exchanges in the modes in which they never wait; in others it knows no method.

    The mode of a call is that of its lookup: it changes only while no call is under way.
    """

    def __init__(self, host: ShardHost, shard: "_ShardService") -> None:
        self._host = host
        self._methods = {
            "/psfleet.v1.Shard/Pull": prompt(shard.pull, host.latencies.pull),
            "/psfleet.v1.Shard/Exchange": prompt(shard.exchange, host.latencies.exchange),
        }

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """The handler of a call, if it is one of these."""
        mode = self._host.shard.consistency.declared
        if mode.pulls_wait or mode.name == NO_MODE.name:
            return None
        return self._methods.get(handler_call_details.method)


class _ShardService:
    """Methods of the service Shard."""

    def __init__(self, host: ShardHost) -> None:
        self._host = host

    def push(self, request: bytes) -> bytes:
        header, content, memory = self._open(request)
        gradients = segments.read_gradients(header, content, self._spec_of)
        if memory is not None and self._host.shard.consistency.declared.has_rounds:
            # The push is held for its round; its places go back to the worker with the answer.
            gradients = tuple(_kept(gradient) for gradient in gradients)
        answer = self._host.ask(self._push(header, gradients))
        assert answer.outcome is not None
        return frame.encode(Header(outcome=OUTCOMES[answer.outcome]))

    def pull(self, request: bytes, reply: DeferredReply) -> None:
        header, content, memory = self._open(request)
        reads = segments.read_reads(header, content, self._spec_of)
        reply.places = _places(header, memory)
        self._host.submit(_pull(header, reads), reply)

    def exchange(self, request: bytes, reply: DeferredReply) -> None:
        header, content, memory = self._open(request)
        gradients, reads = segments.read_exchange(header, content, self._spec_of)
        reply.places = _places(header, memory)
        self._host.exchange(self._push(header, gradients), _pull(header, reads), reply)

    def attach(self, request: bytes) -> bytes:
        asked = _parse(shard_pb2.AttachRequest, request)
        with self._host.lock:
            self._host.shard.workers.admit(asked.worker, asked.incarnation)
        if asked.bytes > self._host.limits.lane:
            raise LimitExceeded(
                f"worker {asked.worker} offers {asked.bytes} bytes of shared memory, the limit is "
                f"{self._host.limits.lane}; raise lane in PSFLEET_LIMITS"
            )
        offer = MemoryHandle(asked.boot, asked.pid, asked.descriptor, asked.bytes, asked.token)
        shared = self._host.lanes.attach(asked.worker, asked.incarnation, asked.generation, offer)
        return _bytes(shard_pb2.AttachReply(attached=shared))

    def _open(self, request: bytes) -> tuple[Header, segments.Bytes, SharedMemory | None]:
        """The header of a data call, the bytes of its segments, and the memory they are in."""
        header, payload = frame.decode(request)
        memory = self._host.lanes.of(header)
        self._host.bytes_in += len(request)
        return header, payload if memory is None else memory.bytes, memory

    def _push(self, header: Header, gradients: tuple[Gradient, ...]) -> Push:
        for gradient in gradients:
            _refuse_repeats(gradient, self._spec_of(gradient.table))
        if header.HasField("lane"):
            self._host.bytes_in += segments.gradient_bytes(header, self._spec_of)
        cut = (header.cut, header.cut_after) if header.cut else None
        return read_push(header, gradients, cut)

    def join(self, request: bytes) -> bytes:
        asked = _parse(shard_pb2.JoinRequest, request)
        join = read_join(asked)
        answer = self._host.ask(join)
        self._host.lanes.drop(asked.worker, before=asked.incarnation)
        shard = self._host.shard
        return _bytes(
            shard_pb2.JoinReply(
                server=shard.index,
                servers=shard.servers,
                sequence=answer.number,
                clock=answer.clock,
                switches=shard.consistency.switches,
                mode=write_mode(shard.mode or join.mode),
                staleness=shard.consistency.clocks.staleness,
            )
        )

    def leave(self, request: bytes) -> bytes:
        asked = _parse(shard_pb2.LeaveRequest, request)
        answer = self._host.ask(read_leave(asked))
        if not asked.rest:
            self._host.lanes.drop(asked.worker)
            if self._host.coordinator is not None:
                self._host.meet(lambda c: c.leave(asked.worker, asked.incarnation))
            self._host.end_if_over()
        return _bytes(shard_pb2.LeaveReply(remaining=answer.number))

    def create_table(self, request: bytes) -> bytes:
        asked = _parse(shard_pb2.CreateTableRequest, request)
        spec = read_spec(asked.spec)
        if len(asked.value) % 4:
            raise FrameError(
                f"table {spec.name!r}: a first value of {len(asked.value)} bytes is "
                "no whole number of float32"
            )
        value = np.frombuffer(asked.value, "<f4")
        with self._host.changing():
            self._refuse_if_awaited(spec, len(value))
            self._refuse_if_too_many(spec)
            self._host.shard.create(spec, value, asked.worker)
            # By the seat: if the maker dies between two servers, its next life goes on.
            created = self._host.shard.tables.makers.get(spec.key) == asked.worker
        return _bytes(shard_pb2.CreateTableReply(table=spec.key, created=created))

    def _refuse_if_too_many(self, spec: TableSpec) -> None:
        tables, most = self._host.shard.tables, self._host.limits.tables
        if len(tables) >= most and spec.key not in tables:
            raise LimitExceeded(
                f"table {spec.name!r} would be table {len(tables) + 1} of server "
                f"{self._host.shard.index}, its limit is {most}; raise tables in PSFLEET_LIMITS"
            )

    def _refuse_if_awaited(self, spec: TableSpec, values: int) -> None:
        """A dense table asked for without its value is one that another worker is making."""
        shard = self._host.shard
        if spec.kind == "sparse" or values or spec.key in shard.tables:
            return
        low, high = dense_range(spec, shard.index, shard.servers)
        if high > low:
            raise NotReady(f"table {spec.name!r} is not yet on server {shard.index}")

    def read_state(self, request: bytes) -> bytes:
        asked = _parse(shard_pb2.StateRequest, request)
        with self._host.lock:
            table = self._host.shard.tables.find(asked.table)
        # The table's own lock is enough; pushes to others go on.
        limit = min(asked.limit, _page(table.spec))
        if isinstance(table, DenseTable):
            step, values = table.part(asked.offset, asked.offset + limit)
            state = PartState(asked.table, step, values)
        else:
            step, rows = table.step, table.page(asked.offset, limit)
            state = PartState(asked.table, step, rows.values, rows.ids, rows.touched, rows.scores)
        self._host.settle_read()
        return segments.message(Header(), [segments.write_state(state)])

    def write_state(self, request: bytes) -> bytes:
        header, payload = frame.decode(request)
        states = segments.read_states(header, payload, self._spec_of)
        self._host.ask(
            WriteState(tuple(states), header.worker, header.incarnation, header.sequence)
        )
        return frame.encode(Header())

    def load(self, request: bytes) -> bytes:
        asked = _parse(shard_pb2.LoadRequest, request)
        shard, loaded = self._host.shard, 0
        try:
            for event in Snapshot(_path(asked.path)).events(shard.index, shard.servers):
                if isinstance(event, CreateTable):
                    with self._host.changing():
                        shard.create(event.spec, event.value)
                else:
                    self._host.ask(event)
                    loaded += len(event.columns.get("ids", event.columns.get("value", ())))
        except OSError as error:
            raise CheckpointError(
                f"server {shard.index} cannot read {asked.path!r}: {error.strerror}"
            ) from None
        return _bytes(shard_pb2.LoadReply(loaded=loaded))

    def shrink(self, request: bytes) -> bytes:
        answer = self._host.ask(read_shrink(_parse(shard_pb2.ShrinkRequest, request)))
        return _bytes(shard_pb2.ShrinkReply(removed=answer.number))

    def status(self, request: bytes) -> bytes:
        _parse(shard_pb2.StatusRequest, request)
        return _bytes(self._host.status())

    def transport(self, request: bytes) -> bytes:
        _parse(shard_pb2.TransportRequest, request)
        port, path = self._host.tensor_endpoint
        return _bytes(shard_pb2.TransportReply(port=port, path=path))

    def _spec_of(self, key: int) -> TableSpec:
        return self._host.shard.tables.find(key).spec


def _pull(header: Header, reads: tuple[Read, ...]) -> Pull:
    keeps = header.delay_compensation > 0
    return Pull(
        header.worker,
        header.incarnation,
        reads,
        header.commit,
        header.clock,
        keeps,
        header.progress,
    )


def _places(header: Header, memory: SharedMemory | None) -> ResponsePlaces | None:
    """Where the values of the header's reads go."""
    if memory is None:
        return None
    return ResponsePlaces(
        memory,
        tuple(
            segment.answer
            for segment in header.segments
            if segment.content in (segments.IDS, segments.WHOLE)
        ),
    )


def _kept(gradient: Gradient) -> Gradient:
    """The gradient in memory of this process."""
    ids = None if gradient.ids is None else gradient.ids.copy()
    return Gradient(gradient.table, gradient.values.copy(), ids, gradient.learning_rate)


class _MembershipService:
    """Methods of the service Membership."""

    def __init__(self, host: ShardHost) -> None:
        self._host = host

    def freeze(self, request: bytes) -> bytes:
        asked = _parse(membership_pb2.FreezeRequest, request)
        reply = membership_pb2.FreezeReply(boot=self._host.boot)
        if asked.boot == self._host.boot:
            self._host.aim(asked.coordinator)
            report = self._host.freeze(PrepareView(asked.view, dict(asked.ended)))
            reply.standing.CopyFrom(write_report(report))
        return _bytes(reply)

    def install(self, request: bytes) -> bytes:
        asked = _parse(membership_pb2.InstallRequest, request)
        meant = asked.boot == self._host.boot
        if meant:
            self._host.install(read_install(asked))
        return _bytes(membership_pb2.InstallReply(boot=self._host.boot, installed=meant))


class _CoordinatorService:
    """Methods of the service Coordinator."""

    def __init__(self, host: ShardHost) -> None:
        self._host = host

    def register(self, request: bytes, reply: DeferredReply) -> None:
        asked = _parse(coordinator_pb2.RegisterRequest, request)
        if asked.servers:
            self._host.find(asked.servers)
        self._host.meet(
            lambda c: c.register(asked.worker, asked.boot, asked.workers, reply),
            reply,
            registers=True,
        )

    def deal(self, request: bytes) -> bytes:
        asked = _parse(membership_pb2.DealRequest, request)
        order = DatasetRequest(
            asked.dataset,
            asked.size,
            asked.batch,
            asked.epochs,
            asked.seed,
            asked.round,
            asked.lease,
            asked.used,
            max(asked.group, 1),
            self._used(asked.worker, asked.incarnation),
        )
        coordinator = self._host.coordinator
        assert coordinator is not None
        with self._host.changing():
            dealt = coordinator.deal(asked.worker, asked.incarnation, order)
            reply = membership_pb2.DealReply(view=coordinator.view, ended=dealt == ())
        if isinstance(dealt, RoundPlan):
            reply.plan.extend(write_plan(dealt))
        elif dealt is not None:
            reply.lease.extend(write_ranges(dealt))
        return _bytes(reply)

    def _used(self, worker: int, incarnation: int) -> int:
        """Leases that the life has used up, as far as its pushes here say."""
        with self._host.lock:
            workers = self._host.shard.workers
            own = workers.lives.get(worker) == incarnation
            return workers.positions.get(worker, (0, 0))[0] if own else 0

    def barrier(self, request: bytes, reply: DeferredReply) -> None:
        asked = _parse(coordinator_pb2.BarrierRequest, request)
        arrival = Arrival(asked.worker, asked.incarnation, asked.number)
        wish = self._host.wishes.look()

        def arrive(coordinator: Coordinator) -> Sequence[Outcome]:
            coordinator.orders.wish = wish or coordinator.orders.wish
            return coordinator.arrive(arrival, reply)

        self._host.meet(arrive, reply)
        self._told(wish)

    def _told(self, wish: ModeRequest | None) -> None:
        """Let whoever wants another mode know when the workers have been told."""
        coordinator = self._host.coordinator
        if wish is not None and coordinator is not None:
            with self._host.lock:
                told = coordinator.meetings.last_told()
            self._host.wishes.told(told)

    def all_reduce(self, request: bytes, reply: DeferredReply) -> None:
        asked = _parse(coordinator_pb2.AllReduceRequest, request)
        arrival = Arrival(
            asked.worker,
            asked.incarnation,
            asked.number,
            asked.mode,
            _array(asked),
            asked.change,
            asked.round,
            (asked.leases, asked.samples),
        )
        self._host.meet(lambda c: c.arrive(arrival, reply), reply)

    def beat(self, request: bytes) -> bytes:
        asked = _parse(membership_pb2.BeatRequest, request)
        beat = Heartbeat(asked.index, asked.server, asked.incarnation, asked.boot, asked.step)
        coordinator = self._host.coordinator
        assert coordinator is not None
        is_first = (asked.server, asked.index) not in coordinator.beats
        with self._host.lock:
            orders = coordinator.beat(beat, time.monotonic())
            reply = membership_pb2.BeatReply(view=coordinator.view)
            if not asked.server:
                reply.wants_metrics = self._host.worker_reports.take(asked.index, asked.metrics)
            if orders.snapshot is not None:
                reply.snapshot.number, reply.snapshot.view = orders.snapshot
            news = asked.server and coordinator.is_busy
        if news:  # a server that has started again waits for its view
            self._host.poke()
        if is_first:
            self._host.members_changed()
        return _bytes(reply)


def _array(asked: Any) -> Any:
    """The array that a worker brings to a reduction."""
    if asked.dtype not in DTYPES:
        raise ShapeError(f"all_reduce of dtype {asked.dtype!r}; it must be {', '.join(DTYPES)}")
    dtype = np.dtype(asked.dtype).newbyteorder("<")
    if len(asked.shape) > MAX_AXES:
        raise ShapeError(f"an all_reduce of {len(asked.shape)} axes; the limit is {MAX_AXES}")
    count = 1
    for extent in asked.shape:
        count *= extent
    if count * dtype.itemsize != len(asked.value):
        raise FrameError(
            f"an all_reduce of shape {tuple(asked.shape)} announces "
            f"{count * dtype.itemsize} bytes and brings {len(asked.value)}"
        )
    return np.frombuffer(asked.value, dtype).reshape(tuple(asked.shape))


def _page(spec: TableSpec) -> int:
    """How many rows or values, with their state, one answer may hold."""
    values = (1 + len(spec.rule.slots)) * (spec.dim if spec.kind == "sparse" else 1)
    return _PAGE // (4 * values + 8)


def _refuse_repeats(gradient: Gradient, spec: TableSpec) -> None:
    """A row's rule must see the sum of its gradients, which the worker makes before it pushes."""
    if (
        gradient.ids is None
        or spec.kind == "dense"
        or (place := first_repeat(gradient.ids)) is None
    ):
        return
    raise IdError(
        f"table {spec.name!r}: the push names id {gradient.ids[place]} twice; sum its rows "
        "before the push"
    )


def _path(said: str) -> str:
    if not said or "\0" in said:
        raise ConfigError(f"the folder of a checkpoint is {said!r}; name one")
    return said


def _parse(kind: Any, request: bytes) -> Any:
    try:
        return kind.FromString(request)
    except Exception:
        raise FrameError(f"a request of {len(request)} bytes is no {kind.__name__}") from None


def _bytes(message: Any) -> bytes:
    encoded: bytes = message.SerializeToString()
    return encoded
