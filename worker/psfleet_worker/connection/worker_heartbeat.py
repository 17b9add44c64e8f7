"""Signs of life of a worker: a thread of its own, so that they never wait for training."""

import contextlib
import threading
from collections.abc import Callable

from psfleet.errors import Fenced, PsfleetError
from psfleet.platform.service_thread import ServiceThread
from psfleet.wire.v1.membership_pb2 import BeatReply, BeatRequest

__all__ = ["Listener", "WorkerHeartbeat"]

Listener = Callable[[BeatReply], None]
"""Takes what the coordinator answers to a beat; called in the thread of the beats, must not block."""


class WorkerHeartbeat:
    """Tells the coordinator again and again that this worker lives.

    A coordinator that does not answer is asked again at the next beat: whether the fleet can still be
    reached is for the calls of the training to find out.

    Args:
        send: Makes one attempt: the request's bytes and the seconds it may take.
        request: What to say now.
        every: Seconds between two beats.

    Attributes:
        listeners: Who hears the answers, in order.
        fenced: Why this life is over, once the coordinator has said so; no beat follows.
    """

    def __init__(
        self,
        send: Callable[[bytes, float], bytes],
        request: Callable[[], BeatRequest],
        every: float,
    ) -> None:
        self.listeners: list[Listener] = []
        self.fenced: Fenced | None = None
        self._send = send
        self._request = request
        self._every = every
        self._over = threading.Event()
        self._thread = ServiceThread(self._run, "beats")

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; the connection must be closed before, or a beat under way is waited for."""
        self._over.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while self.fenced is None and not self._over.wait(self._every):
            with contextlib.suppress(PsfleetError):
                self._beat()

    def _beat(self) -> None:
        try:
            answer = self._send(self._request().SerializeToString(), self._every)
        except Fenced as error:
            self.fenced = error
            return
        reply = BeatReply.FromString(answer)
        for listener in self.listeners:
            listener(reply)
