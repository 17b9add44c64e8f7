"""The methods of the service Scaling: rows on their way to another number of servers."""

import grpc

from psfleet.wire.v1 import scaling_pb2
from psfleet_server.engine.row_moves import RowMoves
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.deferred_reply import immediate
from psfleet_server.services.protobuf_messages import encoded, parsed


def scaling_handler(host: ShardHost, moves: RowMoves) -> "grpc.GenericRpcHandler[object, object]":
    """Return the handler of calls about another number of servers."""
    service = _ScalingService(host, moves)
    return grpc.method_handlers_generic_handler(
        "psfleet.v1.Scaling",
        {
            "Open": immediate(service.open),
            "Send": immediate(service.send),
            "Fill": immediate(service.fill),
            "Prepare": immediate(service.prepare),
            "Adopt": immediate(service.adopt),
            "Abandon": immediate(service.abandon),
        },
    )


class _ScalingService:
    def __init__(self, host: ShardHost, moves: RowMoves) -> None:
        self._host = host
        self._moves = moves

    def open(self, request: bytes) -> bytes:
        message = parsed(scaling_pb2.OpenMoveRequest, request)
        self._moves.open(message.number, message.servers, message.ahead)
        return encoded(scaling_pb2.OpenMoveReply(boot=self._host.boot, alone=self._moves.alone))

    def send(self, request: bytes) -> bytes:
        message = parsed(scaling_pb2.SendRowsRequest, request)
        rows = self._moves.send(message.number, message.servers, message.ahead, message.hurry)
        return encoded(scaling_pb2.SendRowsReply(rows=rows))

    def fill(self, request: bytes) -> bytes:
        message = parsed(scaling_pb2.FillRowsRequest, request)
        self._moves.fill(message.number, message.records)
        return encoded(scaling_pb2.FillRowsReply())

    def prepare(self, request: bytes) -> bytes:
        message = parsed(scaling_pb2.PrepareMoveRequest, request)
        self._moves.prepare(message.number, message.state)
        return encoded(scaling_pb2.PrepareMoveReply())

    def adopt(self, request: bytes) -> bytes:
        self._moves.adopt(parsed(scaling_pb2.AdoptRowsRequest, request).number)
        return encoded(scaling_pb2.AdoptRowsReply())

    def abandon(self, request: bytes) -> bytes:
        self._moves.abandon(parsed(scaling_pb2.AbandonMoveRequest, request).number)
        return encoded(scaling_pb2.AbandonMoveReply())
