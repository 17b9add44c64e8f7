"""A standby: follows its primary record by record, until the launcher promotes it.

Fencing: a standby that takes over never again tells its primary that it has taken a record, and a
primary that requires a standby answers no call without it. So the one that was deposed can answer
nothing, whether it is dead, stopped or only slow to notice; when it hears of it, it ends.

    promote TERM     a standby: take the place of the primary, which has ended or is to end
    release ATTACH   a primary: no standby up to this attachment will ever take over

Only the process that started this one can write them, they arrive in order, and they need no thread
that answers calls, all of which may be waiting for the very standby that is to be released.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import grpc

from psfleet.core.base import faults
from psfleet.core.base.errors import ProtocolError, PsfleetError, ServerUnavailable
from psfleet.core.base.logs import log_of
from psfleet.core.base.settings.environment import Environment
from psfleet.core.base.threads import ServiceThread
from psfleet.core.net.body import read_record
from psfleet.core.net.connections.access import Access
from psfleet.core.net.connections.channel import await_connection, error_of, open_channel
from psfleet.core.net.v1.replica_pb2 import FollowRequest
from psfleet_server.durability.log import VERSION
from psfleet_server.durability.recovery import take
from psfleet_server.engine.shard_host import ShardHost

_FIRST = 60.0  # seconds until the primary must have answered
_MOMENT = 0.5  # for a connection, between tries
_PAUSE = 0.05  # between tries while the primary has another standby
_ORPHAN = 30.0  # seconds that a standby waits for its order when the primary is gone

_News = tuple[Literal["promoted", "required", "lost", "failed", "over", "stopped"], str]


_log = log_of(__name__)


class Standby:
    """Follows the primary of the same server.

    Args:
        host: Gets all that the primary holds.
        environment: Environment of this process.
        access: With what it proves itself.

    Attributes:
        taken: Number of the last record that it has taken.
        records, bytes: How many it has taken, those of the copy too, and how long they were.
        metrics: Gives those of this process as text.
        term: With which it has taken over; 0: it follows.
    """

    def __init__(self, host: ShardHost, environment: Environment, access: Access) -> None:
        self.taken = 0
        self.records = 0
        self.bytes = 0
        self.metrics: Callable[[], bytes] = lambda: b""
        self.term = 0
        self._host = host
        self._attach = environment.standby
        self._endpoint = environment.servers[environment.rank]
        self._name = f"the primary of server {environment.rank} at {self._endpoint}"
        self._access = access
        self._news: queue.SimpleQueue[_News] = queue.SimpleQueue()
        self._said: queue.SimpleQueue[FollowRequest | None] = queue.SimpleQueue()
        self._taking = threading.Lock()  # held while a record is taken
        self._journal = host.journal
        self._required = False
        self._following = False  # something has come from the primary
        self._channel: grpc.Channel | None = None

    def start(self) -> None:
        """Begin to follow."""
        self._channel = open_channel(self._endpoint, self._access)
        ServiceThread(self._run, "following").start()

    def wait(self) -> Literal["promoted", "required", "over", "stopped"]:
        """The next news: the primary requires it, it has taken over, or it is not needed.

        Raises:
            ServerUnavailable: The primary is gone, and there was no order to take over; or it has sent a
                record that this standby cannot take or keep.
        """
        what, why = self._news.get()
        while what == "lost":
            try:
                what, _ = self._news.get(timeout=_ORPHAN if self._required else 0.0)
            except queue.Empty:
                raise ServerUnavailable(why) from None
        if what == "failed":
            raise ServerUnavailable(why)
        return what

    def promote(self, term: int) -> None:
        """Take no more records: from now on this process is the primary."""
        with self._taking:
            self.term = term
        self._said.put(FollowRequest(term=term))
        self._said.put(None)
        self._news.put(("promoted", ""))

    def stop(self) -> None:
        """Let `wait` return. Signal handlers may call it."""
        self._news.put(("stopped", ""))

    def close(self) -> None:
        """Let go of the primary."""
        self._said.put(None)
        if self._channel is not None:
            self._channel.close()

    def _run(self) -> None:
        assert self._channel is not None
        deadline = time.monotonic() + _FIRST
        while True:
            try:
                error = self._follow()
            except (
                Exception
            ) as failure:  # a full disk; and there is no end to what a record can hold
                cause = str(failure) if isinstance(failure, PsfleetError) else repr(failure)
                why = f"{self._name} is lost, what it has sent cannot be taken: {cause}"
                self._news.put(("failed", why))
                return
            if self.term:
                return
            if error is None:
                self._news.put(("over", ""))
                return
            if self._following or not _is_starting(error) or time.monotonic() > deadline:
                self._news.put(("lost", f"{self._name} is lost: {error}"))
                return
            if isinstance(error, ServerUnavailable):
                await_connection(self._channel, self._access, _MOMENT)
            else:
                time.sleep(_PAUSE)

    def _follow(self) -> PsfleetError | None:
        """Follow while the primary runs; None: it has ended in order."""
        assert self._channel is not None
        call: Any = self._channel.stream_stream("/psfleet.v1.Replica/Follow", None, None)(
            self._requests(), metadata=self._access.metadata
        )
        parts: list[memoryview] = []
        try:
            for message in call:
                self._following = True
                reply, part = read_record(message)
                if self.term:
                    continue  # the old primary may still send
                if reply.over:
                    return None
                if reply.required:
                    self._be_required(reply.number)
                    continue
                if reply.complete:
                    self._shorten(reply.complete)
                    continue
                if reply.wants_metrics:
                    ServiceThread(
                        self._tell_metrics, "metrics"
                    ).start()  # records do not wait for it
                    continue
                parts.append(part)
                if not reply.more:
                    body = part if len(parts) == 1 else memoryview(b"".join(parts))
                    self._take(reply.number, reply.kind, body)
                    parts = []
        except grpc.RpcError as error:
            return error_of(error, self._name)
        finally:
            call.cancel()
        return ServerUnavailable(f"{self._name} has let go of its standby")

    def _be_required(self, number: int) -> None:
        """The primary waits for this process; it is told so again to confirm that it follows still."""
        if not self._required:
            # Before anybody can promote this process, or start one from its log.
            if self._journal is not None:
                self._journal.has_copy()
            self._required = True
            self._news.put(("required", ""))
        with self._taking:
            if number and not self.term:
                self._took(number)

    def _requests(self) -> Iterator[bytes]:
        shard = self._host.shard
        first = FollowRequest(
            server=shard.index, attach=self._attach, version=VERSION, servers=shard.servers
        )
        yield first.SerializeToString()
        while (request := self._said.get()) is not None:
            while not request.term and not self._said.empty():  # one message says it all
                later = self._said.get()
                if later is None:
                    return
                later.metrics = later.metrics or request.metrics
                later.taken = max(later.taken, request.taken)  # metrics name an older record
                request = later
            yield request.SerializeToString()

    def _take(self, number: int, kind: int, body: memoryview) -> None:
        with self._taking:
            if self.term:
                return
            faults.reach("receive")
            if self._journal is not None:
                self._journal.follow(kind, body)
            take(kind, body, self._host.shard, self._host.coordinator)
            faults.reach("took")
            self.records += 1
            self.bytes += len(body)
            if number:
                self._took(number)

    def _took(self, number: int) -> None:
        self.taken = number
        self._said.put(FollowRequest(taken=number))

    def _tell_metrics(self) -> None:
        self._said.put(FollowRequest(taken=self.taken, metrics=self.metrics()))

    def _shorten(self, snapshot: int) -> None:
        with self._taking:
            journal = self._journal
            if journal is not None and not self.term and journal.can_start_from(snapshot):
                journal.shorten(snapshot)


def _is_starting(error: PsfleetError) -> bool:
    """Return whether the primary may answer later."""
    return isinstance(error, (ServerUnavailable, ProtocolError))


class TakeoverCommands:
    """Obeys until the input ends.

    Args:
        release: Lets standbys of this process go, as a primary, up to a number.
        standby: This process as a standby; None: it is none.
        source: File descriptor of the orders.
    """

    def __init__(
        self,
        release: Callable[[int], object],
        standby: Callable[[], Standby | None],
        source: int = 0,
    ) -> None:
        self._release = release
        self._standby = standby
        self._source = source

    def start(self) -> None:
        """Begin to listen; the thread ends with the process."""
        ServiceThread(self._run, "takeover_commands").start()

    def _run(self) -> None:
        text = b""
        while data := os.read(self._source, 4096):
            *lines, text = (text + data).split(b"\n")
            for line in lines:
                self._obey(line.decode(errors="replace"))

    def _obey(self, line: str) -> None:
        what, _, number = line.partition(" ")
        standby = self._standby()
        if what == "release" and number.isdigit():
            self._release(int(number))
        elif what == "promote" and number.isdigit() and standby is not None:
            standby.promote(int(number))
        else:
            _log.warning(f"order {line!r} is no takeover command")
