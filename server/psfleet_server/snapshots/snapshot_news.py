"""Tells workers of a snapshot at once, by answers to calls that wait for it.

Heartbeats say it too, but later."""

import threading
from collections.abc import Iterable

from psfleet.core.net.v1 import snapshot_pb2
from psfleet_server.rpc.replies import DeferredReply


class SnapshotNews:
    """Calls of workers that wait to hear of a snapshot, one for each worker. Thread-safe.

    They are not parked with the host: they are no load, and need no answer at their deadline.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replies: dict[int, DeferredReply] = {}
        self._number = 0  # of the snapshot that workers are told of now; 0: none
        self._stopped = False

    def listen(self, worker: int, known: int, reply: DeferredReply) -> None:
        """Answer when there is a snapshot after the one of which the worker has heard."""
        with self._lock:
            waits = self._number <= known and not self._stopped
            earlier = self._replies.pop(worker, None)
            if waits:
                self._replies[worker] = reply
        _tell(filter(None, [earlier, None if waits else reply]), self._number)

    def announce(self, number: int) -> None:
        """Tell all workers of this snapshot; 0: tell those that ask later of none."""
        with self._lock:
            self._number = number
            waiting = [*self._replies.values()] if number else []
            if number:
                self._replies.clear()
        _tell(waiting, number)

    def stop(self) -> None:
        """Answer all calls, those that come later too."""
        with self._lock:
            self._stopped = True
            waiting = [*self._replies.values()]
            self._replies.clear()
        _tell(waiting, 0)


def _tell(replies: Iterable[DeferredReply], number: int) -> None:
    message = snapshot_pb2.ListenReply(number=number).SerializeToString()
    for reply in replies:
        reply.complete(message)
