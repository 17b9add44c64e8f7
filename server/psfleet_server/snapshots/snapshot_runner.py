"""Runs the snapshot coordinator on server 0: performs its instructions in the job's folder of snapshots.

One thread hands over the events, in order; another one calls the servers, which may take long.
"""

import contextlib
import functools
import json
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from psfleet.checkpoint import (
    CutPosition,
    Manifest,
    Part,
    SnapshotDraft,
    linked,
    merged_specs,
    read_manifest,
)
from psfleet.core.base.errors import CheckpointError, PsfleetError
from psfleet.core.base.faults import NO_CRASH, CrashFaults
from psfleet.core.base.logs import log_of
from psfleet.core.base.object_store import (
    base_of,
    is_whole,
    own_place,
    own_snapshots,
    remove_snapshot,
)
from psfleet.core.base.settings.kinds import local_path, place_or_url, shown_url, url_of
from psfleet.core.base.threads import ServiceThread
from psfleet.core.engine.shard.events import SendError
from psfleet.core.engine.shard.snapshot_cuts import PendingCut
from psfleet.core.engine.worker_state import redealt
from psfleet.core.net.connections.access import Access
from psfleet.core.net.membership_messages import read_mode
from psfleet.core.net.v1 import snapshot_pb2
from psfleet_server.durability.recovery import check_restart, workers_of
from psfleet_server.engine.shard_host import ShardHost
from psfleet_server.rpc.endpoints import Peer
from psfleet_server.snapshots.snapshot_coordinator import SnapshotCoordinator
from psfleet_server.snapshots.snapshot_events import (
    AnnounceSnapshot,
    AwaitParts,
    BeginCuts,
    CloseDraft,
    CompleteSnapshot,
    CutLost,
    CutMade,
    DraftOpened,
    MembersChanged,
    OpenDraft,
    PruneSnapshots,
    PublishSnapshot,
    ReleaseWorker,
    ServersReplied,
    SettleCuts,
    SnapshotEvent,
    SnapshotFailed,
    SnapshotInstruction,
    SnapshotPart,
    SnapshotPostponed,
    SnapshotPublished,
    SnapshotRequest,
    SnapshotRequested,
    SnapshotTimeouts,
    Standing,
    StopSnapshots,
    TimePassed,
    WarnOperator,
    WatchCut,
)
from psfleet_server.snapshots.snapshot_news import SnapshotNews

_log = log_of(__name__)
_LONGEST = threading.TIMEOUT_MAX
Ask = BeginCuts | AwaitParts | SettleCuts


class SnapshotFolder:
    """A job's own snapshots.

    Args:
        place: Folder, which may not exist yet, or URL.
        keep: Number of snapshots that stay in it.
    """

    def __init__(self, place: str, keep: int = 3) -> None:
        self._place = place
        self._keep = keep

    def last(self) -> int:
        """The highest number of a snapshot; 0: there is none."""
        return max((int(each[-6:]) for each in own_snapshots(self._place)), default=0)

    def path_of(self, number: int) -> str:
        """Where the snapshot of this number lies."""
        return own_place(self._place, number)

    def place(self, number: int) -> str:
        """Make room for a snapshot; where it is to lie."""
        if url_of(self._place) is None:
            folder = local_path(self._place)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # for the job's user only
            for draft in folder.glob(".snapshot-*.partial"):  # of a process that died
                shutil.rmtree(draft, ignore_errors=True)
        return self.path_of(number)

    def prune(self) -> None:
        """Remove all but the last few whole snapshots and what they build on; none may be under way."""
        snapshots = [place_or_url(each) for each in own_snapshots(self._place)]
        whole = list(filter(is_whole, snapshots))
        keep = {each for snapshot in whole[-self._keep :] for each in _chain(snapshot)}
        for each in snapshots:
            if each not in keep:
                remove_snapshot(each)


def _chain(snapshot: str) -> list[str]:
    """A snapshot and those that it builds on."""
    chain = [snapshot]
    while base := base_of(chain[-1]):
        chain.append(base)
    return chain


@dataclass(frozen=True)
class RestoredStates:
    """States from which workers continue.

    Attributes:
        states: By seat.
        others: Number of workers of that job, if not as many as this one; else 0.
    """

    states: Mapping[int, Any] = field(default_factory=dict)
    others: int = 0

    @classmethod
    def read(cls, snapshot: str, workers: int) -> "RestoredStates":
        """Those of a snapshot, for a job with so many workers."""
        before = workers_of(snapshot)
        return cls(read_manifest(snapshot).workers, before if before != workers else 0)

    def of(self, worker: int) -> bytes:
        """The state of a worker as JSON; empty: it has none."""
        state: Any = self.states.get(worker)
        if self.others:
            state = redealt(self.states, self.others, worker) or None
        return b"" if state is None else json.dumps(state).encode()


class SnapshotTicket(Future[tuple[int, str]]):
    """A snapshot that somebody has asked for; its result is the number and the path."""

    def fail(self, error: PsfleetError) -> None:
        """There is no snapshot."""
        self.set_exception(error)


