"""Liveness signals of a worker: a thread of its own, so that they never wait for training."""

import contextlib
import threading
from collections.abc import Callable

from psfleet.errors import Fenced, PsfleetError
from psfleet.platform.threads import ServiceThread
from psfleet.wire.v1.membership_pb2 import HeartbeatReply, HeartbeatRequest

Listener = Callable[[HeartbeatReply], None]
"""Takes what the coordinator answers to a heartbeat; called in the thread of the heartbeats, must not
block."""


class WorkerHeartbeat:
    """Reports to the coordinator at intervals that this worker is alive.

    A coordinator that does not answer is asked again at the next heartbeat: whether the fleet can still be
    reached is for the calls of the training to find out.

    Args:
        send: Makes one attempt: the request's bytes and the seconds it may take.
        every: Seconds between two heartbeats.

    Attributes:
        fenced: Reason for the end of this incarnation, once the coordinator has sent it; heartbeats stop.
    """

    def __init__(
        self,
        send: Callable[[bytes, float], bytes],
        request: Callable[[], HeartbeatRequest],
        every: float,
    ) -> None:
        self.listeners: list[Listener] = []
        self.fenced: Fenced | None = None
        self._send = send
        self._request = request
        self._every = every
        self._over = threading.Event()
        self._thread = ServiceThread(self._run, "heartbeats")

    def start(self) -> None:
        """Begin to heartbeat."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the connection must be closed before, or a heartbeat under way is waited for."""
        self._over.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while self.fenced is None and not self._over.wait(self._every):
            with contextlib.suppress(PsfleetError):
                self._heartbeat()

    def _heartbeat(self) -> None:
        try:
            response = self._send(self._request().SerializeToString(), self._every)
        except Fenced as error:
            self.fenced = error
            return
        reply = HeartbeatReply.FromString(response)
        for listener in self.listeners:
            listener(reply)
