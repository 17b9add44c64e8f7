"""This server's part in a move of rows to another number of servers: it sends, takes, and then holds.

What it takes lies beside what it holds until server 0 says how the move ends, so a move that is given up has
changed nothing.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NoReturn

from psfleet.core.base import faults
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

_CHUNK = 4 << 20  # bytes of one message, about
_SHARE = 0.07  # of the time in which rows go while training does, with all that their way takes
_FILL_TIMEOUT = 120.0  # seconds for a server to take one
_FOLLOWS = 10.0  # seconds for a standby to have all that was taken


class RowMoves:
    """Moves of rows, one after the other, as server 0 asks for them.

    Args:
        host: Around the shard.
        access: With what this process proves itself to other servers.
        open_log: Opens the log of a generation, with that number of servers; None: nothing is kept.
        generation: Number of the move that is over, with whose log this process has started.

    Attributes:
        feed: Brings what is taken to the standby that the server has after the move, where there are no logs.
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
        self._lock = threading.Lock()  # of what is taken
        self.begin(generation)
        self._taken: DealtShard | None = None
        self.feed = LogShipping()
        self._log: ServerLog | None = None  # what is taken, for whoever starts again after the move
        self._sent = DeltaBases()  # what has changed since rows were sent ahead
        self._round = 0  # of rows that were sent ahead

    def begin(self, generation: int) -> None:
        """This process holds the rows of the move of that number."""
        self._number = self._over = generation  # the last move, and the last one that has ended
        self._adopted = generation  # the last move whose rows this server holds

    def open(self, number: int, servers: int, ahead: bool) -> None:
        """A move begins, or is going to; one that had begun before is given up.

        Args:
            number: Number of the move. What was taken ahead under this number stays. A call that comes when
                the move has ended, which server 0 has given up waiting for, begins nothing.
            servers: Number of servers afterwards.
            ahead: Training goes on for now.

        Raises:
            ProtocolError: It has ended.
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
                    if shard.servers == servers:  # a new server, whose standby may be there
                        self.feed = self._host.feed
        if ahead:
            return
        with self._host.lock:
            cut = shard.cuts.under_way
            shard.moving = True
            shard.cuts.give_up()
        if cut is not None:
            self._host.parts.forget(cut.number)
        faults.reach("opened")

    def _check_ended(self, number: int) -> None:
        if number <= self._over or number < self._number:
            raise ProtocolError(f"move {number} has ended for server {self._host.shard.index}")

    @property
    def _has_standbys(self) -> bool:
        """A standby is all that there is when a server dies."""
        return self._host.feed.enabled and self._host.journal is None

    @property
    def alone(self) -> bool:
        """What is taken would be lost with this process: no log and no standby has it."""
        return self._taken is not None and self._has_standbys and not self.feed.required

    def copy(self, servers: int) -> tuple[LogShipping, Shard, ShardState]:
        """What a standby of one of so many servers follows, its tables, and the state beside them; call with
        nothing changing.

        Raises:
            ProtocolError: This server is not one of so many, nor is going to be.
        """
        held, taken = self._host.shard, self._taken
        if taken is not None and self._has_standbys and taken.shard.servers == servers:
            return self.feed, taken.shard, taken.state
        if held.servers != servers:
            raise ProtocolError(
                f"a standby of one of {servers} servers has come to one of {held.servers}"
            )
        return self._host.feed, held, held.state()

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Within, nothing is taken."""
        with self._lock, self._host.lock:
            yield

    def release(self, attach: int) -> None:
        """Wait for no standby up to this attachment, whether it is the present one or of a move."""
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
        """Have what was taken on the disk ahead: little is left to do while workers wait."""
        if self._log is not None:
            self._log.settle(self._log.end)

    def fill(self, number: int, records: Iterable[MovedRecord]) -> None:
        """Take records of another server."""
        with self._lock:
            taken = self._of(number)
            for record in records:
                instruction = decode(record.kind, memoryview(record.body))
                taken.apply_record(instruction)  # type: ignore[arg-type]  # whatever else it is, it does not take
            self._settle()
        faults.reach("filled")

    def _of(self, number: int) -> DealtShard:
        if number != self._number or self._taken is None:
            raise ProtocolError(f"server {self._host.shard.index} takes part in no move {number}")
        return self._taken

    def send(self, number: int, endpoints: Sequence[str], ahead: bool, hurry: bool) -> int:
        """Send all that this server holds to whom it is going to belong, or what has changed since it did so.

        Args:
            number: Number of the move.
            endpoints: Where the servers are going to be.
            ahead: Send rows alone, and remember which change from now on; training goes on.
            hurry: Take what there is of a processor all the same.

        Returns:
            How many rows were sent.

        Raises:
            PsfleetError: A server did not take its part.
        """
        shard = self._host.shard
        with self._host.lock:
            self._check_ended(number)
            if number != self._number:
                raise ProtocolError(f"server {shard.index} takes part in no move {number}")
            since = self._sent.last()
            if ahead:
                self._round += 1
                self._sent.advance(shard.tables, self._round)
        throttle, rows = Throttle(_SHARE, time.perf_counter), 0
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
        faults.reach("sent")
        return rows

    def prepare(self, number: int, state: bytes) -> None:
        """Promise to hold what was taken, also after a death of this process.

        Args:
            number: Number of the move.
            state: What server 0 is beside its tables, which all of them are going to be.
        """
        with self._lock, self._host.lock:
            taken = self._of(number)
            taken.become(read_state(memoryview(state)).shard)
            taken.keep_values()
            self._put(*copied(taken.state, self._host.coordinator))
            if self._log is not None:
                self._log.append(RecordKind.READY, [])
                self._settle()
            end = self.feed.end
        if not self.feed.settle(end, _FOLLOWS):
            raise ProtocolError(f"the next standby of server {self._host.shard.index} is late")
        faults.reach("prepared")

    def adopt(self, number: int) -> None:
        """Hold what was taken. Asked again, it holds it already."""
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
            before = self._host.feed  # its standby has rows of before
            if self._has_standbys and self.feed is not before:
                self.feed.enabled, self.feed.tracing = True, before.tracing
                self._host.feed = self.feed
                before.close()
            elif not self._has_standbys:
                before.renew()
            self.feed = LogShipping()
        faults.reach("adopted")

    def _start_again(self) -> NoReturn:
        """End this process, which has started between the promise of the one before and the decision."""
        _log.critical("this process began with rows of before the move that is decided, and ends")
        os._exit(1)

    def abandon(self, number: int) -> None:
        """Go on with what this server holds; all moves up to this one have ended."""
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
    """Records on their way to one server, several in a message."""

    def __init__(self, peer: Peer, number: int) -> None:
        self._peer = peer
        self._request = FillRowsRequest(number)
        self._bytes = 0

    def put(self, record: Dealt) -> None:
        """Send a record, now or with later ones."""
        kind, parts = encode(record)
        body = joined(parts)
        self._request.records.append(MovedRecord(kind, body))
        self._bytes += len(body)
        if self._bytes >= _CHUNK:
            self.flush()

    def flush(self) -> None:
        """Return when everything is taken."""
        if self._request.records:
            self._peer.call("Scaling/Fill", message_codec.encode(self._request), _FILL_TIMEOUT)
            self._request.records.clear()
            self._bytes = 0
