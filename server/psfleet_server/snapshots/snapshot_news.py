"""Notifies workers of a new snapshot at once, by replying to calls that wait for it.

Replies to heartbeats announce the snapshot too, but a worker may send its next heartbeat only a second later.
That would delay training: each worker marks its last push in the snapshot, and pushes after the first
worker's mark wait for the last worker's mark.
"""

import threading
from collections.abc import Iterable

from psfleet.core.net.v1 import snapshot_pb2
from psfleet_server.rpc.replies import DeferredReply


class SnapshotNews:
    """Calls of workers that wait for the next snapshot, one per worker. Thread-safe.

    These calls do not count towards the host's limit of waiting calls: they are no load, and need no reply at
    their deadline.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replies: dict[int, DeferredReply] = {}
        self._number = 0  # of the snapshot that is being announced, or 0
        self._stopped = False

    def listen(self, worker: int, known: int, reply: DeferredReply) -> None:
        """Complete `reply` once there is a snapshot with a higher number than `known`.

        An earlier call of the same worker gets its reply now, because the worker no longer waits for it.
        """
        with self._lock:
            waits = self._number <= known and not self._stopped
            earlier = self._replies.pop(worker, None)
            if waits:
                self._replies[worker] = reply
        _tell(filter(None, [earlier, None if waits else reply]), self._number)

    def announce(self, number: int) -> None:
        """Reply to all calls with the number of this snapshot.

        0 means that later calls have to wait again.
        """
        with self._lock:
            self._number = number
            waiting = [*self._replies.values()] if number else []
            if number:
                self._replies.clear()
        _tell(waiting, number)

    def stop(self) -> None:
        """Reply to all waiting calls, and from now on to every call at once."""
        with self._lock:
            self._stopped = True
            waiting = [*self._replies.values()]
            self._replies.clear()
        _tell(waiting, 0)


def _tell(replies: Iterable[DeferredReply], number: int) -> None:
    message = snapshot_pb2.ListenReply(number=number).SerializeToString()
    for reply in replies:
        reply.complete(message)
