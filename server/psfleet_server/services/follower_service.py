"""gRPC methods of the service Followers, for processes that keep a copy of the weights, to serve them.

A follower first reads all rows, page by page. Then it requests, again and again, the changes since the reply
before.
"""

from psfleet.core.net.v1.follower_pb2 import ChangesRequest, RowsRequest
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.replies import DeferredReply, parsed


class FollowerService:
    """Methods of the service Followers, for processes that keep a copy of the weights."""

    def __init__(self, host: ShardHost) -> None:
        self._host = host

    def read_changes(self, request: bytes, reply: DeferredReply) -> None:
        self._host.follow(parsed(ChangesRequest, request), reply)

    def read_rows(self, request: bytes) -> bytes:
        rows = self._host.followers.rows(parsed(RowsRequest, request))
        self._host.settle_read()
        return rows
