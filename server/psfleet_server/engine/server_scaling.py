"""The hands of server 0 for another number of servers: moves the rows, has it decided, and tells everybody.

Rows are sent ahead while training goes on, and then at the next collective those that have changed. When all
servers have promised to hold their part, the launcher decides. Until then any error gives the move up,
and the fleet goes on with the servers that it has; afterwards the new servers are the fleet's, and each is
told until it has answered. All workers wait at a collective meanwhile.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from psfleet.core.base import faults
from psfleet.core.base.errors import PsfleetError, ServerUnavailable, UsageError
from psfleet.core.base.files import reason
from psfleet.core.base.logs import log_of
from psfleet.core.base.scaling_files import Scaled, read_scaled, write_promise
from psfleet.core.base.threads import ServiceThread
from psfleet.core.net.connections.access import Access
from psfleet.core.net.message_codec import decode, encode
from psfleet.core.net.server_state import write_state
from psfleet_server.coordinator.request_files import ScaleRequest, Scaling
from psfleet_server.durability.log_shipping import joined
from psfleet_server.durability.records import server_state
from psfleet_server.engine.server_messages import (
    AbandonMoveRequest,
    AdoptRowsRequest,
    OpenMoveReply,
    OpenMoveRequest,
    PrepareMoveRequest,
    SendRowsReply,
    SendRowsRequest,
)
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.endpoints import Peer

_log = log_of(__name__)

_REPLY = 10.0  # seconds for a server to answer a call without rows
_MOVED = 600.0  # seconds for a server to send its rows
_COPIED = 6 * 3600.0  # and to send all of them first, in a small share of the time
_PAUSE = 0.05
_LOOK = 0.2  # seconds between two looks for a request
_WAIT = 0.005  # and for the launcher's decision
_ROUNDS = 6  # of rows that are sent ahead: all, those that changed meanwhile, those that changed during that
_FEW = 1 << 14  # rows for which no further round is worth its while
_GAIN = 0.8  # nor if so much is left of the round before: rows change as fast as they are sent
_FOLLOW = 2.0  # seconds between two more, until the workers meet
_AWAIT = 0.5  # and until standbys have them
_ALONE = 60.0  # seconds after which rows move without these


class ServerScaling:
    """Carries out what the coordinator's `scaling` is to do.

    Args:
        host: Of server 0.
        access: With what this server proves itself to the others.
        folder: The job's folder; None: nobody asks for another number of servers.
        present: Returns where the servers are now.
        moved: Called with the endpoints of the new servers, once they are in force.
        poke: Wakes the launcher.
    """

    def __init__(
        self,
        host: ShardHost,
        access: Access,
        folder: Path | None,
        present: Callable[[], Sequence[str]],
        moved: Callable[[Sequence[str]], None],
        poke: Callable[[], object] = lambda: None,
    ) -> None:
        self._host = host
        self._access = access
        self._folder = folder
        self._present = present
        self._moved = moved
        self._poke = poke
        self._ahead: ScaleRequest | None = None  # whose rows are sent ahead
        self._boots: dict[int, int] = {}  # of the processes that have them
        self._decided: ScaleRequest | None = None  # by an earlier process
        self._interrupted: ScaleRequest | None = None  # given up, perhaps with an earlier process
        self._followed = 0.0  # when they were sent last
        self._sent = 0  # rows of the last round
        self._alone = False  # of which a standby lacks some
        self._until = 0.0  # when it is waited for no more
        self._unheard: dict[int, int] = {}  # by server: a move that it may not know is given up
        self._wanted = threading.Event()
        self._over = threading.Event()
        self._thread = ServiceThread(self._run, "scaling")

    def start(self) -> None:
        """Be ready to move rows."""
        self._thread.start()

    def recover(self, scaling: Scaling, endpoints: Sequence[str], generation: int) -> None:
        """Let no collective end before all servers know what an earlier process has decided, or has not.

        Args:
            scaling: Of the coordinator, which has just begun.
            endpoints: Where the servers are.
            generation: Number of the move with whose log this process has started; 0: of none.
        """
        last = Scaled() if self._folder is None else read_scaled(self._folder)
        if last.number > last.generation:  # whoever took part may not know
            self._interrupted = ScaleRequest(last.number, ())
        scaling.done = last.number
        if generation:
            self._decided = ScaleRequest(generation, tuple(endpoints))
            scaling.endpoints = self._decided.endpoints
        if self._decided or self._interrupted:
            scaling.moving = self._interrupted or ScaleRequest(last.number, scaling.endpoints)
            self._wanted.set()

    def poke(self) -> None:
        """There is something to carry out."""
        self._wanted.set()

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        self._wanted.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        coordinator = self._host.coordinator
        assert coordinator is not None
        while not self._over.is_set():
            self._wanted.wait(_LOOK)
            self._wanted.clear()
            with self._host.lock:
                moving, done = coordinator.scaling.moving, coordinator.scaling.done
            if self._over.is_set():
                return
            if not self._present():
                continue
            self._abandon()
            if self._decided is not None or self._interrupted is not None:
                self._resume()
            elif moving is not None:
                self._carry_out(moving)
            elif self._ahead is not None:
                self._follow(self._ahead, coordinator.scaling)
            else:
                request = self._host.scale_file.look()
                if request is not None and request.number > done:
                    self._send_ahead(request, coordinator.scaling)

    def _resume(self) -> None:
        """Settle what an earlier process has left."""
        decided, interrupted = self._decided, self._interrupted
        self._decided = self._interrupted = None
        with contextlib.ExitStack() as opened:
            if decided is not None:
                self._tell(decided, self._peers(decided, opened))
            if interrupted is not None:
                why = UsageError("server 0 has started again while rows moved; ask once more")
                self._give_up(interrupted, self._peers(interrupted, opened), why)
        self._host.meet(lambda c: c.scaled((), {}))

    def _peers(self, request: ScaleRequest, opened: contextlib.ExitStack) -> list[Peer]:
        """The servers that there are, and those that there are to be besides."""
        endpoints, peers = [*self._present()], []
        for server, endpoint in enumerate([*endpoints, *request.endpoints[len(endpoints) :]]):
            peers.append(Peer.server(server, endpoint, self._access))
            opened.callback(peers[-1].close)
        return peers

    def _send_ahead(self, request: ScaleRequest, scaling: Scaling) -> None:
        """Have rows taken before the workers wait, and then those that have changed meanwhile; after that the
        next collective is the moment.
        """
        with contextlib.ExitStack() as opened:
            peers = self._peers(request, opened)
            self._boots = {}
            try:
                self._move(request, peers, ahead=True)
                before = math.inf
                for _ in range(1, _ROUNDS):
                    self._move(request, peers, ahead=True, hurry=True)
                    if self._sent < _FEW or self._sent > _GAIN * before:
                        break
                    before = self._sent
            except PsfleetError as error:
                self._give_up(request, peers, error)
                scaling.done = request.number
            else:
                self._ahead, self._followed = request, time.monotonic()
                self._until = self._followed + _ALONE
                self._offer(request, scaling)
        self._host.scale_file.take(request.number)

    def _offer(self, request: ScaleRequest, scaling: Scaling) -> None:
        """Let the workers' next collective be the moment, once standbys have the rows too, or are late."""
        if scaling.request is request or (self._alone and time.monotonic() < self._until):
            return
        _log.info(
            f"rows are copied for {len(request.endpoints)} servers, {self._sent:,} of them in the last round"
            f"{', some to no standby' if self._alone else ''}; workers may meet"
        )
        with self._host.lock:
            scaling.request = request

    def _follow(self, request: ScaleRequest, scaling: Scaling) -> None:
        """Have what has changed taken again now and then, until the workers meet.

        If that fails, nobody knows what has been taken: the request is given up.
        """
        if time.monotonic() - self._followed < (_FOLLOW if scaling.request is request else _AWAIT):
            return
        with contextlib.ExitStack() as opened:
            peers = self._peers(request, opened)
            try:
                self._move(request, peers, ahead=True, hurry=True)
                self._offer(request, scaling)
            except PsfleetError as error:
                self._give_up(request, peers, error)
                self._ahead = None
                with self._host.lock:
                    scaling.request = None
        self._followed = time.monotonic()

    def _carry_out(self, request: ScaleRequest) -> None:
        endpoints: tuple[str, ...] = ()
        boots: dict[int, int] = {}
        rows_are_there, self._ahead = self._ahead is not None, None
        if rows_are_there:
            with contextlib.ExitStack() as opened:
                peers = self._peers(request, opened)
                owners = peers[: len(request.endpoints)]
                try:
                    boots = self._move(request, peers)
                    self._prepare(request, owners)
                    self._decide(request)
                except PsfleetError as error:
                    self._give_up(request, peers, error)
                else:
                    endpoints = request.endpoints
                    self._tell(request, owners)
                    self._moved(endpoints)
        self._host.meet(lambda c: c.scaled(endpoints, boots))

    def _move(
        self, request: ScaleRequest, peers: Sequence[Peer], ahead: bool = False, hurry: bool = False
    ) -> dict[int, int]:
        """Have all rows taken by those to whom they are going to belong; the processes of these."""
        number, count, before = request.number, len(request.endpoints), len(self._present())
        message = encode(OpenMoveRequest(number, count, ahead))
        self._alone = False
        for server, peer in enumerate(peers):
            opened = peer.call("Scaling/Open", message, _REPLY)
            reply: OpenMoveReply = decode(OpenMoveReply, opened)
            if self._boots.setdefault(server, reply.boot) != reply.boot:
                raise ServerUnavailable(f"{peer.name} has started again, without what it had taken")
            self._alone |= reply.alone
        self._unheard.clear()  # the move before has ended for whoever takes part in this one
        message = encode(SendRowsRequest(number, tuple(request.endpoints), ahead, hurry))
        with ThreadPoolExecutor(before, thread_name_prefix="scaling") as senders:
            seconds = _COPIED if ahead and not hurry else _MOVED
            calls = senders.map(lambda p: p.call("Scaling/Send", message, seconds), peers[:before])
            replies: list[SendRowsReply] = [decode(SendRowsReply, each) for each in calls]
            self._sent = sum(each.rows for each in replies)
        return {server: boot for server, boot in self._boots.items() if server < count}

    def _prepare(self, request: ScaleRequest, peers: Sequence[Peer]) -> None:
        """Have every server promise to hold its part, whatever becomes of its process."""
        with self._host.lock:
            state = joined(write_state(server_state(self._host.shard.state(), None)))
        message = encode(PrepareMoveRequest(request.number, state))
        with ThreadPoolExecutor(len(peers), thread_name_prefix="scaling") as askers:
            for _ in askers.map(lambda p: p.call("Scaling/Prepare", message, _MOVED), peers):
                pass
        faults.reach("promised")

    def _decide(self, request: ScaleRequest) -> None:
        """Have the launcher decide: it alone knows whose process no other one has replaced.

        Raises:
            UsageError: The move is given up.
        """
        folder, number = self._folder, request.number
        if folder is None:
            raise UsageError("the job has no folder for the decision")
        try:
            write_promise(folder, number)
        except OSError as error:
            raise UsageError(f"what servers promise cannot be written: {reason(error)}") from None
        self._poke()
        while (decision := read_scaled(folder)).number < number:
            if self._over.wait(_WAIT):
                raise UsageError("server 0 ends")
        if decision.generation < number:
            raise UsageError(decision.why)
        faults.reach("decided")

    def _give_up(self, request: ScaleRequest, peers: Sequence[Peer], error: PsfleetError) -> None:
        if self._over.is_set():  # it may be decided by now; a later process hears of it
            return
        _log.warning(f"the number of servers stays {self._host.shard.servers}: {error}")
        present = self._present()
        revives = self._host.journal is not None or self._host.feed.enabled
        self._unheard = {} if revives else dict.fromkeys(range(len(present)), request.number)
        for server, peer in enumerate(peers):
            if revives and server < len(present):
                self._insist(peer, "Scaling/Abandon", _abandon(request.number))
            else:
                self._tell_once(server, peer, request.number)
        if self._folder is not None:
            with contextlib.suppress(OSError):
                write_promise(self._folder, request.number, str(error))
            self._poke()

    def _abandon(self) -> None:
        """Tell those once more that may still refuse what changes their rows."""
        for server, number in [*self._unheard.items()]:
            peer = Peer.server(server, self._present()[server], self._access)
            with contextlib.closing(peer):
                self._tell_once(server, peer, number)

    def _tell_once(self, server: int, peer: Peer, number: int) -> None:
        """Tell a server that a move is given up; one that does not hear it has ended, or hears it later."""
        with contextlib.suppress(PsfleetError):
            peer.call("Scaling/Abandon", _abandon(number), _REPLY)
            self._unheard.pop(server, None)

    def _tell(self, request: ScaleRequest, peers: Sequence[Peer]) -> None:
        """Bring the decision to every server: one that has died starts again, or the job ends."""
        adopt = encode(AdoptRowsRequest(request.number))
        for peer in peers:
            self._insist(peer, "Scaling/Adopt", adopt)

    def _insist(self, peer: Peer, method: str, message: bytes) -> None:
        """Call until there is an answer."""
        is_late = False
        while not self._over.is_set():
            try:
                peer.call(method, message, _REPLY)
                return
            except PsfleetError as error:
                if not is_late:
                    _log.warning(f"{peer.name} has not heard how the move has ended: {error}")
                is_late = True
                self._over.wait(_PAUSE)


def _abandon(number: int) -> bytes:
    return encode(AbandonMoveRequest(number))
