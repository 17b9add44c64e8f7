"""gRPC methods of the services Coordinator (server 0) and Membership (every server).

Workers call Coordinator: registrations, collectives, data and heartbeats. Calls that wait for other workers
get a `DeferredReply`, which holds no thread. Server 0 calls Membership to freeze servers and to install views
(memberships). Methods run in threads of the RPC server; `ShardHost` takes the lock.
"""

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from psfleet.core.base.errors import FrameError, ShapeError
from psfleet.core.base.logs import FIRST_NONFINITE
from psfleet.core.engine.round_plan import RoundPlan
from psfleet.core.engine.schema.table import MAX_AXES
from psfleet.core.net.membership_messages import write_pairs, write_plan_entry
from psfleet.core.net.message_codec import decode, encode
from psfleet.core.net.v1 import coordinator_pb2, membership_pb2
from psfleet_server.coordinator.barriers import DTYPES, Arrival, ModeRequest
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.coordinator.coordinator_messages import Heartbeat, Outcome
from psfleet_server.coordinator.data_dispatch import DatasetRequest
from psfleet_server.engine.server_messages import (
    FreezeReply,
    FreezeRequest,
    InstallReply,
    InstallRequest,
)
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.replies import DeferredReply, encoded, explained, parsed


class CoordinatorService:
    """Methods of the service Coordinator, which workers call on server 0."""

    def __init__(self, host: ShardHost) -> None:
        self._host = host

    def register(self, request: bytes, reply: DeferredReply) -> None:
        message = parsed(coordinator_pb2.RegisterRequest, request)
        if message.servers:
            self._host.find(message.servers)
        self._host.meet(
            lambda c: c.register(message.worker, message.boot, message.workers, reply),
            reply,
            registers=True,
        )

    def assign_data(self, request: bytes) -> bytes:
        message = parsed(membership_pb2.AssignDataRequest, request)
        dataset_request = DatasetRequest(
            message.dataset,
            message.size,
            message.batch,
            message.epochs,
            message.seed,
            message.round,
            message.lease,
            message.used,
            max(message.group, 1),
            self._used(message.worker, message.incarnation),
            message.parts,
        )
        coordinator = self._host.coordinator
        assert coordinator is not None
        with self._host.mutating(), explained(coordinator.recent):
            data = coordinator.assign_data(message.worker, message.incarnation, dataset_request)
            parts = coordinator.dispatch.datasets[message.dataset - 1].request.parts
            reply = membership_pb2.AssignDataReply(
                view=coordinator.view, ended=data == (), parts=parts
            )
        if isinstance(data, RoundPlan):
            reply.plan.extend(map(write_plan_entry, data.entries))
        elif data is not None:
            reply.lease.extend(write_pairs(data))
        return encoded(reply)

    def _used(self, worker: int, incarnation: int) -> int:
        """Return the number of leases (ranges of samples) that the worker's pushes report as used up."""
        with self._host.lock:
            workers = self._host.shard.workers
            is_present = workers.incarnations.get(worker) == incarnation
            return workers.positions.get(worker, (0, 0))[0] if is_present else 0

    def barrier(self, request: bytes, reply: DeferredReply) -> None:
        message = parsed(coordinator_pb2.BarrierRequest, request)
        arrival = Arrival(message.worker, message.incarnation, message.number)
        mode_request = self._host.mode_requests.look()

        def arrive(coordinator: Coordinator) -> Sequence[Outcome]:
            coordinator.worker_requests.mode_request = (
                mode_request or coordinator.worker_requests.mode_request
            )
            return coordinator.arrive(arrival, reply)

        self._host.meet(arrive, reply)
        self._told(mode_request)

    def _told(self, mode_request: ModeRequest | None) -> None:
        """Confirm a mode request to `psfleet mode`, once a barrier has announced it to the workers."""
        coordinator = self._host.coordinator
        if mode_request is not None and coordinator is not None:
            with self._host.lock:
                number = coordinator.collectives.last_told()
            self._host.mode_requests.told(number)

    def all_reduce(self, request: bytes, reply: DeferredReply) -> None:
        message = parsed(coordinator_pb2.AllReduceRequest, request)
        arrival = Arrival(
            message.worker,
            message.incarnation,
            message.number,
            message.mode,
            _array(message),
            message.change,
            message.round,
            (message.leases, message.samples),
        )
        self._host.meet(lambda c: c.arrive(arrival, reply), reply)

    def scale(self, request: bytes) -> bytes:
        self._host.scale_file.ask(parsed(coordinator_pb2.ScaleRequest, request).servers)
        return encoded(coordinator_pb2.ScaleReply())

    def take_heartbeat(self, request: bytes) -> bytes:
        message = parsed(membership_pb2.HeartbeatRequest, request)
        heartbeat = Heartbeat(
            message.index,
            message.server,
            message.incarnation,
            message.boot,
            message.step,
            message.snapshot,
        )
        coordinator = self._host.coordinator
        assert coordinator is not None
        is_first = (message.server, message.index) not in coordinator.heartbeats
        reports, first, now = self._host.worker_reports, "", time.monotonic()
        with self._host.lock:
            worker_requests = coordinator.take_heartbeat(heartbeat, now)
            reply = membership_pb2.HeartbeatReply(view=coordinator.view)
            if not message.server:
                reply.wants_metrics = reports.take(message.index, message.metrics)
                if message.nonfinite or reports.nonfinite.is_pending:
                    first = reports.nonfinite.take(
                        message.nonfinite,
                        message.nonfinite_at,
                        now,
                        _oldest_heartbeat(coordinator, now),
                    )
            if worker_requests.snapshot is not None:
                reply.snapshot.number, reply.snapshot.view = worker_requests.snapshot
            if worker_requests.complete is not None:
                reply.complete.number, reply.complete.folder = worker_requests.complete
            news = message.server and coordinator.is_busy
        if news:  # a server that has started again waits for its view
            self._host.poke()
        if is_first:
            self._host.members_changed()
        if first:
            reports.tell(FIRST_NONFINITE + first)
        return encoded(reply)


