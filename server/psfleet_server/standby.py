"""A standby process: follows its primary record by record, until the launcher promotes it.

Fencing works without clocks or leases. A primary that requires a standby sends no reply before the standby
has confirmed the records that the reply depends on. A standby that takes over never confirms a record again.
So a deposed primary can send no reply, whether it is dead, stopped or only slow, and it ends when it learns
of the takeover.

The launcher decides takeovers (docs/decisions/0019-standbys.md) and writes its commands, one per line, to the
standard input of servers and standbys:

    promote TERM     to a standby: take the place of the primary, which has ended or is about to be ended
    release ATTACH   to a primary: no standby up to this attachment number will ever take over

The launcher numbers the standbys of a server in rising order; such a number is an attachment number.

Only the process that started this one can write to that input, and lines arrive in order. A separate thread
reads the commands, because all threads that handle calls may be waiting for the very standby that is to be
released.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import grpc

from psfleet.core.base import crash_points
from psfleet.core.base.errors import ProtocolError, PsfleetError, ServerUnavailable
from psfleet.core.base.logs import log_of
from psfleet.core.base.settings.environment import Environment
from psfleet.core.base.threads import ServiceThread
from psfleet.core.net.body import read_record
from psfleet.core.net.connections.access import Access
from psfleet.core.net.connections.channel import await_connection, open_channel
from psfleet.core.net.connections.error_statuses import error_of
from psfleet.core.net.v1.replica_pb2 import FollowRequest
from psfleet_server.durability.log import VERSION
from psfleet_server.durability.recovery import take
from psfleet_server.engine.shard_host import ShardHost

_FIRST = 60.0  # seconds within which the primary must have answered for the first time
_MOMENT = 0.5  # seconds to wait for a connection, between attempts
_PAUSE = 0.05  # seconds between attempts while the primary still has another standby
_ORPHAN = 30.0  # seconds that a standby waits for its command when the primary is gone

_News = tuple[Literal["promoted", "required", "lost", "failed", "over", "stopped"], str]


_log = log_of(__name__)


class Standby:
    """Follows the primary of the same server, in a thread, and applies its records to this process's shard.

    Attributes:
        taken: Number of the last record that was applied.
        records: Number of records applied, including those of the first copy.
        bytes: Bytes of these records.
        metrics: Returns the metrics of this process as text.
        term: Number that the launcher gave to the takeover by this process, or 0 while this process follows.
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
        # Held while a record is applied and confirmed, and while `promote` sets `term`. So a record is either
        # applied before the takeover, or never confirmed.
        self._taking = threading.Lock()
        self._journal = host.journal
        self._required = False
        self._following = False  # a message has come from the primary
        self._channel: grpc.Channel | None = None

    def start(self) -> None:
        """Connect to the primary, and start the thread that follows it."""
        self._channel = open_channel(self._endpoint, self._access)
        ServiceThread(self._run, "following").start()

    def wait(self) -> Literal["promoted", "required", "over", "stopped"]:
        """Wait for the next change of this standby's role.

        Returns:
            "required" when the primary's replies begin to wait for this standby, "promoted" after a takeover,
            "over" if the primary has shut down, and "stopped" after `stop`.

        Raises:
            ServerUnavailable: The primary is gone and no command to take over has come, or the primary has
                sent a record that this standby cannot apply or keep.
        """
        news, why = self._news.get()
        while news == "lost":
            try:
                news, _ = self._news.get(timeout=_ORPHAN if self._required else 0.0)
            except queue.Empty:
                raise ServerUnavailable(why) from None
        if news == "failed":
            raise ServerUnavailable(why)
        return news

    def promote(self, term: int) -> None:
        """Stop applying records. From now on this process is the primary.

        Args:
            term: Number of the takeover, assigned by the launcher. Later takeovers have higher numbers.
        """
        with self._taking:
            self.term = term
        self._said.put(FollowRequest(term=term))
        self._said.put(None)
        self._news.put(("promoted", ""))

    def stop(self) -> None:
        """Make `wait` return. Signal handlers may call it."""
        self._news.put(("stopped", ""))

    def close(self) -> None:
        """Close the connection to the primary."""
        self._said.put(None)
        if self._channel is not None:
            self._channel.close()

    def _run(self) -> None:
        assert self._channel is not None
        deadline = time.monotonic() + _FIRST
        while True:
            try:
                error = self._follow()
            # A full disk, or any other error: a record of a faulty primary may raise any exception.
            except Exception as failure:
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
        """Follow the primary over one stream.

        Returns:
            The error that broke the stream, or None if the primary has shut down.
        """
        assert self._channel is not None
        call: Any = self._channel.stream_stream("/psfleet.v1.Replica/Follow", None, None)(
            self._requests(), metadata=self._access.metadata
        )
        parts: list[memoryview] = []
        try:
            for message in call:
                self._following = True
                reply, part = read_record(message)
                # After a takeover the old primary may still send. Its messages are skipped, but the stream
                # stays open so that the old primary can receive this process's term.
                if self.term:
                    continue
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
        """Handle the primary's message that its replies now wait for this standby.

        The first such message comes after the copy of the tables. Later messages have a number. This process
        confirms the number to show that it still follows, unless it has taken over.
        """
        if not self._required:
            # First note it in the log: once this process has reported to the launcher that it is ready, it
            # may be promoted, or a server may be started from its log.
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
            # Waiting confirmations are merged into one message, because the last one includes all records
            # before it.
            while not request.term and not self._said.empty():
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
            crash_points.reach("receive")
            if self._journal is not None:
                self._journal.follow(kind, body)
            take(kind, body, self._host.shard, self._host.coordinator)
            crash_points.reach("took")
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
    """Return whether the primary may accept this standby later.

    The primary may still be starting, or may still have another standby (ProtocolError).
    """
    return isinstance(error, (ServerUnavailable, ProtocolError))


class TakeoverCommands:
    """Thread that reads and carries out the launcher's commands, until the input ends.

    Args:
        release: Called for `release ATTACH`: stops waiting for standbys up to number ATTACH. The launcher
            numbers the standbys of a server.
        standby: Returns this process's Standby, or None if the process is a primary.
        source: File descriptor of the commands.
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
        """Start the thread, which ends with the process."""
        ServiceThread(self._run, "takeover_commands").start()

    def _run(self) -> None:
        text = b""
        while data := os.read(self._source, 4096):
            *lines, text = (text + data).split(b"\n")
            for line in lines:
                self._obey(line.decode(errors="replace"))

    def _obey(self, line: str) -> None:
        command, _, number = line.partition(" ")
        standby = self._standby()
        if command == "release" and number.isdigit():
            self._release(int(number))
        elif command == "promote" and number.isdigit() and standby is not None:
            standby.promote(int(number))
        else:
            _log.warning(f"order {line!r} is no takeover command")
