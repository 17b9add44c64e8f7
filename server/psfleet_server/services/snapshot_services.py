"""The gRPC methods of snapshots: bytes in, checked; bytes out."""

import json
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import grpc

from psfleet.errors import FrameError, PsfleetError
from psfleet.shard.events import BeginCut, EndCut, MarkCut
from psfleet.shard.snapshot_cuts import PendingCut
from psfleet.wire.mode_messages import write_mode
from psfleet.wire.v1 import snapshot_pb2
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.deferred_reply import DeferredReply, immediate, parkable
from psfleet_server.services.protobuf_messages import encoded, parsed
from psfleet_server.snapshots.snapshot_events import (
    SnapshotRequest,
    WorkerIntroduced,
    WorkerLearned,
    WorkerStateArrived,
)
from psfleet_server.snapshots.snapshot_runner import SnapshotRunner

__all__ = ["snapshot_handlers"]


def snapshot_handlers(
    host: ShardHost, runner: SnapshotRunner | None
) -> Sequence["grpc.GenericRpcHandler[Any, Any]"]:
    """What a server with this host answers; `runner`: on server 0."""
    parts = _SnapshotService(host)
    found = [
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
        led = _SnapshotCoordination(host, runner)
        found.append(
            grpc.method_handlers_generic_handler(
                "psfleet.v1.SnapshotLead",
                {
                    "Ready": parkable(led.ready),
                    "Keep": immediate(led.keep),
                    "Kept": immediate(led.kept),
                    "Take": parkable(led.take),
                },
            )
        )
    return found


class _SnapshotService:
    """Methods of the service Snapshots."""

    def __init__(self, host: ShardHost) -> None:
        self._host = host

    def begin(self, request: bytes) -> bytes:
        asked = parsed(snapshot_pb2.BeginCutRequest, request)
        cutting = PendingCut(asked.number, since=asked.since, remember=asked.remember)
        if asked.at_round:
            cutting.round = asked.round
        elif not asked.hold:
            cutting.members = dict(asked.members)
        self._host.parts.expect(asked.number, asked.folder)
        answer = self._host.ask(BeginCut(cutting))
        self._host.parts.start(asked.number)
        shard = self._host.shard
        with self._host.lock:
            mode = write_mode(shard.mode)
            left = shard.rounds.left
            lives = {seat: life for seat, life in shard.workers.lives.items() if seat not in left}
            remembered = list(shard.moments)
        return encoded(
            snapshot_pb2.BeginCutReply(
                mode=mode, closed=answer.number, lives=lives, remembered=remembered
            )
        )

    def mark(self, request: bytes) -> bytes:
        asked = parsed(snapshot_pb2.MarkRequest, request)
        addressed = asked.addressed if asked.HasField("addressed") else None
        self._host.ask(
            MarkCut(asked.number, asked.worker, asked.incarnation, asked.last, addressed)
        )
        return encoded(snapshot_pb2.MarkReply())

    def finish(self, request: bytes, reply: DeferredReply) -> None:
        asked = parsed(snapshot_pb2.FinishRequest, request)

        def told(outcome: bytes | PsfleetError) -> None:
            if isinstance(outcome, PsfleetError):
                reply.fail(outcome)
            else:
                reply.answer(encoded(snapshot_pb2.FinishReply(part=outcome)))

        self._host.parts.await_part(asked.number, told, cut=asked.cut)
        what = "cut" if asked.cut else "write"
        self._host.park(
            reply, f"server {self._host.shard.index} did not {what} snapshot {asked.number} in time"
        )

    def settle(self, request: bytes) -> bytes:
        asked = parsed(snapshot_pb2.SettleRequest, request)
        self._host.ask(EndCut(asked.number, asked.base))
        self._host.parts.forget(asked.number)
        keeper = self._host.keeper
        if asked.complete and keeper is not None and keeper.can_start_from(asked.number):
            with self._host.lock:
                keeper.shorten(asked.number)
            self._host.feed.complete(asked.number)
        return encoded(snapshot_pb2.SettleReply())


class _SnapshotCoordination:
    """Methods of the service SnapshotLead."""

    def __init__(self, host: ShardHost, runner: SnapshotRunner) -> None:
        self._host = host
        self._runner = runner

    def ready(self, request: bytes, reply: DeferredReply) -> None:
        asked = parsed(snapshot_pb2.ReadyRequest, request)
        self._runner.post(WorkerLearned(reply, asked.number, asked.worker, asked.incarnation))
        self._host.park(reply, f"not all workers have heard of snapshot {asked.number} in time")

    def keep(self, request: bytes) -> bytes:
        asked = parsed(snapshot_pb2.KeepRequest, request)
        state = _state(asked)
        self._runner.post(WorkerStateArrived(asked.number, asked.worker, asked.incarnation, state))
        return encoded(snapshot_pb2.KeepReply())

    def kept(self, request: bytes) -> bytes:
        asked = parsed(snapshot_pb2.KeptRequest, request)
        self._runner.learn(asked.servers)
        self._runner.post(WorkerIntroduced(asked.worker, asked.incarnation, asked.keeps))
        return encoded(snapshot_pb2.KeptReply(state=self._runner.restored.of(asked.worker)))

    def take(self, request: bytes, reply: DeferredReply) -> None:
        asked = parsed(snapshot_pb2.TakeRequest, request)
        if asked.kind not in ("", "full", "delta"):
            raise FrameError(f"a snapshot of kind {asked.kind!r} is wanted; use full or delta")
        wanted = SnapshotRequest(asked.path, asked.kind == "delta", asked.base)
        ticket = self._runner.take(wanted)
        self._host.park(reply, "the snapshot was not complete in time; it may still become so")
        ticket.add_done_callback(lambda ticket: _answer(reply, ticket))


def _state(asked: Any) -> Any:
    """What a worker keeps: of a snapshot a state or None, of its last steps a list of [step, state]."""
    try:
        state = json.loads(asked.state) if asked.state or not asked.number else None
    except ValueError:
        raise FrameError(f"what worker {asked.worker} keeps is no JSON") from None
    if not asked.number and not (isinstance(state, list) and all(map(_is_step, state))):
        raise FrameError(f"what worker {asked.worker} keeps of its last steps is no list of them")
    return state


def _is_step(said: Any) -> bool:
    return isinstance(said, list) and len(said) == 2 and isinstance(said[0], int)


def _answer(reply: DeferredReply, ticket: "Future[tuple[int, str]]") -> None:
    error = ticket.exception()
    if isinstance(error, PsfleetError):
        reply.fail(error)
    else:
        number, path = ticket.result()
        reply.answer(encoded(snapshot_pb2.TakeReply(number=number, path=path)))
