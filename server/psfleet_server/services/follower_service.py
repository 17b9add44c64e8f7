"""The methods of the service Followers: changes and rows for copies of the weights elsewhere."""

from psfleet.wire.v1.follower_pb2 import ChangesRequest, RowsRequest
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.deferred_reply import DeferredReply
from psfleet_server.services.protobuf_messages import parsed


class FollowerService:
    """Methods of the service Followers."""

    def __init__(self, host: ShardHost) -> None:
        self._host = host

    def read_changes(self, request: bytes, reply: DeferredReply) -> None:
        self._host.follow(parsed(ChangesRequest, request), reply)

    def read_rows(self, request: bytes) -> bytes:
        rows = self._host.followers.rows(parsed(RowsRequest, request))
        self._host.settle_read()
        return rows
