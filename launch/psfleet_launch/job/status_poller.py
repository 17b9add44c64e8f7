"""Asks the servers of a running job for their Status, again and again."""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from psfleet.core.base.settings.environment import Environment
from psfleet_launch.job.spawn import children_without_grpc

if TYPE_CHECKING:
    from psfleet.core.net.v1.shard_pb2 import StatusReply

P = TypeVar("P")


class StatusPoller(Generic[P]):
    """Asks the servers in a thread of its own, so that a slow reply delays nothing else.

    Processes may be forked meanwhile, to start again what has died; they must not use gRPC before `exec`.

    Attributes:
        history: Pictures so far, oldest first; a server that does not answer adds nothing.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        picture: "Callable[[Sequence[StatusReply], float], P]",
        every: float = 1.0,
        environment: Environment | None = None,
    ) -> None:
        self.history: list[P] = []
        self._picture = picture
        self._environment = environment or Environment()
        self._endpoints = list(endpoints)
        self._every = every
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="psfleet-progress", daemon=True)

    def start(self) -> None:
        """Begin to ask. Call from the main thread, before gRPC is imported."""
        children_without_grpc()
        import grpc  # noqa: F401  # here, for other threads will import it too; not for a job without a display

        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        import grpc

        from psfleet.core.net.connections.access import Access
        from psfleet.core.net.connections.channel import open_channel
        from psfleet.core.net.v1.shard_pb2 import StatusReply, StatusRequest

        with contextlib.ExitStack() as channels:
            access = Access.of(self._environment)
            connections = [
                channels.enter_context(open_channel(one, access)) for one in self._endpoints
            ]
            methods = [
                channel.unary_unary(
                    "/psfleet.v1.Shard/Status",
                    request_serializer=StatusRequest.SerializeToString,
                    response_deserializer=StatusReply.FromString,
                )
                for channel in connections
            ]
            timeout = min(self._every, 1.0)  # who stops this waits for it
            while not self._stopped.wait(self._every):
                with contextlib.suppress(grpc.RpcError):
                    replies = [
                        ask(StatusRequest(), timeout=timeout, metadata=access.metadata)
                        for ask in methods
                    ]
                    self.history.append(self._picture(replies, time.monotonic()))
