"""The gRPC methods of snapshots: bytes in, checked; bytes out."""

from collections.abc import Sequence
from typing import Any

import grpc

from psfleet.errors import CheckpointError, FrameError, PsfleetError
from psfleet.platform.service_thread import ServiceThread
from psfleet.shard.events import BeginCut, EndCut, MarkCut
from psfleet.shard.snapshot_cuts import Cutting
from psfleet.wire.table_messages import write_mode
from psfleet.wire.v1 import snapshot_pb2
from psfleet_server.engine.shard_host import Host
from psfleet_server.rpc.deferred_reply import Reply, immediate, parkable
from psfleet_server.snapshots.lead import Lead, Wanted

__all__ = ["snapshot_handlers"]


def snapshot_handlers(
    host: Host, lead: Lead | None
) -> Sequence["grpc.GenericRpcHandler[Any, Any]"]:
    """What a server with this host answers; `lead`: on server 0."""
    parts = _Snapshots(host)
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
    if lead is not None:
        led = _Lead(host, lead)
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


class _Snapshots:
    """Methods of the service Snapshots."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def begin(self, request: bytes) -> bytes:
        asked = _parse(snapshot_pb2.BeginCutRequest, request)
        cutting = Cutting(asked.number, since=asked.since, remember=asked.remember)
        if asked.at_round:
            cutting.round = asked.round
        elif not asked.hold:
            cutting.members = dict(asked.members)
        self._host.parts.expect(asked.number, asked.folder)
        answer = self._host.ask(BeginCut(cutting))
        self._host.parts.start(asked.number)
        shard = self._host.shard
        with self._host.lock:
            mode = 0 if shard.mode is None else write_mode(shard.mode)
            left = shard.rounds.left
            lives = {seat: life for seat, life in shard.workers.lives.items() if seat not in left}
            remembered = list(shard.moments)
        return _bytes(
            snapshot_pb2.BeginCutReply(
                mode=mode, closed=answer.number, lives=lives, remembered=remembered
            )
        )

    def mark(self, request: bytes) -> bytes:
        asked = _parse(snapshot_pb2.MarkRequest, request)
        self._host.ask(MarkCut(asked.number, asked.worker, asked.incarnation, asked.last))
        return _bytes(snapshot_pb2.MarkReply())

    def finish(self, request: bytes, reply: Reply) -> None:
        asked = _parse(snapshot_pb2.FinishRequest, request)

        def told(outcome: bytes | PsfleetError) -> None:
            if isinstance(outcome, PsfleetError):
                reply.fail(outcome)
            else:
                reply.answer(_bytes(snapshot_pb2.FinishReply(part=outcome)))

        self._host.parts.await_part(asked.number, told, cut=asked.cut)
        what = "cut" if asked.cut else "write"
        self._host.park(
            reply, f"server {self._host.shard.index} did not {what} snapshot {asked.number} in time"
        )

    def settle(self, request: bytes) -> bytes:
        asked = _parse(snapshot_pb2.SettleRequest, request)
        self._host.ask(EndCut(asked.number, asked.base))
        self._host.parts.forget(asked.number)
        keeper = self._host.keeper
        if asked.complete and keeper is not None and keeper.can_start_from(asked.number):
            with self._host.lock:
                keeper.shorten(asked.number)
            self._host.feed.complete(asked.number)
        return _bytes(snapshot_pb2.SettleReply())


class _Lead:
    """Methods of the service SnapshotLead."""

    def __init__(self, host: Host, lead: Lead) -> None:
        self._host = host
        self._lead = lead

    def ready(self, request: bytes, reply: Reply) -> None:
        asked = _parse(snapshot_pb2.ReadyRequest, request)
        if not self._lead.ready(asked.number, asked.worker, asked.incarnation, reply):
            raise CheckpointError(f"snapshot {asked.number} is over")
        self._host.park(reply, f"not all workers have heard of snapshot {asked.number} in time")

    def keep(self, request: bytes) -> bytes:
        asked = _parse(snapshot_pb2.KeepRequest, request)
        try:
            self._lead.keep(asked.number, asked.worker, asked.incarnation, asked.state)
        except ValueError:
            raise FrameError(f"what worker {asked.worker} keeps is no JSON") from None
        return _bytes(snapshot_pb2.KeepReply())

    def kept(self, request: bytes) -> bytes:
        asked = _parse(snapshot_pb2.KeptRequest, request)
        self._lead.learn(asked.servers)
        self._lead.expect(asked.worker, asked.incarnation, keeps=asked.keeps)
        return _bytes(snapshot_pb2.KeptReply(state=self._lead.restored_of(asked.worker)))

    def take(self, request: bytes, reply: Reply) -> None:
        asked = _parse(snapshot_pb2.TakeRequest, request)
        if asked.kind not in ("", "full", "delta"):
            raise FrameError(f"a snapshot of kind {asked.kind!r} is wanted; use full or delta")
        wanted = Wanted(asked.path, asked.kind == "delta", asked.base)

        def take() -> None:
            try:
                number, path = self._lead.take(wanted)
            except PsfleetError as error:
                reply.fail(error)
            except Exception as error:
                reply.fail(CheckpointError(f"the snapshot was not taken: {error!r}"))
            else:
                reply.answer(_bytes(snapshot_pb2.TakeReply(number=number, path=path)))

        ServiceThread(take, "take").start()
        self._host.park(reply, "the snapshot was not complete in time; it may still become so")


def _parse(kind: Any, request: bytes) -> Any:
    try:
        return kind.FromString(request)
    except Exception:
        raise FrameError(f"a request of {len(request)} bytes is no {kind.__name__}") from None


def _bytes(message: Any) -> bytes:
    encoded: bytes = message.SerializeToString()
    return encoded
