"""Signs of life of a server that is not the first: a thread tells server 0 that it lives."""

import contextlib
import threading
from collections.abc import Callable

from psfleet.errors import PsfleetError
from psfleet.platform.service_thread import ServiceThread
from psfleet.wire.access import Access
from psfleet.wire.v1.membership_pb2 import BeatReply, BeatRequest
from psfleet_server.rpc.peer import Peer

__all__ = ["Listener", "ServerHeartbeat"]

Listener = Callable[[BeatReply], None]
"""Takes what the coordinator answers to a beat; called in the thread of the beats, must not block."""


class ServerHeartbeat:
    """Tells the coordinator again and again that this server lives.

    Args:
        request: What to say now.
        every: Seconds between two beats.
        access: With what this process proves itself over TCP.

    Attributes:
        listeners: Who hears the answers, in order.
    """

    def __init__(self, request: Callable[[], BeatRequest], every: float, access: Access) -> None:
        self.listeners: list[Listener] = []
        self._request = request
        self._every = every
        self._access = access
        self._changed = threading.Condition()
        self._endpoint = ""
        self._over = False
        self._thread = ServiceThread(self._run, "beats")

    def start(self) -> None:
        """Begin to beat, as soon as it is known where."""
        self._thread.start()

    def aim(self, endpoint: str) -> None:
        """The coordinator is at this endpoint."""
        with self._changed:
            self._endpoint = endpoint
            self._changed.notify()

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._over = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._endpoint or self._over)
            endpoint = self._endpoint
        if not self._over:
            coordinator = Peer("server 0", endpoint, self._access)
            self._beat_at(coordinator)
            coordinator.close()

    def _beat_at(self, coordinator: Peer) -> None:
        while not self._over:
            with contextlib.suppress(PsfleetError):  # it may be starting again; the next beat tries
                self._beat(coordinator)
            with self._changed:
                self._changed.wait_for(lambda: self._over, self._every)

    def _beat(self, coordinator: Peer) -> None:
        request = self._request().SerializeToString()
        reply = BeatReply.FromString(coordinator.call("Coordinator/Beat", request, self._every))
        for listener in self.listeners:
            listener(reply)
