"""Runs the snapshot coordinator on server 0: performs its instructions on disk and on the servers.

One thread passes events to the coordinator, in order, and does the steps on disk. A second thread calls the
servers, which may take long. A step that fails ends only the snapshot; any other failure of a thread ends the
process.
"""

import contextlib
import functools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from psfleet.checkpoint import CutPosition, Manifest, Part, SnapshotDraft, linked, merged_specs
from psfleet.core.base import crash_points
from psfleet.core.base.errors import CheckpointError, PsfleetError
from psfleet.core.base.logs import log_of
from psfleet.core.base.settings.kinds import place_or_url, shown_url
from psfleet.core.base.threads import ServiceThread
from psfleet.core.engine.shard.events import SendError
from psfleet.core.net.connections.access import Access
from psfleet.core.net.membership_messages import read_mode
from psfleet.core.net.v1 import snapshot_pb2
from psfleet_server.durability.recovery import check_restart
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.endpoints import Peer
from psfleet_server.snapshots.job_snapshots import RestoredStates, SnapshotFolder
from psfleet_server.snapshots.snapshot_coordinator import (
    AnnounceSnapshot,
    AwaitParts,
    BeginCuts,
    CloseDraft,
    CompleteSnapshot,
    OpenDraft,
    PublishSnapshot,
    ReleaseWorker,
    ServerCalls,
    SettleCuts,
    SnapshotCoordinator,
    SnapshotEvent,
    SnapshotInstruction,
    SnapshotPostponed,
    SnapshotRequest,
    SnapshotTimeouts,
    Standing,
    WarnOperator,
    WatchCut,
)
from psfleet_server.snapshots.snapshot_news import SnapshotNews

_log = log_of(__name__)
_LONGEST = threading.TIMEOUT_MAX


class SnapshotTicket(Future[tuple[int, str]]):
    """Handle of a requested snapshot. Its result is the snapshot's number and path."""

    def fail(self, error: PsfleetError) -> None:
        """End the request with an error. There is no snapshot."""
        self.set_exception(error)


