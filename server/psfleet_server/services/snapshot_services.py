"""gRPC methods of snapshots: the services Snapshots on every server, and SnapshotCoordinator on server 0.

Server 0 calls Snapshots to make every server freeze its shard at the cut, write its file and end the
snapshot. Workers call Snapshots with their marks, which name their last push before the cut. Workers also
call SnapshotCoordinator: to wait for announcements, to deliver their states, and to request a snapshot. Its
methods post events to the thread of `SnapshotRunner`. Calls that wait get a `DeferredReply` and hold no
thread.
"""

import json
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import grpc

from psfleet.core.base.errors import CheckpointError, FrameError, PsfleetError
from psfleet.core.engine.shard.events import BeginCut, EndCut, MarkCut
from psfleet.core.engine.shard.snapshot_cuts import PendingCut
from psfleet.core.net.membership_messages import write_mode
from psfleet.core.net.v1 import snapshot_pb2
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.replies import DeferredReply, encoded, immediate, parkable, parsed
from psfleet_server.snapshots.snapshot_coordinator import SnapshotRequest
from psfleet_server.snapshots.snapshot_runner import SnapshotRunner


def snapshot_handlers(
    host: ShardHost, runner: SnapshotRunner | None
) -> Sequence["grpc.GenericRpcHandler[Any, Any]"]:
    """Return the handlers of Snapshots, and on server 0 also of SnapshotCoordinator.

    `runner` is None on other servers.
    """
    parts = _SnapshotService(host)
    services = [
        grpc.method_handlers_generic_handler(
            "psfleet.v1.Snapshots",
            {
                "Begin": immediate(parts.begin),
                "Mark": immediate(parts.mark),
                "Finish": parkable(parts.finish),
                "Settle": immediate(parts.settle),
            },
        )
    ]
    if runner is not None:
        coordination = _SnapshotCoordination(host, runner)
        services.append(
            grpc.method_handlers_generic_handler(
                "psfleet.v1.SnapshotCoordinator",
                {
                    "Listen": parkable(coordination.listen),
                    "Ready": parkable(coordination.ready),
                    "Keep": immediate(coordination.keep),
                    "Kept": immediate(coordination.kept),
                    "Take": parkable(coordination.take),
                },
            )
        )
    return services


class _SnapshotService:
    """Methods of the service Snapshots, by which server 0 and the workers take a snapshot of this server."""

    def __init__(self, host: ShardHost) -> None:
        self._host = host

    def begin(self, request: bytes) -> bytes:
        message = parsed(snapshot_pb2.BeginCutRequest, request)
        cutting = PendingCut(message.number, since=message.since, remember=message.remember)
        if message.at_round:
            cutting.round = message.round
        elif not message.hold:
            cutting.members = dict(message.members)
        if message.servers not in (0, self._host.shard.servers):
            raise CheckpointError("the number of servers has changed; take the snapshot again")
        # Before the shard learns of the cut, which it may make at once: the writer must already expect the
        # frozen image.
        self._host.parts.expect(message.number, message.folder)
        reply = self._host.ask(BeginCut(cutting))
        self._host.parts.start(message.number)
        shard = self._host.shard
        with self._host.lock:
            mode = write_mode(shard.mode)
            leavers = shard.rounds.left
            incarnations = {
                seat: incarnation
                for seat, incarnation in shard.workers.incarnations.items()
                if seat not in leavers
            }
            delta_bases = list(shard.delta_bases)
        return encoded(
            snapshot_pb2.BeginCutReply(
                mode=mode, closed=reply.number, incarnations=incarnations, delta_bases=delta_bases
            )
        )

    def mark(self, request: bytes) -> bytes:
        message = parsed(snapshot_pb2.MarkRequest, request)
        addressed = message.addressed if message.HasField("addressed") else None
        self._host.ask(
            MarkCut(message.number, message.worker, message.incarnation, message.last, addressed)
        )
        return encoded(snapshot_pb2.MarkReply())

    def finish(self, request: bytes, reply: DeferredReply) -> None:
        message = parsed(snapshot_pb2.FinishRequest, request)

        def told(outcome: bytes | PsfleetError) -> None:
            if isinstance(outcome, PsfleetError):
                reply.fail(outcome)
            else:
                reply.complete(encoded(snapshot_pb2.FinishReply(part=outcome)))

        self._host.parts.await_part(message.number, told, cut=message.cut)
        action = "cut" if message.cut else "write"
        self._host.park(
            reply,
            f"server {self._host.shard.index} did not {action} snapshot {message.number} in time",
        )

    def settle(self, request: bytes) -> bytes:
        message = parsed(snapshot_pb2.SettleRequest, request)
        self._host.ask(EndCut(message.number, message.base))
        self._host.parts.forget(message.number)
        journal = self._host.journal
        if message.complete and journal is not None and journal.can_start_from(message.number):
            with self._host.lock:
                journal.shorten(message.number)
            self._host.feed.complete(message.number)
        return encoded(snapshot_pb2.SettleReply())


