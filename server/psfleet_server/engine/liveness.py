"""Threads of a server's time: ticks of its shard, heartbeats to server 0, signals to its launcher.

The signals are bytes on a pipe, which say that the process runs: that it is not stopped, nor kept from
every processor. Nothing of the server's own is asked, for what takes it long is no reason to give it up. A
process that ends in order closes the pipe first: Python ends its threads long before the kernel has taken
the tables' memory back.
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

_EVERY = 0.25  # seconds
_SIGNAL = b"\0"
_LONGEST = 1000  # bytes of a line: a pipe takes so many whole or not at all


_REPORT = 60.0  # seconds between two lines about evictions
_LOOK = 1.0  # seconds between looks whether anybody wants to know the time
Listener = Callable[[HeartbeatReply], None]
"""Takes what the coordinator answers to a heartbeat; called in the thread of the heartbeats, must not
block."""


class LivenessPipe:
    """Send liveness signals inside the `with` block, until the reader closes the pipe.

    Args:
        pipe: File descriptor to write to; this object's from now on. 0: no launcher reads it.
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
        """Send one line to the console, and write it to this process's log."""
        _log.info(text)
        if self._pipe and self._thread.is_alive():
            line = text.replace("\n", " ").encode()[:_LONGEST] + b"\n"
            with contextlib.suppress(OSError):  # who has not looked for hours finds it in the log
                os.write(self._pipe, line)

    def _run(self) -> None:
        while self.signal() and not self._over.wait(_EVERY):
            pass

    def signal(self) -> bool:
        """Write one signal, which wakes the reader; return whether there is one."""
        if not self._pipe:
            return False
        try:
            os.write(self._pipe, _SIGNAL)
        except (
            BlockingIOError
        ):  # the launcher has not read for hours; there are enough bytes to find
            return True
        except BrokenPipeError:
            return False
        return True


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
        evictions = EvictionLog(self._host)
        every = 0.0
        while not self._over.wait(min(every or _LOOK, _LOOK)):
            with self._host.lock:
                every = self._host.shard.tick_every
            now = self._clock()
            evictions.look(now)
            if seconds := timer.due(every, now):
                with contextlib.suppress(NoRoom, NotReady):  # the time goes on to count
                    self._host.ask(Tick(seconds))
                    timer.mark_ticked(now)
            with contextlib.suppress(NoRoom):
                self._host.retry()


class EvictionLog:
    """Logs how many rows tables have evicted, at most once a minute.

    Args:
        host: Around the shard with the tables.
    """

    def __init__(self, host: ShardHost) -> None:
        self._host = host
        self._counts: dict[str, int] = {}
        self._due = -math.inf

    def look(self, now: float) -> None:
        """Log what has been evicted since the last line; `now`: in seconds of any clock."""
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
        access: With what this process proves itself over TCP.

    Attributes:
        listeners: Listeners to the replies, called in order.
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
        """Begin to heartbeat, as soon as it is known where."""
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
            self._send_heartbeats(coordinator)
            coordinator.close()

    def _send_heartbeats(self, coordinator: Peer) -> None:
        while not self._over:
            with contextlib.suppress(
                PsfleetError
            ):  # it may be starting again; the next heartbeat tries
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
