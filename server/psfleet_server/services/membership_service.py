"""The methods of the service Membership: views of the fleet."""

from psfleet.shard.membership_view import PrepareView
from psfleet.wire.membership_messages import read_install, write_report
from psfleet.wire.v1 import membership_pb2
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.services.protobuf_messages import encoded, parsed

__all__ = ["MembershipService"]


class MembershipService:
    """Methods of the service Membership."""

    def __init__(self, host: ShardHost) -> None:
        self._host = host

    def freeze(self, request: bytes) -> bytes:
        asked = parsed(membership_pb2.FreezeRequest, request)
        reply = membership_pb2.FreezeReply(boot=self._host.boot)
        if asked.boot == self._host.boot:
            self._host.aim(asked.coordinator)
            report = self._host.freeze(PrepareView(asked.view, dict(asked.ended)))
            reply.standing.CopyFrom(write_report(report))
        return encoded(reply)

    def install(self, request: bytes) -> bytes:
        asked = parsed(membership_pb2.InstallRequest, request)
        meant = asked.boot == self._host.boot
        if meant:
            self._host.install(read_install(asked))
        return encoded(membership_pb2.InstallReply(boot=self._host.boot, installed=meant))
