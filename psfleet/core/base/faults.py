"""Faults by name and seed: crash points, and errors on the way between a worker and its servers."""

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable, Mapping

from psfleet.core.base.errors import PsfleetError, ServerUnavailable
from psfleet.core.base.settings.declaration import from_variable
from psfleet.core.base.settings.declared_settings import FaultSettings

Send = Callable[[str, bytes, float], bytes]


class MessageFaults:
    """Loses answers and repeats requests; give it to a ClusterRuntime as `meddle`.

    A lost answer is the hard case: the server has done the work and the worker does not know. A
    repeated request is the same bytes once more, or, for tensors, those of the one before,
    as a slow network would deliver them.

    Args:
        seed: The same seed gives the same faults for the same calls to a server.
        drop: Share of answers that are lost.
        duplicate: Share of calls that come with a repeat.

    Attributes:
        dropped, duplicated: Numbers so far.
    """

    def __init__(self, seed: int, drop: float = 0.0, duplicate: float = 0.0) -> None:
        self.seed = seed
        self.drop = drop
        self.duplicate = duplicate
        self.dropped = 0
        self.duplicated = 0
        self._lock = threading.Lock()

    def __call__(self, server: int, send: Send) -> Send:
        """`send` of one server, with faults."""
        dice = random.Random(f"{self.seed}/{server}")
        before: dict[str, bytes] = {}

        def meddled(method: str, request: bytes, seconds: float) -> bytes:
            reply = send(method, request, seconds)
            if dice.random() < self.duplicate:
                self._count(duplicated=1)
                with contextlib.suppress(PsfleetError):  # the answer of a repeat is not used
                    send(method, before.get(method, request), seconds)
            if method in ("Shard/Push", "Shard/Pull", "Shard/Exchange"):
                before[method] = request
            if dice.random() < self.drop:
                self._count(dropped=1)
                raise ServerUnavailable(f"the answer of server {server} to {method} was dropped")
            return reply

        return meddled

    def _count(self, dropped: int = 0, duplicated: int = 0) -> None:
        with self._lock:
            self.dropped += dropped
            self.duplicated += duplicated


class ThreadFault(Exception):
    """An unexpected error in the thread that PSFLEET_BROKEN_THREAD names."""

    @classmethod
    def check(cls, name: str, variables: Mapping[str, str] = os.environ) -> None:
        """Raise it if this thread is to have one.

        Raises:
            ThreadFault: A test wants that.
        """
        if from_variable(FaultSettings, "broken_thread", variables) == name:
            raise cls(f"a test wants thread {name!r} to fail")


class SimulatedDeath(PsfleetError):
    """The worker that makes this call is dead; only its thread does not know yet."""


class DeathFault:
    """Ends one worker at its n-th call, as a kill would; give it to a ClusterRuntime as `meddle`.

    Its calls to other servers may be under way. Code that catches Died lets the runtime go with
    `abandon`, and may begin another incarnation in a new runtime.

    Args:
        calls: At which call to any server, from 1.
        sent: That call reaches the server, and the worker dies before it hears the answer.

    Attributes:
        happened: The worker has died.
    """

    def __init__(self, calls: int, sent: bool) -> None:
        self.calls = calls
        self.sent = sent
        self.happened = False
        self._lock = threading.Lock()

    def __call__(self, server: int, send: Send) -> Send:
        """`send` of one server, until the worker is dead."""

        def meddled(method: str, request: bytes, seconds: float) -> bytes:
            now = self._is_now()
            if now and self.sent:
                with contextlib.suppress(PsfleetError):
                    send(method, request, seconds)
            if now or self.happened:
                self.happened = True
                raise SimulatedDeath(
                    f"the worker has died before {method} to server {server} was answered"
                )
            return send(method, request, seconds)

        return meddled

    def _is_now(self) -> bool:
        with self._lock:
            self.calls -= 1
            return self.calls == 0


class CrashFaults:
    """Kills or stops this process, as `kill` would, when it reaches a point for the n-th time.

    Args:
        point: append, tear, appended, applied or settled: before a record of the log is written, when
            it is written but for its last byte, when it is whole, when it has taken effect, and before
            the answer.
            Of a snapshot: cut, page, written (of a server's file), turned (the log goes on in a new
            file), shortened (files of the log are being removed); of whoever leads it began (its
            folder is made), unnamed and named (before and after it has its place), away (between the
            two steps of that, where it takes two), complete (before anybody is told);
            replay: before a record is taken again.
            Of a change of the members (server 0): freeze, install: before a server is told.
                Of a move of rows: opened, sent, filled, prepared, adopted: a server, before it says that it
                is or has; promised, decided: server 0, before and after the decision.
        With a standby: feed, fed (a primary, before and after a record is on its way), waiting,
            followed (before and after the standby's word); receive, took (the standby, around taking it).
        count: At which time, from 1.
        signal: SIGKILL, or SIGSTOP for a process that hangs there.
    """

    def __init__(self, point: str = "", count: int = 0, signal: int = signal.SIGKILL) -> None:
        self.point = point
        self.count = count
        self.signal = signal

    @classmethod
    def wanted(cls, variables: Mapping[str, str] = os.environ) -> "CrashFaults":
        """Parse PSFLEET_CRASH: "point:count" or "point:count:stop"; without it no point is one."""
        settings = from_variable(FaultSettings, "crash", variables)
        if not settings:
            return cls()
        point, count, *how = settings.split(":")
        return cls(point, int(count), signal.SIGSTOP if how == ["stop"] else signal.SIGKILL)

    def reach(self, point: str, before: Callable[[], object] | None = None) -> None:
        """The process is at the point; `before` is what it does last."""
        if point != self.point:
            return
        self.count -= 1
        if self.count == 0:
            if before is not None:
                before()
            os.kill(os.getpid(), self.signal)


NO_CRASH = CrashFaults()
"""No point is one."""