def _oldest_heartbeat(coordinator: Coordinator, now: float) -> float:
    """Return the time of the last heartbeat of the worker whose last heartbeat is oldest.

    Returns -infinity if a worker has sent none yet, and `now` if there are no workers.
    """
    never = (None, -math.inf)
    workers = coordinator.members.present()
    return min(
        (coordinator.heartbeats.get((False, seat), never)[1] for seat in workers), default=now
    )


def _array(message: Any) -> Any:
    """Return the array of an AllReduceRequest.

    Raises:
        ShapeError: The dtype or the number of axes is not allowed.
        FrameError: The number of bytes does not match the shape.
    """
    if message.dtype not in DTYPES:
        raise ShapeError(f"all_reduce of dtype {message.dtype!r}; it must be {', '.join(DTYPES)}")
    dtype = np.dtype(message.dtype).newbyteorder("<")
    if len(message.shape) > MAX_AXES:
        raise ShapeError(f"an all_reduce of {len(message.shape)} axes; the limit is {MAX_AXES}")
    count = 1
    for extent in message.shape:
        count *= extent
    if count * dtype.itemsize != len(message.value):
        raise FrameError(
            f"an all_reduce of shape {tuple(message.shape)} announces "
            f"{count * dtype.itemsize} bytes and brings {len(message.value)}"
        )
    return np.frombuffer(message.value, dtype).reshape(tuple(message.shape))


class MembershipService:
    """Methods of the service Membership, by which server 0 freezes a server and installs new members."""

    def __init__(self, host: ShardHost) -> None:
        self._host = host

    def freeze(self, request: bytes) -> bytes:
        message: FreezeRequest = decode(FreezeRequest, request)
        report = None
        if message.boot == self._host.boot:
            self._host.aim(message.coordinator)
            report = self._host.freeze(message.view)
        return encode(FreezeReply(self._host.boot, report))

    def install(self, request: bytes) -> bytes:
        message: InstallRequest = decode(InstallRequest, request)
        is_own = message.boot == self._host.boot
        if is_own:
            self._host.install(message.view)
        return encode(InstallReply(self._host.boot, is_own))
