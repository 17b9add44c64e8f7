"""Threads of a server that act at intervals: liveness signals, ticks of the shard, heartbeats to server 0.

- LivenessPipe writes a byte to the launcher's pipe four times a second. The byte only proves that the process
  runs and gets processor time. The thread takes no lock of the server, because a long operation under a lock
  is no reason to kill a server. A process that shuts down closes the pipe first, because after Python's
  threads have ended the kernel may need long to free the tables' memory.
- Ticker sends the shard the elapsed time, for expiry of rows and for modes that need it, and logs evictions.
- ServerHeartbeat reports to the coordinator that this server is alive.
"""

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable
from typing import Self

from psfleet.core.base.errors import NoRoom, NotReady, PsfleetError
from psfleet.core.base.logs import log_of
from psfleet.core.base.threads import ServiceThread
from psfleet.core.engine.shard.events import Tick
from psfleet.core.engine.shard.shard_state import TickTimer
from psfleet.core.engine.tables.sparse import SparseTable
from psfleet.core.net.connections.access import Access
from psfleet.core.net.v1.membership_pb2 import HeartbeatReply, HeartbeatRequest
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.endpoints import Peer

_log = log_of(__name__)

_EVERY = 0.25  # seconds between two liveness signals
_SIGNAL = b"\0"
_LONGEST = (
    1000  # most bytes of a line: a pipe takes a write of up to 4096 bytes whole or not at all
)


_REPORT = 60.0  # seconds between two lines about evictions
_LOOK = 1.0  # seconds between looks whether the shard wants ticks
Listener = Callable[[HeartbeatReply], None]
"""Handles the coordinator's reply to a heartbeat. Called in the heartbeat thread, so it must not block."""


class LivenessPipe:
    """Sends liveness signals inside its `with` block, until the reader closes the pipe.

    Args:
        pipe: File descriptor to write to, which this object closes. 0 means that no launcher reads signals.
    """

    def __init__(self, pipe: int = 0) -> None:
        self._pipe = pipe
        self._over = threading.Event()
        self._thread = ServiceThread(self._run, "liveness")

    def __enter__(self) -> Self:
        if not self._pipe:
            return self
        os.set_inheritable(self._pipe, False)
        os.set_blocking(self._pipe, False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._pipe:
            self._thread.join()
            os.close(self._pipe)

    def tell(self, text: str) -> None:
        """Show one line on the launcher's console, and write it to this process's log."""
        _log.info(text)
        if self._pipe and self._thread.is_alive():
            line = text.replace("\n", " ").encode()[:_LONGEST] + b"\n"
            # The pipe is full if the launcher has not read for hours. The line is then only in the log.
            with contextlib.suppress(OSError):
                os.write(self._pipe, line)

    def _run(self) -> None:
        while self.signal() and not self._over.wait(_EVERY):
            pass

    def signal(self) -> bool:
        """Write one signal, which wakes the launcher. Returns False if no launcher reads the pipe."""
        if not self._pipe:
            return False
        try:
            os.write(self._pipe, _SIGNAL)
        # The pipe is full: the launcher has not read for hours, and will find enough signals when it does.
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        return True


class Ticker:
    """Sends a shard the elapsed time, as often as the shard's tables or the consistency mode need that.

    Args:
        clock: Returns a monotonic time in seconds. Time in which no server process runs is not included.
    """

    def __init__(self, host: ShardHost, clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._clock = clock
        self._over = threading.Event()
        self._thread = ServiceThread(self._run, "ticks")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for it."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        timer = TickTimer(self._clock())
        evictions = EvictionLog(self._host)
        every = 0.0
        while not self._over.wait(min(every or _LOOK, _LOOK)):
            with self._host.lock:
                every = self._host.shard.tick_every
            now = self._clock()
            evictions.look(now)
            if seconds := timer.due(every, now):
                # The time of a refused tick is not lost: the next tick includes it.
                with contextlib.suppress(NoRoom, NotReady):
                    self._host.ask(Tick(seconds))
                    timer.mark_ticked(now)
            with contextlib.suppress(NoRoom):
                self._host.retry()


class EvictionLog:
    """Logs how many rows tables have evicted, at most once a minute."""

    def __init__(self, host: ShardHost) -> None:
        self._host = host
        self._counts: dict[str, int] = {}
        self._due = -math.inf

    def look(self, now: float) -> None:
        """Log the rows evicted since the last line, if there are any.

        Args:
            now: Present time in seconds, by any monotonic clock.
        """
        if now < self._due:
            return
        with self._host.lock:
            tables = [*self._host.shard.tables.values()]
        counts = {t.spec.name: t.dropped for t in tables if isinstance(t, SparseTable)}
        for name, count in counts.items():
            if (rows := count - self._counts.get(name, 0)) > 0:
                self._due = now + _REPORT
                _log.info(f"table {name!r} has evicted {rows:,} rows", extra={"table": name})
        self._counts = counts


class ServerHeartbeat:
    """Reports to the coordinator at intervals that this server is alive.

    Args:
        request: Returns the current heartbeat message.
        every: Seconds between two heartbeats.
        access: Credentials for the call over TCP.

    Attributes:
        listeners: Functions that are called with each reply.
    """

    def __init__(
        self, request: Callable[[], HeartbeatRequest], every: float, access: Access
    ) -> None:
        self.listeners: list[Listener] = []
        self._request = request
        self._every = every
        self._access = access
        self._changed = threading.Condition()
        self._endpoint = ""
        self._over = False
        self._thread = ServiceThread(self._run, "heartbeats")

    def start(self) -> None:
        """Start the thread. Heartbeats begin once `aim` has set the coordinator's endpoint."""
        self._thread.start()

    def aim(self, endpoint: str) -> None:
        """Set the endpoint of the coordinator."""
        with self._changed:
            self._endpoint = endpoint
            self._changed.notify()

    def stop(self) -> None:
        """Stop the thread and wait for it."""
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
            self._send_heartbeats(coordinator)
            coordinator.close()

    def _send_heartbeats(self, coordinator: Peer) -> None:
        while not self._over:
            # Server 0 may be restarting. The next heartbeat is another attempt.
            with contextlib.suppress(PsfleetError):
                self._heartbeat(coordinator)
            with self._changed:
                self._changed.wait_for(lambda: self._over, self._every)

    def _heartbeat(self, coordinator: Peer) -> None:
        request = self._request().SerializeToString()
        reply = HeartbeatReply.FromString(
            coordinator.call("Coordinator/Heartbeat", request, self._every)
        )
        for listener in self.listeners:
            listener(reply)