class _SnapshotCoordination:
    """Methods of the service SnapshotCoordinator on server 0, which workers call."""

    def __init__(self, host: ShardHost, runner: SnapshotRunner) -> None:
        self._host = host
        self._runner = runner

    def listen(self, request: bytes, reply: DeferredReply) -> None:
        message = parsed(snapshot_pb2.ListenRequest, request)
        with self._host.lock:
            is_known = message.worker in self._host.shard.workers.incarnations
        if is_known:
            self._runner.news.listen(message.worker, message.number, reply)
        # This server has restarted, and the worker has not joined again yet. The worker calls again after a
        # pause.
        else:
            reply.complete(encoded(snapshot_pb2.ListenReply()))

    def ready(self, request: bytes, reply: DeferredReply) -> None:
        message = parsed(snapshot_pb2.ReadyRequest, request)
        number, worker, incarnation = message.number, message.worker, message.incarnation
        self._runner.post(
            lambda machine: machine.worker_learned(reply, number, worker, incarnation)
        )
        self._host.park(reply, f"not all workers have heard of snapshot {number} in time")

    def keep(self, request: bytes) -> bytes:
        message = parsed(snapshot_pb2.KeepRequest, request)
        state, number, worker = _state(message), message.number, message.worker
        incarnation, last = message.incarnation, message.last
        if number:
            self._runner.post(
                lambda machine: machine.state_delivered(number, worker, incarnation, last, state)
            )
        else:
            self._runner.post(
                lambda machine: machine.farewell_delivered(worker, incarnation, state)
            )
        return encoded(snapshot_pb2.KeepReply())

    def kept(self, request: bytes) -> bytes:
        message = parsed(snapshot_pb2.KeptRequest, request)
        self._runner.learn(message.servers)
        worker, incarnation, keeps = message.worker, message.incarnation, message.keeps
        self._runner.post(
            lambda machine: machine.worker_introduced(worker, incarnation, keeps=keeps)
        )
        return encoded(snapshot_pb2.KeptReply(state=self._runner.restored.of(worker)))

    def take(self, request: bytes, reply: DeferredReply) -> None:
        message = parsed(snapshot_pb2.TakeRequest, request)
        if message.kind not in ("", "full", "delta"):
            raise FrameError(f"a snapshot of kind {message.kind!r} is wanted; use full or delta")
        snapshot = SnapshotRequest(
            message.path, message.kind == "delta", message.base, script_waits=message.script_waits
        )
        ticket = self._runner.take(snapshot)
        self._host.park(reply, "the snapshot was not complete in time; it may still become so")
        ticket.add_done_callback(lambda ticket: _reply(reply, ticket))


def _state(message: Any) -> Any:
    """Parse the state that a worker delivers for a snapshot.

    Returns the state or None. For a message without a snapshot number, returns a list of [step, state] for
    the worker's last steps.
    """
    try:
        state = json.loads(message.state) if message.state or not message.number else None
    except (ValueError, RecursionError) as error:
        why = "too deep" if isinstance(error, RecursionError) else "no JSON"
        raise FrameError(f"what worker {message.worker} keeps is {why}") from None
    if not message.number and not (isinstance(state, list) and all(map(_is_step, state))):
        raise FrameError(f"what worker {message.worker} keeps of its last steps is no list of them")
    return state


def _is_step(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], int)


def _reply(reply: DeferredReply, ticket: "Future[tuple[int, str]]") -> None:
    error = ticket.exception()
    if isinstance(error, PsfleetError):
        reply.fail(error)
    else:
        number, path = ticket.result()
        reply.complete(encoded(snapshot_pb2.TakeReply(number=number, path=path)))