class SnapshotRunner:
    """Takes the snapshots of a fleet, one at a time.

    Args:
        host: Host of server 0's shard.
        access: Credentials for calls of the other servers.
        folder: Folder of snapshots that are requested without a path, or None if the job keeps none.
        timeouts: Time limit of each step.

    Attributes:
        endpoints: Endpoint of each server, by its index.
        restored: States for workers that request where to continue after a restore.
        latest: Time at which the last snapshot was complete, in seconds since the epoch, and its size in
            bytes. None if this process has completed no snapshot.
        news: Calls of workers that wait for the next snapshot.
    """

    def __init__(
        self,
        host: ShardHost,
        access: Access,
        folder: SnapshotFolder | None = None,
        timeouts: SnapshotTimeouts | None = None,
    ) -> None:
        self.endpoints: Sequence[str] = ()
        self.restored = RestoredStates()
        self.latest: tuple[float, int] | None = None
        self.news = SnapshotNews()
        self._host = host
        self._access = access
        self._folder = folder
        self._timeouts = timeouts or SnapshotTimeouts()
        self._coordinator = SnapshotCoordinator(self._timeouts, time.monotonic)
        self._events: queue.SimpleQueue[SnapshotEvent | None] = queue.SimpleQueue()
        self._server_calls: queue.SimpleQueue[ServerCalls | None] = queue.SimpleQueue()
        # Workers that an earlier process of this server knew.
        self._earlier_seats: frozenset[int] = frozenset()
        # Of the snapshot in progress: its servers, draft, path, number, start time, and objects to close.
        self._peers: list[Peer] = []
        self._draft: SnapshotDraft | None = None
        self._path, self._number, self._began = "", 0, 0.0
        self._opened = contextlib.ExitStack()
        self._thread = ServiceThread(self._run, "snapshots")
        self._caller = ServiceThread(self._call_servers, "snapshot calls")

    def start(self) -> None:
        """Start to take snapshots."""
        self._earlier_seats = frozenset(self._host.shard.workers.incarnations)
        self._host.members_changed = self.look_at_members
        self.look_at_members()
        self._thread.start()
        self._caller.start()

    def stop(self) -> None:
        """Take no more snapshots.

        A snapshot in progress is given up if it waits for workers or a round. If it waits for servers, it is
        finished.
        """
        self.post(SnapshotCoordinator.stop)
        self.news.stop()

    def close(self) -> None:
        """End the threads, and drop a snapshot in progress. Call it after the last request."""
        self._events.put(None)
        if self._thread.ident is not None:
            self._thread.join()
            self._caller.join()

    def learn(self, endpoints: Sequence[str]) -> None:
        """Set the endpoints of all servers, by index.

        Port 0 in an endpoint means that the port is not known yet. A list with such an endpoint is ignored if
        an earlier list is known.
        """
        if not any(endpoint.endswith(":0") for endpoint in endpoints) or not self.endpoints:
            self.endpoints = tuple(endpoints)

    def take(self, request: SnapshotRequest) -> SnapshotTicket:
        """Request a snapshot. The ticket's result is set when the snapshot is complete.

        Raises:
            CheckpointError: The job keeps no snapshots, and the request has no path.
            SnapshotPostponed: This server does not know the endpoints of all servers yet.
        """
        unknown = [i for i, endpoint in enumerate(self.endpoints) if endpoint.endswith(":0")]
        if unknown or not self.endpoints:
            raise SnapshotPostponed(f"server 0 does not know yet where servers {unknown} listen")
        if not request.path and self._folder is None:
            raise CheckpointError("this job keeps no snapshots; say where the snapshot is to lie")
        seen = self._host.shard.cuts.last
        if self._folder is not None:
            seen = max(seen, self._folder.last())
        ticket = SnapshotTicket()
        self.post(lambda coordinator: coordinator.request(ticket, request, seen))
        return ticket

    def post(self, event: SnapshotEvent) -> None:
        """Queue an event for the coordinator. Thread-safe, and may be called while holding any lock."""
        self._events.put(event)

    def look_at_members(self) -> None:
        """Pass to the coordinator which workers have left and which have sent heartbeats."""
        coordinator = self._host.coordinator
        assert coordinator is not None
        with self._host.lock:
            left = frozenset(self._host.shard.rounds.left)
            heartbeats = {
                seat: heartbeat
                for (server, seat), (heartbeat, _) in coordinator.heartbeats.items()
                if not server
            }
            alive = frozenset(heartbeats)
            unheard = self._earlier_seats - left - alive
            last = max((heartbeat.snapshot for heartbeat in heartbeats.values()), default=0)
            # Posted within the lock, so that no earlier view of the members comes after a later one.
            self.post(lambda machine: machine.members_changed(left, alive, unheard, last))

    def _run(self) -> None:
        while (event := self._next()) is not None:
            for instruction in event(self._coordinator):
                self._perform(instruction)
        self._server_calls.put(None)
        self._opened.close()  # a call under way ends with its connection

    def _next(self) -> SnapshotEvent | None:
        seconds = min(self._coordinator.deadline - time.monotonic(), _LONGEST)
        try:
            return self._events.get(timeout=max(seconds, 0))
        except queue.Empty:
            return SnapshotCoordinator.time_passed

    def _perform(self, instruction: SnapshotInstruction) -> None:
        match instruction:
            case BeginCuts() | AwaitParts() | SettleCuts():
                self._server_calls.put(instruction)
            case OpenDraft(number, path):
                self._attempt(lambda: self._open(number, path))
            case PublishSnapshot():
                self._attempt(lambda: self._publish(instruction))
            case WatchCut(number):
                self._watch_cut(number)
            case AnnounceSnapshot(announced):
                self._announce(announced)
            case ReleaseWorker(call, mark, last, script_waits):
                reply: Any = call
                message = snapshot_pb2.ReadyReply(mark=mark, round=last, script_waits=script_waits)
                reply.complete(message.SerializeToString())
            case SendError(call, error):
                caller: Any = call
                caller.fail(error)
            case CompleteSnapshot(call, number, path):
                assert isinstance(call, SnapshotTicket)
                self._tell_workers(number, path)
                call.set_result((number, path))
            case CloseDraft(prune):
                self._opened.close()
                if prune:
                    self._prune()
            case WarnOperator(line):
                _log.warning(line)

    def _attempt(self, step: Callable[[], SnapshotEvent]) -> None:
        """Run a step of the snapshot, and post the event that it returns, or its error."""
        try:
            self.post(step())
        except Exception as error:
            failure = error  # `error` ends with this block, and the event runs later
            _log.warning(
                f"snapshot {self._number} fails: {error}", extra={"snapshot": self._number}
            )
            self.post(lambda coordinator: coordinator.step_failed(failure))

    def _announce(self, number: int | None) -> None:
        coordinator = self._host.coordinator
        assert coordinator is not None
        with self._host.lock:
            order = None if number is None else (number, coordinator.view)
            coordinator.worker_requests.snapshot = order
        self.news.announce(number or 0)

    def _tell_workers(self, number: int, path: str) -> None:
        if self._folder is not None and path == self._folder.path_of(number):
            coordinator = self._host.coordinator
            assert coordinator is not None
            with self._host.lock:
                coordinator.worker_requests.complete = number, path

    def _watch_cut(self, number: int) -> None:
        def told(outcome: bytes | PsfleetError) -> None:
            failure = outcome if isinstance(outcome, PsfleetError) else None
            self.post(lambda coordinator: coordinator.cut_ended(number, failure))

        self._host.parts.await_part(number, told, cut=True)

    def _open(self, number: int, requested_path: str) -> SnapshotEvent:
        if requested_path:
            path = place_or_url(requested_path)
        else:
            assert self._folder is not None
            path = self._folder.prepare(number)
        self._path, self._number, self._began = path, number, time.monotonic()
        _log.info(f"snapshot {number} begins, to {shown_url(path)!r}", extra={"snapshot": number})
        draft = self._draft = self._opened.enter_context(SnapshotDraft(path))
        self._peers = [
            self._opened.enter_context(
                contextlib.closing(Peer.server(index, endpoint, self._access))
            )
            for index, endpoint in enumerate(self.endpoints)
        ]
        return lambda coordinator: coordinator.draft_opened(path, draft.folder)

    def _publish(self, snapshot: PublishSnapshot) -> SnapshotEvent:
        draft, first = self._draft, snapshot.parts[0]
        assert draft is not None
        files = tuple(part.file for part in snapshot.parts)
        specs = merged_specs([part.tables for part in snapshot.parts])
        cut = CutPosition(snapshot.number, first.mode, first.round, first.pushes)
        link = linked(place_or_url(snapshot.base), self._path) if snapshot.base else None
        draft.finish(Manifest(specs, files, cut, link, dict(snapshot.states)), check_restart)
        crash_points.reach("complete")
        size, seconds = sum(file.bytes for file in files), time.monotonic() - self._began
        self.latest = time.time(), size
        fields = {"snapshot": self._number, "seconds": round(seconds, 3), "bytes": size}
        _log.info(
            f"snapshot {self._number} is complete: {size:,} bytes in {seconds:.2f} s", extra=fields
        )
        return SnapshotCoordinator.published

    def _prune(self) -> None:
        assert self._folder is not None
        try:
            self._folder.prune()
        except (PsfleetError, OSError) as error:
            _log.warning(f"old snapshots are not removed: {error}")

    def _call_servers(self) -> None:
        while (request := self._server_calls.get()) is not None:
            self._attempt(functools.partial(self._call_each, request))

    def _call_each(self, request: ServerCalls) -> SnapshotEvent:
        replies = [self._call(peer, request) for peer in self._peers]
        return lambda coordinator: coordinator.servers_replied(replies)

    def _call(self, peer: Peer, request: ServerCalls) -> Standing | Part | None:
        match request:
            case BeginCuts(folder, cutting):
                begin = snapshot_pb2.BeginCutRequest(
                    number=cutting.number,
                    folder=folder,
                    hold=cutting.round is None and cutting.members is None,
                    at_round=cutting.round is not None,
                    round=cutting.round or 0,
                    members=cutting.members or {},
                    since=cutting.since,
                    remember=cutting.remember,
                    servers=len(self._peers),
                )
                reply = peer.call("Snapshots/Begin", begin.SerializeToString(), self._timeouts.cut)
                standing = snapshot_pb2.BeginCutReply.FromString(reply)
                return Standing(
                    read_mode(standing.mode) if standing.mode else "",
                    standing.closed,
                    dict(standing.incarnations),
                    tuple(standing.delta_bases),
                )
            case AwaitParts(number, cut):
                finish = snapshot_pb2.FinishRequest(number=number, cut=cut)
                seconds = self._timeouts.cut if cut else self._timeouts.file
                reply = peer.call("Snapshots/Finish", finish.SerializeToString(), seconds)
                return None if cut else Part.decode(snapshot_pb2.FinishReply.FromString(reply).part)
            case SettleCuts(number, complete, base):
                settle = snapshot_pb2.SettleRequest(number=number, complete=complete, base=base)
                # A server that is away learns with the next snapshot how this one has ended.
                with contextlib.suppress(PsfleetError):
                    peer.call("Snapshots/Settle", settle.SerializeToString(), self._timeouts.cut)
                return None
