"""Moves the rows of one server when the number of servers changes: sends its rows, and receives new ones.

Received rows are kept apart from the rows that the server serves until server 0 decides the move:

    served:    host.shard, its log and its standby     <- pushes and pulls
    received:  _taken, _log and feed                   <- records from all servers, this one included
                 |
                 adopt: replaces the served shard, log and standby
                 abandon: is dropped, and nothing has changed

Server 0 calls the methods (`psfleet_server.engine.server_scaling`); each call runs in a thread of the RPC
server. The lock of the received rows is always taken before the lock of the host.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NoReturn

from psfleet.core.base import crash_points
from psfleet.core.base.errors import ProtocolError
from psfleet.core.base.logs import log_of
from psfleet.core.engine.shard.events import Record, RestorePart
from psfleet.core.engine.shard.rescaled_rows import Dealt, DealtShard, dealt
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.shard.shard_state import ShardState
from psfleet.core.engine.shard.shard_tables import DeltaBases
from psfleet.core.engine.tables.row_data import ROW_IDS
from psfleet.core.net import message_codec
from psfleet.core.net.connections.access import Access
from psfleet.core.net.frame import Part
from psfleet.core.net.server_state import read_state
from psfleet_server.durability.log import ServerLog
from psfleet_server.durability.log_shipping import LogShipping, joined
from psfleet_server.durability.records import RecordKind, decode, encode
from psfleet_server.durability.recovery import copied
from psfleet_server.durability.snapshot_writer import Throttle
from psfleet_server.engine.server_messages import FillRowsRequest, MovedRecord
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.endpoints import Peer

_log = log_of(__name__)

_CHUNK = 4 << 20  # approximate bytes of one message with rows
_SHARE = 0.07  # part of the time that the first copy may use while training goes on
_FILL_TIMEOUT = 120.0  # seconds for a server to apply one message
_FOLLOWS = 10.0  # seconds for the next standby to have all received rows


class RowMoves:
    """Moves of rows at one server, one after the other. Each method is a call of server 0 or of a standby.

    Moves have rising numbers. A call for a move that has ended changes nothing.

    Args:
        open_log: Opens the log for a move number (first argument) and a number of servers (second argument).
            Returns None if the job keeps no logs.
        generation: Number of the move that created this process's log, or 0 if the rows have never moved.

    Attributes:
        feed: Sends the received rows to the standby that this server has after the move. Unused if the job
            keeps logs.
    """

    def __init__(
        self,
        host: ShardHost,
        access: Access,
        open_log: Callable[[int, int], ServerLog | None] = lambda generation, servers: None,
        generation: int = 0,
    ) -> None:
        self._host = host
        self._access = access
        self._open_log = open_log
        self._lock = threading.Lock()  # guards the received rows: `_taken`, `_log` and `feed`
        self.begin(generation)
        self._taken: DealtShard | None = None  # None also if this server has no rows after the move
        self.feed = LogShipping()
        # Log of the received rows, which a process that starts after the move replays.
        self._log: ServerLog | None = None
        self._sent = DeltaBases()  # rows that have changed since they were sent ahead
        self._round = 0  # number of rounds that were sent ahead

    def begin(self, generation: int) -> None:
        """Set the number of the move that produced the rows this process serves at its start."""
        self._number = self._over = generation  # the last move that has begun, and that has ended
        self._adopted = generation  # the last move whose rows this server serves

    def open(self, number: int, servers: int, ahead: bool) -> None:
        """Begin a move, or the second phase of a move, in which there are no pushes.

        Another move under way is given up.

        Args:
            number: Number of the move. Rows received in its first phase are kept.
            servers: Number of servers after the move.
            ahead: If True, training continues for now. If False, the shard refuses changes from now on.

        Raises:
            ProtocolError: The move has ended. The call is late, and server 0 no longer waits for it.
        """
        self._check_ended(number)
        shard = self._host.shard
        if number != self._number:
            self.abandon(self._number)
            with self._lock, self._host.lock:
                self._number = number
                if shard.index < servers:
                    self._log = self._open_log(number, servers)
                    if self._log is not None:
                        self._log.forget()
                    keeps = self._log is not None or self._has_standbys
                    self._taken = DealtShard(shard, servers, self._keep if keeps else None)
                    # This server was started for the move. If it has a standby, that standby already follows
                    # the present feed.
                    if shard.servers == servers:
                        self.feed = self._host.feed
        if ahead:
            return
        # From here on all workers wait at a collective. A snapshot that is under way is given up.
        with self._host.lock:
            cut = shard.cuts.under_way
            shard.moving = True
            shard.cuts.give_up()
        if cut is not None:
            self._host.parts.forget(cut.number, shard.cuts.failure)
        crash_points.reach("opened")

    def _check_ended(self, number: int) -> None:
        if number <= self._over or number < self._number:
            raise ProtocolError(f"move {number} has ended for server {self._host.shard.index}")

    @property
    def _has_standbys(self) -> bool:
        """True if this server's state survives a crash only on a standby, because the job keeps no log."""
        return self._host.feed.enabled and self._host.journal is None

    @property
    def alone(self) -> bool:
        """True if the received rows are in this process only: no log and no standby has them."""
        return self._taken is not None and self._has_standbys and not self.feed.required

    def copy(self, servers: int) -> tuple[LogShipping, Shard, ShardState]:
        """Return the state that a new standby must copy, and the feed of records that it then follows.

        Call it within `still`. During a move there are two kinds of standbys: for the served rows and for
        the received rows. The number of servers that a standby was started for identifies its kind.

        Args:
            servers: Number of servers that the standby was started for.

        Returns:
            The feed that the standby follows, the shard with its tables, and the shard's state without the
            tables.

        Raises:
            ProtocolError: The standby was started for a number of servers that this server has neither now
                nor after the move.
        """
        served, received = self._host.shard, self._taken
        if received is not None and self._has_standbys and received.shard.servers == servers:
            return self.feed, received.shard, received.state
        if served.servers != servers:
            raise ProtocolError(
                f"a standby of one of {servers} servers has come to one of {served.servers}"
            )
        return self._host.feed, served, served.state()

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Context in which neither the received nor the served rows change."""
        with self._lock, self._host.lock:
            yield

    def release(self, attach: int) -> None:
        """Stop waiting for standbys, of served and of received rows, up to number `attach`."""
        self._host.feed.release(attach)
        self.feed.release(attach)

    def _keep(self, record: Record) -> None:
        if self._log is not None or self.feed.attached:
            self._put(*encode(record))

    def _put(self, kind: int, parts: list[Part]) -> None:
        if self._log is not None:
            self._log.append(kind, parts)
        self.feed.append(kind, parts)

    def _settle(self) -> None:
        """Sync the log of the received rows now, so that little is left to write while workers wait."""
        if self._log is not None:
            self._log.settle(self._log.end)

    def fill(self, number: int, records: Iterable[MovedRecord]) -> None:
        """Apply records with rows from another server.

        Returns when the records are in the log, if there is one.
        """
        with self._lock:
            received = self._of(number)
            for record in records:
                instruction = decode(record.kind, memoryview(record.body))
                received.apply_record(instruction)  # type: ignore[arg-type]  # ignores other instructions
            self._settle()
        crash_points.reach("filled")

    def _of(self, number: int) -> DealtShard:
        if number != self._number or self._taken is None:
            raise ProtocolError(f"server {self._host.shard.index} takes part in no move {number}")
        return self._taken

    def send(self, number: int, endpoints: Sequence[str], ahead: bool, hurry: bool) -> int:
        """Send this server's rows to their new owners: first all rows, in later calls the rows changed since.

        Args:
            endpoints: Endpoints of the servers after the move, by server index.
            ahead: If True, training continues. Sends only rows of sparse tables, and notes which rows change
                from now on. If False, sends everything that is left.
            hurry: If True, send at full speed. Otherwise, with `ahead`, pause so that training keeps the
                processor.

        Returns:
            Number of rows sent, including rows that stay on this server.

        Raises:
            PsfleetError: A server did not accept its rows.
        """
        shard = self._host.shard
        with self._host.lock:
            self._check_ended(number)
            if number != self._number:
                raise ProtocolError(f"server {shard.index} takes part in no move {number}")
            # Begin a new period of changes before the first row is read. A row that changes during the send
            # is then noted as changed, and is sent again in the next round.
            since = self._sent.last()
            if ahead:
                self._round += 1
                self._sent.advance(shard.tables, self._round)
        throttle, rows = Throttle(lambda: _SHARE, time.perf_counter), 0
        with contextlib.ExitStack() as opened:
            ways: list[_Way] = []
            for server, endpoint in enumerate(endpoints):
                peer = Peer.server(server, endpoint, self._access)
                opened.callback(peer.close)
                ways.append(_Way(peer, number))
            for server, record in dealt(shard, since, len(endpoints), ahead):
                if server == shard.index:
                    with self._lock:
                        self._of(number).apply_record(record)
                else:
                    ways[server].put(record)
                if isinstance(record, RestorePart):
                    rows += len(record.columns.get(ROW_IDS, ()))
                if ahead and not hurry:
                    throttle.rest()
            for way in ways:
                way.flush()
        with self._lock:
            self._settle()
        crash_points.reach("sent")
        return rows

    def prepare(self, number: int, state: bytes) -> None:
        """Make the received rows durable, as a promise to serve them after the move.

        They are then in the log, or on the standby that this server has after the move.

        Args:
            state: State of server 0 without its tables, encoded. All servers have this state after the move.

        Raises:
            ProtocolError: The standby did not have the rows within 10 seconds.
        """
        with self._lock, self._host.lock:
            received = self._of(number)
            received.become(read_state(memoryview(state)).shard)
            received.keep_values()
            self._put(*copied(received.state, self._host.coordinator))
            if self._log is not None:
                self._log.append(RecordKind.READY, [])
                self._settle()
            end = self.feed.end
        # Wait without the locks, because the standby may take long.
        if not self.feed.settle(end, _FOLLOWS):
            raise ProtocolError(f"the next standby of server {self._host.shard.index} is late")
        crash_points.reach("prepared")

    def adopt(self, number: int) -> None:
        """Serve the received rows from now on, because the move is committed.

        A repeated call does nothing.
        """
        with self._lock, self._host.lock:
            if number == self._adopted:
                return
            if number != self._number:
                self._start_again()
            self._of(number).replace(self._host.shard)
            if self._log is not None and self._host.journal is not None:
                self._host.journal.go_on_in(self._log)
            self._taken, self._log, self._sent = None, None, DeltaBases()
            self._over = self._adopted = number
            self._host.lanes.forget_layouts()
            before = self._host.feed  # leads to the standby with the old rows
            if self._has_standbys and self.feed is not before:
                self.feed.enabled, self.feed.tracing = True, before.tracing
                self._host.feed = self.feed
                before.close()
            elif not self._has_standbys:
                before.renew()
            self.feed = LogShipping()
        crash_points.reach("adopted")

    def _start_again(self) -> NoReturn:
        """End this process at once, because it started from the old log before the move was committed.

        The launcher starts a new process, which reads the log of the new generation.
        """
        _log.critical("this process began with rows of before the move that is decided, and ends")
        os._exit(1)

    def abandon(self, number: int) -> None:
        """Drop the received rows and continue with the served rows. Ends all moves up to this number."""
        with self._lock, self._host.lock:
            self._over = max(self._over, number)
            if number >= self._number:
                if self._log is not None:
                    self._log.remove()
                if self._taken is not None:
                    self._taken.drop(self._host.shard)
                self._taken, self._log, self._host.shard.moving = None, None, False
                if self.feed is not self._host.feed:
                    self.feed.close()
                self.feed = LogShipping()
                self._sent.drop_before(self._host.shard.tables, 0)


class _Way:
    """Collects records for one server, and sends them in messages of about `_CHUNK` bytes."""

    def __init__(self, peer: Peer, number: int) -> None:
        self._peer = peer
        self._request = FillRowsRequest(number)
        self._bytes = 0

    def put(self, record: Dealt) -> None:
        """Add a record. Sends the message once it is long enough."""
        kind, parts = encode(record)
        body = joined(parts)
        self._request.records.append(MovedRecord(kind, body))
        self._bytes += len(body)
        if self._bytes >= _CHUNK:
            self.flush()

    def flush(self) -> None:
        """Send the remaining records. Returns when the server has applied them."""
        if self._request.records:
            self._peer.call("Scaling/Fill", message_codec.encode(self._request), _FILL_TIMEOUT)
            self._request.records.clear()
            self._bytes = 0
