"""Lost replies and repeated requests between a worker and its servers, chosen by a seed.

`psfleet-launch --chaos` injects them into workers, where injection.py also delays calls. Tests of
exactly-once pushes use this class without a launcher.
"""

import contextlib
import random
import threading

from psfleet.core.base.crash_points import Send
from psfleet.core.base.errors import PsfleetError, ServerUnavailable


class MessageFaults:
    """Loses replies and repeats requests. Pass it to a ClusterRuntime as `inject_faults`.

    When a reply is lost, the server has done the work and the worker does not know it. A repeated request
    is sent right after the original. For pushes, pulls and exchanges it is the previous request, which
    simulates a network that delivers a message late.

    Args:
        seed: Seed of the faults. With the same seed, the same calls to a server have the same faults.
        drop: Share of replies that are lost (0 to 1).
        duplicate: Share of calls that are followed by a repeated request (0 to 1).

    Attributes:
        dropped: Number of lost replies so far.
        duplicated: Number of repeated requests so far.
    """

    def __init__(self, seed: int, drop: float = 0.0, duplicate: float = 0.0) -> None:
        self.seed = seed
        self.drop = drop
        self.duplicate = duplicate
        self.dropped = 0
        self.duplicated = 0
        self._lock = threading.Lock()

    def __call__(self, server: int, send: Send) -> Send:
        """Return a function that calls one server like `send`, but injects faults."""
        dice = random.Random(f"{self.seed}/{server}")
        before: dict[str, bytes] = {}

        def faulty_send(method: str, request: bytes, seconds: float) -> bytes:
            reply = send(method, request, seconds)
            if dice.random() < self.duplicate:
                self._count(duplicated=1)
                with contextlib.suppress(
                    PsfleetError
                ):  # the reply to a repeated request is not used
                    send(method, before.get(method, request), seconds)
            if method in ("Shard/Push", "Shard/Pull", "Shard/Exchange"):
                before[method] = request
            if dice.random() < self.drop:
                self._count(dropped=1)
                raise ServerUnavailable(f"the answer of server {server} to {method} was dropped")
            return reply

        return faulty_send

    def _count(self, dropped: int = 0, duplicated: int = 0) -> None:
        with self._lock:
            self.dropped += dropped
            self.duplicated += duplicated
