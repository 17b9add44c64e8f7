"""The snapshot that a job takes when it must end soon, as before the time limit of a batch queue."""

from typing import Any

from psfleet.platform.service_thread import ServiceThread
from psfleet.settings.environment import Environment

__all__ = ["FinalSnapshot"]

_PATIENCE = 600.0  # seconds; whoever wants the end of the job usually kills it earlier
_ATTEMPTS = 5  # one may fail, as when a worker comes, goes or takes long for a step


class FinalSnapshot:
    """Asks server 0 for a snapshot, in a thread of its own.

    Args:
        endpoint: Of server 0.
        environment: With what the launcher proves itself to the server.

    Attributes:
        outcome: What came of it, for people; empty: it is not complete yet.
    """

    def __init__(self, endpoint: str, environment: Environment) -> None:
        self.outcome = ""
        self._endpoint = endpoint
        self._environment = environment
        ServiceThread(self._take, "final snapshot").start()

    def _take(self) -> None:
        import grpc  # here: few jobs need it

        from psfleet.wire.access import Access
        from psfleet.wire.channel import open_channel
        from psfleet.wire.error_status import error_of
        from psfleet.wire.v1.snapshot_pb2 import TakeReply, TakeRequest

        access = Access.of(self._environment)
        request = TakeRequest(kind="full").SerializeToString()
        channel: Any
        with open_channel(self._endpoint, access) as channel:
            take = channel.unary_unary("/psfleet.v1.SnapshotLead/Take")
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    reply = take(request, timeout=_PATIENCE, metadata=access.metadata)
                except grpc.RpcError as error:
                    if attempt == _ATTEMPTS:
                        self.outcome = f"no snapshot was taken: {error_of(error, 'server 0')}"
                else:
                    path = TakeReply.FromString(reply).path
                    self.outcome = f"the snapshot is complete; continue with --resume {path}"
                    return
