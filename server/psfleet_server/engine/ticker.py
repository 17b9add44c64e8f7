"""Time for a shard: it reads no clock, so a thread tells it how much has passed.

The same thread asks it once a second to do what had to wait for room on the disk of its log.
"""

import contextlib
import threading
import time
from collections.abc import Callable

from psfleet.errors import NoRoom
from psfleet.platform.service_thread import ServiceThread
from psfleet.shard.events import Tick
from psfleet.shard.tick_timer import TickTimer
from psfleet_server.engine.shard_host import ShardHost

__all__ = ["Ticker"]

_LOOK = 1.0  # seconds between looks whether anybody wants to know the time


class Ticker:
    """Tells a host's shard the time as often as its tables or its mode want it; while none does, never.

    Args:
        host: Around the shard.
        clock: Seconds that only go up. Time in which no server runs does not count.
    """

    def __init__(self, host: ShardHost, clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._clock = clock
        self._over = threading.Event()
        self._thread = ServiceThread(self._run, "ticks")

    def start(self) -> None:
        """Begin to look at the clock."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        timer = TickTimer(self._clock())
        every = 0.0
        while not self._over.wait(min(every or _LOOK, _LOOK)):
            with self._host.lock:
                every = self._host.shard.tick_every
            now = self._clock()
            if passed := timer.due(every, now):
                with contextlib.suppress(NoRoom):  # the time goes on to count
                    self._host.ask(Tick(passed))
                    timer.told(now)
            with contextlib.suppress(NoRoom):
                self._host.retry()
