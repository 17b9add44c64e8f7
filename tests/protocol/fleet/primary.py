"""A server as the primary of a standby: its feed, the stream, and what must not be said too early."""

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

from psfleet.core.base.errors import PsfleetError
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.engine.shard.shard_state import ShardState
from psfleet_server.durability.log_shipping import LogShipping, ShippedRecord, joined
from psfleet_server.durability.records import RecordKind, encode
from psfleet_server.durability.recovery import copied
from psfleet_server.services.standby_service import _copy
from tests.protocol.fleet.calls import Part, Took
from tests.protocol.scheduler import Instruction, Send

if TYPE_CHECKING:
    from tests.protocol.fleet.server import Server

_WINDOW = 20  # messages of a stream that are sent again at once


class Primary:
    """What a server has beside its shard when there may be standbys.

    The stream is as reliable as a connection: its messages have places, and are sent again until they
    are taken. Answers are kept back as Host.changing does it, which would hold the thread.
    """

    def __init__(self, server: "Server", feed: LogShipping | None = None) -> None:
        self.feed = feed or LogShipping()
        self.feed.enabled = server.job.standbys
        self._server = server
        self._to = ""  # the standby
        self._attach = 0
        self._records: Iterator[ShippedRecord] = iter(())
        self._said: list[object] = []  # what the records in the feed say
        self._stream: list[Part] = []
        self._taken = 0  # places of the stream
        self._sent = 0  # likewise
        self._lengths: deque[int] = deque([0], server.job.lag + 1)  # of the stream, after events
        self._held: list[tuple[int, Send]] = []

    def begin(self, standby: str, attach: int, shard: Shard, state: ShardState) -> bool:
        """A standby wants to follow: copy these tables, as they are, and what is beside them. Is it done?"""
        server = self._server
        try:
            last = self.feed.attach(attach)
        except PsfleetError:
            return False  # it asks again
        self._to, self._attach, self._stream = standby, attach, []
        self._taken = self._sent = 0
        self._lengths.clear()
        self._said = []
        self._records = self.feed.records(attach)
        frozen = shard.freeze()
        for record in _copy(frozen):
            kind, parts = encode(record)
            self._add(0, kind, joined(parts), None)
        kind, body = copied(state, server.coordinator)
        frozen.close()
        self._add(last, kind, joined(body), list(server.history))
        return True

    def replace(self, before: "Primary") -> None:
        """What the one before has kept back may be said: nobody follows it any more."""
        self._drain()
        self._held = [(0, one) for _, one in before._held]

    def feed_record(self, kind: int, body: bytes, record: object) -> None:
        """A record is about to take effect."""
        if self.feed.attached:
            self.feed.append(kind, [body])
            self._said.append(record)

    def took(self, took: Took) -> None:
        """The standby has taken the stream up to a place."""
        if took.attach == self._attach:
            self._taken = max(self._taken, took.place)
            self.feed.took(took.attach, took.number)

    def send_again(self) -> None:
        """What the standby has not taken."""
        self._sent = min(self._sent, self._taken)

    def hurry(self) -> None:
        """From now on the stream is not late."""
        self._lengths = deque(self._lengths, 1)

    def hold(self, out: list[Instruction]) -> list[Instruction]:
        """What may be performed now: what others are told waits until the standby has what it rests on."""
        self._drain()
        self._lengths.append(len(self._stream))
        due = self._stream[self._sent : min(self._taken + _WINDOW, self._lengths[0])]
        self._sent += len(due)
        self._held += [(self.feed.end, one) for one in out if isinstance(one, Send)]
        free = [one for end, one in self._held if self._is_settled(end)]
        self._held = [(end, one) for end, one in self._held if not self._is_settled(end)]
        instructions = [one for one in out if not isinstance(one, Send)]
        return [*instructions, *(Send(self._to, part) for part in due), *free]

    def _drain(self) -> None:
        while self.feed._waiting:
            fed = next(self._records)
            said = self._said.pop(0) if fed.kind and self._said else None
            if fed.kind == RecordKind.COPIED:  # of a move
                said = list(self._server.history)
            self._add(fed.number, fed.kind, fed.body, said)

    def _is_settled(self, end: int) -> bool:
        return not self.feed.required or self.feed._taken >= end

    def _add(self, number: int, kind: int, body: bytes, record: object) -> None:
        place = len(self._stream) + 1
        self._stream.append(Part(self._attach, place, number, kind, body, record))
