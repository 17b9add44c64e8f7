"""gRPC service Scaling: calls of server 0 and of other servers while the number of servers changes.

Each method hands its message to `RowMoves` (server/psfleet_server/engine/row_moves.py), where the steps are.
"""

import grpc

from psfleet.core.net.message_codec import decode, encode
from psfleet_server.engine.row_moves import RowMoves
from psfleet_server.engine.server_messages import (
    AbandonMoveRequest,
    AdoptRowsRequest,
    FillRowsRequest,
    OpenMoveReply,
    OpenMoveRequest,
    PrepareMoveRequest,
    SendRowsReply,
    SendRowsRequest,
)
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.replies import immediate


def scaling_handler(host: ShardHost, moves: RowMoves) -> "grpc.GenericRpcHandler[object, object]":
    """Return the handler of the service Scaling, which changes the number of servers."""
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
        message: OpenMoveRequest = decode(OpenMoveRequest, request)
        self._moves.open(message.number, message.servers, message.ahead)
        return encode(OpenMoveReply(self._host.boot, self._moves.alone))

    def send(self, request: bytes) -> bytes:
        message: SendRowsRequest = decode(SendRowsRequest, request)
        rows = self._moves.send(message.number, message.servers, message.ahead, message.hurry)
        return encode(SendRowsReply(rows))

    def fill(self, request: bytes) -> bytes:
        message: FillRowsRequest = decode(FillRowsRequest, request)
        self._moves.fill(message.number, message.records)
        return b""

    def prepare(self, request: bytes) -> bytes:
        message: PrepareMoveRequest = decode(PrepareMoveRequest, request)
        self._moves.prepare(message.number, message.state)
        return b""

    def adopt(self, request: bytes) -> bytes:
        message: AdoptRowsRequest = decode(AdoptRowsRequest, request)
        self._moves.adopt(message.number)
        return b""

    def abandon(self, request: bytes) -> bytes:
        message: AbandonMoveRequest = decode(AbandonMoveRequest, request)
        self._moves.abandon(message.number)
        return b""
