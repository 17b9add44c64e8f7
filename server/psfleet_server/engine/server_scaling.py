"""Changes the number of servers of a running job: a thread of server 0 that moves the rows between servers.

A move has four phases (docs/decisions/0031-another-number-of-servers.md):

    1. copy     training continues; every server sends its rows to their new owners ("ahead"), and then in
                rounds the rows that have changed meanwhile
    2. collect  the workers wait at a collective; every server sends the last changed rows
    3. promise  every new owner makes the received rows durable, and promises to serve them
    4. decide   the launcher commits or refuses the move, and server 0 notifies the servers

Until the launcher has decided, any error ends the move: the servers drop the received rows, and the fleet
continues as before. A commit cannot be undone, so server 0 repeats the result to each server until that
server has replied. `psfleet_server.engine.row_moves` does the work of each single server.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from psfleet.core.base import crash_points
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
_MOVED = 600.0  # seconds for a server to send its changed rows
# Seconds for a server to send all its rows. Training continues meanwhile, and the copy uses a small share of
# the processor (`row_moves._SHARE`), so this takes long.
_COPIED = 6 * 3600.0
_PAUSE = 0.05  # seconds before a call that failed is repeated
_LOOK = 0.2  # seconds between two looks for a request
_WAIT = 0.005  # seconds between two looks for the launcher's decision; all workers wait meanwhile

# Maximum number of rounds of the copy: all rows, then the rows that changed during the round before. The copy
# ends early if a round has sent few rows, or hardly fewer than the round before: then rows change as fast as
# they are sent, and further rounds do not shorten the workers' wait.
_ROUNDS = 6
_FEW = 1 << 14  # rows
_GAIN = 0.8  # rows of a round over rows of the round before

# Until the workers reach a collective, changed rows are sent again at intervals, so that few are left.
_FOLLOW = 2.0  # seconds between two of these rounds
_AWAIT = 0.5  # seconds between two of them while standbys lack rows
_ALONE = 60.0  # seconds to wait for standbys to have the rows


class ServerScaling:
    """Moves the rows of the job to another number of servers, one move at a time, in a thread of server 0.

    The coordinator's attribute `scaling` describes the move to make.

    Args:
        host: Holds server 0's part of all tables.
        access: Credentials for calls to the other servers.
        folder: Folder of the job. Its files tell when the launcher asks for a move, when all servers are
            ready for it, and what the launcher decides. None if the number of servers cannot change.
        present: Returns the endpoints of the servers before the move, or an empty list while they are
            unknown.
        moved: Called with the endpoints of the servers after the move, once the launcher has committed it.
        poke: Wakes the launcher, which then reads the file of the servers.
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
        self._ahead: ScaleRequest | None = None  # request whose rows have been copied
        # Boot number of each server's process at the first round. A process that has restarted since has lost
        # the rows that it received.
        self._boots: dict[int, int] = {}
        self._decided: ScaleRequest | None = None  # committed before this process started
        self._interrupted: ScaleRequest | None = None  # given up when this process started
        self._followed = 0.0  # time of the last round
        self._sent = 0  # rows of the last round
        self._alone = False  # a server has rows of the move that no standby and no log has
        self._until = 0.0  # time from when workers may meet even so
        # For each server that may not know that a move is given up, the number of that move.
        self._unheard: dict[int, int] = {}
        self._wanted = threading.Event()
        self._over = threading.Event()
        self._thread = ServiceThread(self._run, "scaling")

    def start(self) -> None:
        """Start the thread that carries out moves."""
        self._thread.start()

    def recover(self, scaling: Scaling, endpoints: Sequence[str], generation: int) -> None:
        """Prepare to finish a move that an earlier process of server 0 left unfinished.

        No collective ends before all servers know the outcome of that move. Call it before `start`.

        Args:
            scaling: Scaling state of the coordinator, which has just begun.
            generation: Number of the move that created this process's log, or 0 if the rows have never moved.
        """
        last = Scaled() if self._folder is None else read_scaled(self._folder)
        # The last move was refused or given up, but some servers may still keep rows for it.
        if last.number > last.generation:
            self._interrupted = ScaleRequest(last.number, ())
        scaling.done = last.number
        if generation:
            self._decided = ScaleRequest(generation, tuple(endpoints))
            scaling.endpoints = self._decided.endpoints
        if self._decided or self._interrupted:
            scaling.moving = self._interrupted or ScaleRequest(last.number, scaling.endpoints)
            self._wanted.set()

    def poke(self) -> None:
        """Wake the thread, because the coordinator has a move to carry out."""
        self._wanted.set()

    def stop(self) -> None:
        """Stop the thread and wait for it."""
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
                moving, last_request = coordinator.scaling.moving, coordinator.scaling.done
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
                if request is not None and request.number > last_request:
                    self._send_ahead(request, coordinator.scaling)

    def _resume(self) -> None:
        """Finish the move of rows that was under way when an earlier process of server 0 died.

        Tells the servers whether the launcher has committed the move, or that it is given up. No collective
        could end since `recover`; afterwards collectives can end again.
        """
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
        """Return clients for the present servers and for the servers that the move adds."""
        endpoints, peers = [*self._present()], []
        for server, endpoint in enumerate([*endpoints, *request.endpoints[len(endpoints) :]]):
            peers.append(Peer.server(server, endpoint, self._access))
            opened.callback(peers[-1].close)
        return peers

    def _send_ahead(self, request: ScaleRequest, scaling: Scaling) -> None:
        """Copy all rows to their new owners during training, then let the next collective move the rest.

        The copy is repeated with the rows that changed meanwhile, to shorten the workers' wait at the
        collective.
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
        """Let the next collective carry out the move, once standbys have the rows or have had enough time."""
        if scaling.request is request or (self._alone and time.monotonic() < self._until):
            return
        _log.info(
            f"rows are copied for {len(request.endpoints)} servers, {self._sent:,} of them in the last round"
            f"{', some to no standby' if self._alone else ''}; workers may meet"
        )
        with self._host.lock:
            scaling.request = request

    def _follow(self, request: ScaleRequest, scaling: Scaling) -> None:
        """Send changed rows again at intervals, until the workers reach a collective.

        An error ends the move: it is then unknown which of the changed rows have arrived, and later changes
        would be applied to an incomplete copy.
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
        """Finish a move while all workers wait at the collective, and then let the collective end."""
        # Empty endpoints tell `scaled` that the number of servers stays the same.
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
        """Have every present server send its rows to their new owners, and wait until the rows have arrived.

        Args:
            peers: Clients for the present servers and those that the move adds.
            ahead: True if training continues, so rows may still change after they are sent.
            hurry: True to send at full speed although training continues.

        Returns:
            The boot number of each new owner's process.
        """
        number, count, before = request.number, len(request.endpoints), len(self._present())
        message = encode(OpenMoveRequest(number, count, ahead))
        self._alone = False
        for server, peer in enumerate(peers):
            opened = peer.call("Scaling/Open", message, _REPLY)
            reply: OpenMoveReply = decode(OpenMoveReply, opened)
            if self._boots.setdefault(server, reply.boot) != reply.boot:
                raise ServerUnavailable(f"{peer.name} has started again, without what it had taken")
            self._alone |= reply.alone
        # A server that takes part in this move has thereby ended the move before.
        self._unheard.clear()
        message = encode(SendRowsRequest(number, tuple(request.endpoints), ahead, hurry))
        with ThreadPoolExecutor(before, thread_name_prefix="scaling") as senders:
            seconds = _COPIED if ahead and not hurry else _MOVED
            calls = senders.map(lambda p: p.call("Scaling/Send", message, seconds), peers[:before])
            replies: list[SendRowsReply] = [decode(SendRowsReply, content) for content in calls]
            self._sent = sum(sent.rows for sent in replies)
        return {server: boot for server, boot in self._boots.items() if server < count}

    def _prepare(self, request: ScaleRequest, peers: Sequence[Peer]) -> None:
        """Have every new owner promise to serve its rows after the move, even if its process dies.

        Each server gets the state of server 0 without the tables, which all servers share from then on.
        """
        with self._host.lock:
            state = joined(write_state(server_state(self._host.shard.state(), None)))
        message = encode(PrepareMoveRequest(request.number, state))
        with ThreadPoolExecutor(len(peers), thread_name_prefix="scaling") as askers:
            for _ in askers.map(lambda p: p.call("Scaling/Prepare", message, _MOVED), peers):
                pass
        crash_points.reach("promised")

    def _decide(self, request: ScaleRequest) -> None:
        """Request the launcher to commit the move, and wait for its decision.

        Server 0 cannot decide alone: the launcher may just be replacing a process that has promised its rows,
        and only the launcher knows that.

        Raises:
            UsageError: The launcher has refused the move, or the file with the promise cannot be written.
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
        crash_points.reach("decided")

    def _give_up(self, request: ScaleRequest, peers: Sequence[Peer], error: PsfleetError) -> None:
        """Have every server drop the rows that it has received, and report the reason to the launcher.

        With logs or standbys, a present server that dies is restarted, so the call is repeated until it
        replies. Other servers are called once; `_abandon` later repeats the call to a present server.
        """
        # This process is ending, so the launcher may have decided meanwhile. The next process reads the
        # decision.
        if self._over.is_set():
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
        """Notify servers that may not know that a move is given up, and so may still refuse pushes."""
        for server, number in [*self._unheard.items()]:
            peer = Peer.server(server, self._present()[server], self._access)
            with contextlib.closing(peer):
                self._tell_once(server, peer, number)

    def _tell_once(self, server: int, peer: Peer, number: int) -> None:
        """Notify a server that a move is given up, in a single call whose failure is ignored."""
        with contextlib.suppress(PsfleetError):
            peer.call("Scaling/Abandon", _abandon(number), _REPLY)
            self._unheard.pop(server, None)

    def _tell(self, request: ScaleRequest, peers: Sequence[Peer]) -> None:
        """Make every new owner serve its rows: repeat the call until each server has replied.

        The repetition ends, because a server that has died is restarted, or the launcher ends the job.
        """
        adopt = encode(AdoptRowsRequest(request.number))
        for peer in peers:
            self._insist(peer, "Scaling/Adopt", adopt)

    def _insist(self, peer: Peer, method: str, message: bytes) -> None:
        """Repeat a call until the server replies or this process ends."""
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
