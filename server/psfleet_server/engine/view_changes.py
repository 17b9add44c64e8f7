"""The hands of the coordinator: a thread that brings every view to all servers.

What is due is sent until it is answered; a server that does not answer holds up the change, for
nothing may close without it. It does not hold up the calls to others. What the coordinator decides is
durable before it is sent.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain

from psfleet.core.base import faults
from psfleet.core.base.errors import PsfleetError
from psfleet.core.base.logs import log_of
from psfleet.core.base.threads import ServiceThread
from psfleet.core.engine.shard.membership_view import PrepareView
from psfleet.core.net.connections.access import Access
from psfleet.core.net.message_codec import decode, encode
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.coordinator.coordinator_messages import Outcome, PendingMessage
from psfleet_server.coordinator.data_dispatch import TornStep, torn_words
from psfleet_server.engine.server_messages import (
    FreezeReply,
    FreezeRequest,
    InstallReply,
    InstallRequest,
)
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.endpoints import Peer

_log = log_of(__name__)

_Step = Callable[[Coordinator], Sequence[Outcome]]
"""How the coordinator takes a reply."""

_MOST_CALLS = 32  # at a time
_INSTALL_TIMEOUT = 5.0  # seconds for one call
_PAUSE, _LONGEST = 0.02, 0.5  # between tries when a server does not answer
_SILENT = 10.0  # seconds until the log names a server that does not answer


class ViewInstaller:
    """Brings views to the servers.

    Args:
        host: Shard host of server 0, with the coordinator.
        access: With what this process proves itself over TCP.
        every: Seconds between looks for silent workers.
    """

    def __init__(self, host: ShardHost, access: Access, every: float) -> None:
        self._host = host
        self._access = access
        self._every = every
        self._changed = threading.Condition()
        self._endpoints: tuple[str, ...] = ()
        self._peers: list[Peer] = []
        self._over = False
        self._poked = False
        self._silent: dict[
            int, float
        ] = {}  # servers that do not answer, and since when; inf: it is said
        self._calls = ThreadPoolExecutor(_MOST_CALLS, "view-calls")
        self._thread = ServiceThread(self._run, "views")

    def start(self) -> None:
        """Begin, as soon as it is known where the servers are."""
        self._thread.start()

    def aim(self, endpoints: Sequence[str]) -> None:
        """The servers are at these endpoints, of which all have a port."""
        with self._changed:
            if not self._endpoints and not any(e.endswith(":0") for e in endpoints):
                self._endpoints = tuple(endpoints)
                self._changed.notify()

    @property
    def endpoints(self) -> Sequence[str]:
        """Where the servers are; empty: it is not known yet."""
        return self._endpoints

    def move_to(self, endpoints: Sequence[str]) -> None:
        """The fleet has these servers now; nothing is due to any until that is settled."""
        before, self._peers = self._peers, self._peers_at(endpoints)
        self._endpoints = tuple(endpoints)
        for peer in before:
            peer.close()

    def poke(self) -> None:
        """There may be something to do."""
        with self._changed:
            self._poked = True
            self._changed.notify()

    def finish(self, seconds: float) -> None:
        """Return when every server has the last view, or after `seconds`: it may have ended already."""
        coordinator = self._host.coordinator
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with self._host.lock:
                if coordinator is None or coordinator.is_installed:
                    return
            time.sleep(_PAUSE)

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._over = True
            self._changed.notify()
        for peer in self._peers:
            peer.close()
        if self._thread.ident is not None:
            self._thread.join()
        self._calls.shutdown()

    def _run(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._endpoints or self._over)
            self._peers = self._peers_at(self._endpoints)
        pause = _PAUSE
        while not self._over:
            due = self._look()
            if not due:
                self._wait(self._every)
            elif self._send_all(due):
                pause = _PAUSE
            else:
                self._wait(pause)
                pause = min(2 * pause, _LONGEST)
        for peer in self._peers:
            peer.close()

    def _peers_at(self, endpoints: Sequence[str]) -> list[Peer]:
        return [
            Peer.server(index, endpoint, self._access) for index, endpoint in enumerate(endpoints)
        ]

    def _look(self) -> list[PendingMessage]:
        with self._changed:
            self._poked = False
        coordinator = self._host.coordinator
        assert coordinator is not None
        with self._host.lock:
            coordinator.look(time.monotonic())
            return coordinator.due()

    def _wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._poked or self._over, seconds)

    def _send_all(self, due: Sequence[PendingMessage]) -> bool:
        """Make every call once, all at a time; whether one of them was answered."""
        answered = False
        others = [each for each in due if each.server]
        own = [each for each in due if not each.server]  # last, as the coordinator wants
        for each, reply in chain(self._sent(others), self._sent(own)):
            before = self._torn()
            try:
                self._host.meet(reply.result())
            except PsfleetError as error:  # no answer, or no room to keep what follows from it
                self._say_silent(each.server, error)
                continue  # it is due again
            if self._silent.pop(each.server, 0.0) == math.inf:
                _log.info(f"psfleet: {self._peers[each.server].name} answers server 0 again")
            for line in torn_words(self._torn()[len(before) :]):
                _log.warning(line)
            answered = True
        return answered

    def _sent(
        self, due: Sequence[PendingMessage]
    ) -> Iterator[tuple[PendingMessage, "Future[_Step]"]]:
        yield from [(each, self._calls.submit(self._send, each)) for each in due]

    def _say_silent(self, server: int, error: PsfleetError) -> None:
        """Name the server in the log, once, when it has not answered for a while."""
        now = time.monotonic()
        if now - self._silent.setdefault(server, now) >= _SILENT:
            self._silent[server] = math.inf
            name = self._peers[server].name
            _log.warning(
                f"psfleet: {name} does not answer server 0, and workers wait for it: {error}"
            )

    def _torn(self) -> list[TornStep]:
        assert self._host.coordinator is not None
        return list(self._host.coordinator.dispatch.torn)

    def _send(self, due: PendingMessage) -> _Step:
        """Make the call; how the coordinator takes the answer."""
        if isinstance(due.message, PrepareView):
            return self._freeze(due, due.message)
        view = due.message.view
        faults.reach("install")
        request = encode(InstallRequest(due.boot, due.message))
        content = self._peers[due.server].call("Membership/Install", request, _INSTALL_TIMEOUT)
        reply: InstallReply = decode(InstallReply, content)
        if not reply.installed:
            return self._rebooted(due.server, reply.boot)
        return lambda c: c.installed(due.server, reply.boot, view)

    def _freeze(self, due: PendingMessage, freeze: PrepareView) -> _Step:
        faults.reach("freeze")
        request = encode(FreezeRequest(due.boot, freeze, self._endpoints[0]))
        content = self._peers[due.server].call("Membership/Freeze", request, _INSTALL_TIMEOUT)
        reply: FreezeReply = decode(FreezeReply, content)
        report = reply.report
        if report is None:
            return self._rebooted(due.server, reply.boot)
        return lambda c: c.reported(due.server, reply.boot, freeze.view, report)

    def _rebooted(self, server: int, boot: int) -> _Step:
        def step(coordinator: Coordinator) -> Sequence[Outcome]:
            coordinator.rebooted(server, boot)
            return []

        return step
