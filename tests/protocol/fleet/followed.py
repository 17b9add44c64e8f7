"""What a server has for followers: the replies of the product, and what it holds when it gives them."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from psfleet.core.base.errors import PsfleetError
from psfleet.core.engine.shard.events import SendError
from psfleet.core.engine.shard.follower_changes import ChangeLog
from psfleet.core.net.table_messages import read_reply
from psfleet.core.net.v1.follower_pb2 import ChangesRequest, RowsReply, RowsRequest
from psfleet_server.engine.follower_requests import Followers, SendChanges
from tests.protocol.fleet.calls import Request, Response
from tests.protocol.fleet.follower import Changes, checksum, content_of
from tests.protocol.scheduler import Instruction, Received, Send, Tick

if TYPE_CHECKING:
    from tests.protocol.fleet.server import Server

_KEPT = 60  # ids of changed rows
_PAGE = 8  # rows
_WAIT = 3  # ticks for a round


class Followed:
    """Answers followers of one server, beside its shard."""

    def __init__(self, server: "Server") -> None:
        self._shard = server.its_shard
        self._shard.tables.changes = ChangeLog(_KEPT)
        self._followers = Followers(self._shard, server.boot, self._number_of, page=_PAGE)
        self._server = server
        self._waits: dict[Any, int] = {}  # ticks by call

    def _number_of(self, sha256: str) -> int:
        numbers = [number for number in self._server.parts if checksum(number) == sha256]
        return numbers[0] if numbers else 0

    def handle(self, event: Any) -> list[Instruction]:
        """Take what has happened to the server, after the server has."""
        match event:
            case Received(source, Request(number, ChangesRequest() as request)):
                self._waits.setdefault((source, number), 0)
                call: Any = (source, number)
                return self._sent(self._followers.ask(request, call))
            case Received(source, Request(number, RowsRequest() as request)):
                try:
                    content: Any = RowsReply.FromString(self._followers.rows(request))
                except PsfleetError as error:
                    content = error
                return [Send(source, Response(number, content))]
            case Tick():
                return self._tick()
        return self._sent(self._followers.due())

    def _tick(self) -> list[Instruction]:
        self._waits = {call: ticks + 1 for call, ticks in self._waits.items()}
        late = [call for call, ticks in self._waits.items() if ticks > _WAIT]
        return [sent for call in late for sent in self._sent(self._followers.expire(call))]

    def _sent(self, changes: Iterable[SendChanges | SendError]) -> list[Instruction]:
        sent: list[Instruction] = []
        for one in changes:
            assert isinstance(one, SendChanges), one.error
            call: Any = one.call
            self._waits.pop(call, None)
            source, number = call
            held = content_of(self._shard)
            reply = read_reply(one.changes)
            reply.microseconds = reply.process_microseconds = 0  # times are the seed's
            sent.append(Send(source, Response(number, Changes(reply, held))))
        return sent