class SnapshotRunner:
    """Takes the snapshots of a fleet.

    Args:
        host: Host of server 0.
        access: With what this server proves itself to the others.
        folder: Holds snapshots that are asked for without a path; None: there are none.
        timeouts: Time limit of each step.
        crashes: Crash points, for tests.

    Attributes:
        endpoints: Endpoints of the servers, in order.
        restored: States for workers that ask where to continue.
        latest: Time at which the last snapshot was complete, in seconds since the epoch, and its bytes; None:
            there was none since this process started.
        news: Calls of the workers that wait for the next snapshot.
    """

    def __init__(
        self,
        host: ShardHost,
        access: Access,
        folder: SnapshotFolder | None = None,
        timeouts: SnapshotTimeouts | None = None,
        crashes: CrashFaults = NO_CRASH,
    ) -> None:
        self.endpoints: Sequence[str] = ()
        self.restored = RestoredStates()
        self.latest: tuple[float, int] | None = None
        self.news = SnapshotNews()
        self._host = host
        self._access = access
        self._folder = folder
        self._timeouts = timeouts or SnapshotTimeouts()
        self._crashes = crashes
        self._coordinator = SnapshotCoordinator(self._timeouts)
        self._events: queue.SimpleQueue[SnapshotEvent | None] = queue.SimpleQueue()
        self._asks: queue.SimpleQueue[Ask | None] = queue.SimpleQueue()
        self._peers: list[Peer] = []
        self._from_before: frozenset[int] = frozenset()  # seats of a process before this one
        self._draft: SnapshotDraft | None = None
        self._place = ""  # of the snapshot under way
        self._number, self._began = 0, 0.0  # likewise
        self._opened = contextlib.ExitStack()  # resources of the snapshot under way
        self._thread = ServiceThread(self._run, "snapshots")
        self._caller = ServiceThread(self._call_servers, "snapshot calls")

    def start(self) -> None:
        """Begin to take snapshots."""
        self._from_before = frozenset(self._host.shard.workers.incarnations)
        self._host.members_changed = self.look_at_members
        self.look_at_members()
        self._thread.start()
        self._caller.start()

    def stop(self) -> None:
        """Begin no snapshot any more. The present one ends soon, unless its files are being written."""
        self.post(StopSnapshots())
        self.news.stop()

    def close(self) -> None:
        """End the threads; no requests follow. A snapshot under way is dropped."""
        self._events.put(None)
        if self._thread.ident is not None:
            self._thread.join()
            self._caller.join()

    def learn(self, endpoints: Sequence[str]) -> None:
        """Set the endpoints of all servers, in order; one that ends in :0 is not known yet."""
        if not any(endpoint.endswith(":0") for endpoint in endpoints) or not self.endpoints:
            self.endpoints = tuple(endpoints)

    def take(self, request: SnapshotRequest) -> SnapshotTicket:
        """Ask for a snapshot.

        Raises:
            CheckpointError: The job keeps no snapshots, and the request says no path.
            SnapshotPostponed: It is not known yet where all servers are.
        """
        unknown = [i for i, endpoint in enumerate(self.endpoints) if endpoint.endswith(":0")]
        if unknown or not self.endpoints:
            raise SnapshotPostponed(f"server 0 does not know yet where servers {unknown} listen")
        if not request.path and self._folder is None:
            raise CheckpointError("this job keeps no snapshots; say where the snapshot is to lie")
        highest = self._host.shard.cuts.last
        if self._folder is not None:
            highest = max(highest, self._folder.last())
        ticket = SnapshotTicket()
        self.post(SnapshotRequested(ticket, request, highest))
        return ticket

    def post(self, event: SnapshotEvent) -> None:
        """Hand over an event. Any thread may do so, whatever locks it holds."""
        self._events.put(event)

    def look_at_members(self) -> None:
        """Hand over who has left, and who has been heard."""
        coordinator = self._host.coordinator
        assert coordinator is not None
        with self._host.lock:
            leavers = frozenset(self._host.shard.rounds.left)
            heartbeats = {
                seat: heartbeat
                for (server, seat), (heartbeat, _) in coordinator.heartbeats.items()
                if not server
            }
            unheard = self._from_before - leavers - heartbeats.keys()
            last = max((heartbeat.snapshot for heartbeat in heartbeats.values()), default=0)
            self.post(MembersChanged(leavers, frozenset(heartbeats), unheard, last))

    def _run(self) -> None:
        while (event := self._next()) is not None:
            for instruction in self._coordinator.handle(event, time.monotonic()):
                self._perform(instruction)
        self._asks.put(None)
        self._opened.close()  # a call under way ends with its connection

    def _next(self) -> SnapshotEvent | None:
        seconds = min(self._coordinator.deadline - time.monotonic(), _LONGEST)
        try:
            return self._events.get(timeout=max(seconds, 0))
        except queue.Empty:
            return TimePassed()

    def _perform(self, instruction: SnapshotInstruction) -> None:
        match instruction:
            case BeginCuts() | AwaitParts() | SettleCuts():
                self._asks.put(instruction)
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
            case CloseDraft():
                self._opened.close()
            case PruneSnapshots():
                self._prune()
            case WarnOperator(line):
                _log.warning(line)

    def _attempt(self, step: Callable[[], SnapshotEvent]) -> None:
        """Hand over what comes of a step, or why nothing does."""
        try:
            self.post(step())
        except Exception as error:
            _log.warning(
                f"snapshot {self._number} fails: {error}", extra={"snapshot": self._number}
            )
            self.post(SnapshotFailed(error))

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
            is_lost = isinstance(outcome, PsfleetError)
            self.post(CutLost(number) if is_lost else CutMade(number))

        self._host.parts.await_part(number, told, cut=True)

    def _open(self, number: int, path: str) -> DraftOpened:
        place = place_or_url(path) if path else ""
        if not path:
            assert self._folder is not None
            place = self._folder.place(number)
        self._place, self._number, self._began = place, number, time.monotonic()
        _log.info(f"snapshot {number} begins, to {shown_url(place)!r}", extra={"snapshot": number})
        self._draft = self._opened.enter_context(SnapshotDraft(place, self._crashes))
        self._peers = [
            Peer.server(index, endpoint, self._access)
            for index, endpoint in enumerate(self.endpoints)
        ]
        for peer in self._peers:
            self._opened.callback(peer.close)
        return DraftOpened(place, self._draft.folder)

    def _publish(self, snapshot: PublishSnapshot) -> SnapshotPublished:
        draft = self._draft
        assert draft is not None
        files = tuple(part.file for part in snapshot.parts)
        specs = merged_specs([part.tables for part in snapshot.parts])
        link = linked(place_or_url(snapshot.base), self._place) if snapshot.base else None
        draft.finish(
            Manifest(specs, files, snapshot.cut, link, dict(snapshot.states)), check_restart
        )
        self._crashes.reach("complete")
        size, seconds = sum(file.bytes for file in files), time.monotonic() - self._began
        self.latest = time.time(), size
        fields = {"snapshot": self._number, "seconds": round(seconds, 3), "bytes": size}
        _log.info(
            f"snapshot {self._number} is complete: {size:,} bytes in {seconds:.2f} s", extra=fields
        )
        return SnapshotPublished()

    def _prune(self) -> None:
        assert self._folder is not None
        try:
            self._folder.prune()
        except (PsfleetError, OSError) as error:
            _log.warning(f"old snapshots are not removed: {error}")

    def _call_servers(self) -> None:
        while (ask := self._asks.get()) is not None:
            self._attempt(functools.partial(self._replies, ask))

    def _replies(self, ask: Ask) -> ServersReplied:
        return ServersReplied(tuple(self._ask(peer, ask) for peer in self._peers))

    def _ask(self, peer: Peer, ask: Ask) -> Any:
        match ask:
            case BeginCuts(folder, cutting):
                return self._begin(peer, _begin_request(folder, cutting, len(self._peers)))
            case AwaitParts(number, cut):
                return self._await_part(peer, number, cut)
            case SettleCuts():
                return self._settle(peer, ask)

    def _settle(self, peer: Peer, ask: SettleCuts) -> None:
        """Tell a server how a snapshot has ended; if it is away, it learns of it with the next one."""
        request = snapshot_pb2.SettleRequest(
            number=ask.number, complete=ask.complete, base=ask.base
        ).SerializeToString()
        with contextlib.suppress(PsfleetError):
            peer.call("Snapshots/Settle", request, self._timeouts.cut)

    def _begin(self, peer: Peer, request: bytes) -> Standing:
        reply = peer.call("Snapshots/Begin", request, self._timeouts.cut)
        message = snapshot_pb2.BeginCutReply.FromString(reply)
        mode = read_mode(message.mode) if message.mode else ""
        return Standing(
            mode, message.closed, dict(message.incarnations), tuple(message.delta_bases)
        )

    def _await_part(self, peer: Peer, number: int, cut: bool) -> SnapshotPart | None:
        request = snapshot_pb2.FinishRequest(number=number, cut=cut).SerializeToString()
        seconds = self._timeouts.cut if cut else self._timeouts.file
        reply = peer.call("Snapshots/Finish", request, seconds)
        return None if cut else _part(number, snapshot_pb2.FinishReply.FromString(reply).part)


def _begin_request(folder: str, cutting: PendingCut, servers: int) -> bytes:
    return snapshot_pb2.BeginCutRequest(
        number=cutting.number,
        folder=folder,
        hold=cutting.round is None and cutting.members is None,
        at_round=cutting.round is not None,
        round=cutting.round or 0,
        members=cutting.members or {},
        since=cutting.since,
        remember=cutting.remember,
        servers=servers,
    ).SerializeToString()


def _part(number: int, content: bytes) -> SnapshotPart:
    part = Part.decode(content)
    return SnapshotPart(CutPosition(number, part.mode, part.round, part.pushes), part)
