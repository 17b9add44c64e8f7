"""Sends every change of members that the coordinator decides to all servers: a thread of server 0.

The coordinator (`psfleet_server.coordinator`) is a pure state machine, and this module makes its calls. The
thread gets the messages to send from the coordinator, calls the servers, and passes their replies back:

    due()  ->  Freeze on every server   ->  reported()   the coordinator decides the view and journals it
           ->  Install on every server  ->  installed()

A *view* is a numbered membership. A call is repeated until the server replies. A server that does not reply
delays the whole change, because no round may close without it, but it does not delay the calls to other
servers. After ten seconds the log names that server. The coordinator's decision is durable before an Install
is sent.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain

from psfleet.core.base import crash_points
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
"""Passes a server's reply to the coordinator, and returns the coordinator's outcomes."""

_MOST_CALLS = 32  # calls at a time
_INSTALL_TIMEOUT = 5.0  # seconds for one call
_PAUSE, _LONGEST = 0.02, 0.5  # seconds between attempts while no server replies: first, and at most
_SILENT = 10.0  # seconds until the log names a server that does not reply


class ViewInstaller:
    """Makes the coordinator's calls to the servers, for changes of members, in a thread.

    Args:
        host: Host of server 0's shard, with the coordinator.
        access: Credentials for calls over TCP.
        every: Seconds between checks for silent workers, which happen even if no call is due.
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
        # For each server that does not reply, the time since then, or infinity once the log has named the
        # server.
        self._silent: dict[int, float] = {}
        self._calls = ThreadPoolExecutor(_MOST_CALLS, "view-calls")
        self._thread = ServiceThread(self._run, "views")

    def start(self) -> None:
        """Start the thread. It begins to call once `aim` has set the servers' endpoints."""
        self._thread.start()

    def aim(self, endpoints: Sequence[str]) -> None:
        """Set the endpoints of the servers, once. Ignored while an endpoint has no port yet."""
        with self._changed:
            if not self._endpoints and not any(e.endswith(":0") for e in endpoints):
                self._endpoints = tuple(endpoints)
                self._changed.notify()

    @property
    def endpoints(self) -> Sequence[str]:
        """Endpoints of the servers, or empty before `aim`."""
        return self._endpoints

    def move_to(self, endpoints: Sequence[str]) -> None:
        """Call these servers from now on, after a move of rows. Call it while no message is due."""
        before, self._peers = self._peers, self._peers_at(endpoints)
        self._endpoints = tuple(endpoints)
        for peer in before:
            peer.close()

    def poke(self) -> None:
        """Wake the thread, because the coordinator may have a message to send."""
        with self._changed:
            self._poked = True
            self._changed.notify()

    def finish(self, seconds: float) -> None:
        """Wait up to `seconds` until every server has the last view (membership). A server may have ended."""
        coordinator = self._host.coordinator
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with self._host.lock:
                if coordinator is None or coordinator.is_installed:
                    return
            time.sleep(_PAUSE)

    def stop(self) -> None:
        """Stop the thread and wait for it. A call that is under way fails when its connection closes."""
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
        # The flag is cleared before the coordinator is called: a change in between sets the flag again, which
        # costs at most one more check.
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
        """Make every call once, all at the same time. Returns True if any server replied."""
        answered = False
        other_servers = [message for message in due if message.server]
        # Server 0 last: it ends once it has a view without members, and no other process sends views.
        this_server = [message for message in due if not message.server]
        for message, reply in chain(self._sent(other_servers), self._sent(this_server)):
            before = self._torn()
            try:
                self._host.meet(reply.result())
            # The server did not reply, or the disk is full and the decision cannot be journalled. Either way
            # `due` returns the message again.
            except PsfleetError as error:
                self._say_silent(message.server, error)
                continue
            if self._silent.pop(message.server, 0.0) == math.inf:
                _log.info(f"psfleet: {self._peers[message.server].name} answers server 0 again")
            for line in torn_words(self._torn()[len(before) :]):
                _log.warning(line)
            answered = True
        return answered

    def _sent(
        self, due: Sequence[PendingMessage]
    ) -> Iterator[tuple[PendingMessage, "Future[_Step]"]]:
        yield from [(message, self._calls.submit(self._send, message)) for message in due]

    def _say_silent(self, server: int, error: PsfleetError) -> None:
        """Log the server's name, once, when it has not replied for `_SILENT` seconds."""
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
        """Make the call, and return the step that passes its reply to the coordinator."""
        if isinstance(due.message, PrepareView):
            return self._freeze(due, due.message)
        view = due.message.view
        crash_points.reach("install")
        request = encode(InstallRequest(due.boot, due.message))
        content = self._peers[due.server].call("Membership/Install", request, _INSTALL_TIMEOUT)
        reply: InstallReply = decode(InstallReply, content)
        if not reply.installed:
            return self._rebooted(due.server, reply.boot)
        return lambda c: c.installed(due.server, reply.boot, view)

    def _freeze(self, due: PendingMessage, freeze: PrepareView) -> _Step:
        crash_points.reach("freeze")
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
