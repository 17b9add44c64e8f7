"""The methods of the service Coordinator, which server 0 answers."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from psfleet.data.assignment import RoundPlan
from psfleet.errors import FrameError, ShapeError
from psfleet.schema.table import MAX_AXES
from psfleet.wire.membership_messages import write_plan, write_ranges
from psfleet.wire.v1 import coordinator_pb2, membership_pb2
from psfleet_server.coordinator.barriers import DTYPES, Arrival, ModeRequest
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.coordinator.coordinator_messages import Heartbeat, Outcome
from psfleet_server.coordinator.data_dispatch import DatasetRequest
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.deferred_reply import DeferredReply
from psfleet_server.services.protobuf_messages import encoded, parsed

__all__ = ["CoordinatorService"]


class CoordinatorService:
    """Methods of the service Coordinator."""

    def __init__(self, host: ShardHost) -> None:
        self._host = host

    def register(self, request: bytes, reply: DeferredReply) -> None:
        asked = parsed(coordinator_pb2.RegisterRequest, request)
        if asked.servers:
            self._host.find(asked.servers)
        self._host.meet(
            lambda c: c.register(asked.worker, asked.boot, asked.workers, reply),
            reply,
            registers=True,
        )

    def deal(self, request: bytes) -> bytes:
        asked = parsed(membership_pb2.DealRequest, request)
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
        return encoded(reply)

    def _used(self, worker: int, incarnation: int) -> int:
        """Leases that the life has used up, as far as its pushes here say."""
        with self._host.lock:
            workers = self._host.shard.workers
            own = workers.lives.get(worker) == incarnation
            return workers.positions.get(worker, (0, 0))[0] if own else 0

    def barrier(self, request: bytes, reply: DeferredReply) -> None:
        asked = parsed(coordinator_pb2.BarrierRequest, request)
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
        asked = parsed(coordinator_pb2.AllReduceRequest, request)
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
        asked = parsed(membership_pb2.BeatRequest, request)
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
        return encoded(reply)


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
