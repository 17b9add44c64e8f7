"""State machine of a snapshot, on server 0. Cuts all servers at one point, awaits their files and publishes.

A snapshot holds the same pushes on all servers, although training continues while it is taken. In sync mode
all servers cut after the same round. In other modes every worker marks its stream of pushes, and each server
cuts each stream at the mark.

IDLE -> NUMBERING -> OPENING -> HOLDING <-> DISAGREEING
                                  `-> PLACING -> AWAITING_ROUND (sync, at a multiple of rounds)
                                        |   `-> AWAITING_WORKERS (other modes)
                                        `-> CUTTING -> WRITING -> AWAITING_STATES -> PUBLISHING
                                                                  SETTLING -> IDLE <-'

Any failure leads to SETTLING and ends this snapshot only; the next one has a higher number (rules R11 to R13
of the protocol). Requests that come meanwhile wait in a queue. Pure like the shard: events in, instructions
out; `SnapshotRunner` performs the instructions. Times are seconds of the caller's clock.
"""

from collections import deque
from typing import Any

from psfleet.core.base.errors import CheckpointError, DeadlineExceeded
from psfleet.core.engine.consistency import find_mode
from psfleet.core.engine.shard.events import SendError
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
    ServersReplied,
    SettleCuts,
    SnapshotEvent,
    SnapshotFailed,
    SnapshotInstruction,
    SnapshotPostponed,
    SnapshotPublished,
    SnapshotRequested,
    SnapshotTimeouts,
    Standing,
    StopSnapshots,
    TimePassed,
    WarnOperator,
    WatchCut,
    WorkerIntroduced,
    WorkerLearned,
    WorkerStateArrived,
)
from psfleet_server.snapshots.snapshot_under_way import (
    ANNOUNCED,
    NEVER,
    SnapshotUnderWay,
    Stage,
    WorkerStates,
)

_RETRY = 0.05  # seconds until servers that disagree are asked again

Instructions = list[SnapshotInstruction]


class SnapshotCoordinator:
    """Takes snapshots one after the other, on server 0. Call `handle` with every event, from one thread.

    Attributes:
        stage: Stage of the snapshot under way.
        deadline: Time at which the caller must send TimePassed; infinite if nothing waits for time.
        is_stopping: True once the server ends: requests are refused, and no wait takes time.
    """

    def __init__(self, timeouts: SnapshotTimeouts | None = None) -> None:
        self.stage = Stage.IDLE
        self.deadline = NEVER
        self.is_stopping = False
        self._timeouts = timeouts or SnapshotTimeouts()
        self._queue: deque[SnapshotRequested] = deque()
        self._snapshot: SnapshotUnderWay | None = None
        self._number = 0  # of the last snapshot that was begun
        self._last_round = 0  # in the last complete snapshot
        self._last_base: tuple[int, str] | None = None
        self._workers = WorkerStates()
        self._at = 0.0  # time of the event that is handled

    def handle(self, event: SnapshotEvent, at: float) -> Instructions:
        """Take an event that happens at time `at` and return the instructions to perform, in order."""
        self._at = at
        match event:
            case SnapshotRequested():
                return self._requested(event)
            case DraftOpened(path, folder):
                return self._opened(path, folder, at)
            case ServersReplied(replies):
                return self._replied(replies, at)
            case SnapshotFailed(error):
                return self._fail(error)
            case SnapshotPublished():
                return self._published()
            case CutMade(number):
                return self._cut_made(number, at)
            case CutLost(number):
                return self._cut_lost(number)
            case WorkerLearned():
                return self._learned(event)
            case WorkerIntroduced():
                self._workers.introduce(event)
            case WorkerStateArrived():
                self._state_arrived(event)
            case MembersChanged():
                self._workers.change(event)
            case TimePassed():
                return self._overdue(at)
            case StopSnapshots():
                return self._stop(at)
        return self._advance()

    def validate(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        now, stage = self._snapshot, self.stage
        assert (now is None) == (stage is Stage.IDLE)
        assert now is not None or not self._queue
        assert not (self.is_stopping and self._queue)
        waits = Stage.NUMBERING, Stage.DISAGREEING, Stage.AWAITING_WORKERS, Stage.AWAITING_STATES
        assert (self.deadline < NEVER) == (stage in waits)
        if now is not None:
            assert now.number == (0 if stage is Stage.NUMBERING else self._number)
            assert now.folder or stage in (Stage.NUMBERING, Stage.OPENING)
            assert now.learned.keys() <= now.members.keys()
            assert not now.learned or stage is Stage.AWAITING_WORKERS
            assert bool(now.failure) <= (stage is Stage.SETTLING)
            assert not self._last_base or self._last_base[0] <= self._number

    def _requested(self, event: SnapshotRequested) -> Instructions:
        if self.is_stopping:
            return [SendError(event.call, CheckpointError("the server is ending"))]
        self._queue.append(event)
        if self.stage is Stage.AWAITING_ROUND:
            # That round may be far away: the request under way fails as postponed, so that this one can
            # begin.
            return self._postpone()
        return self._begin_next() if self.stage is Stage.IDLE else []

    def _begin_next(self) -> Instructions:
        if not self._queue:
            return []
        self._snapshot = SnapshotUnderWay(self._queue.popleft())
        self._enter(Stage.NUMBERING, self._until(self._at, self._timeouts.worker))
        return self._advance()

    def _open(self) -> Instructions:
        """Give the snapshot a number that no worker knows, and open its folder.

        A worker takes part in each number once. If an earlier process of server 0 has announced a number,
        workers would ignore a second snapshot of that number.
        """
        now = self._now
        self._number = max(self._number, now.asked.seen, self._workers.last) + 1
        now.number = self._number
        self._enter(Stage.OPENING)
        return [OpenDraft(self._number, now.asked.request.path)]

    def _stop(self, at: float) -> Instructions:
        """Refuse new snapshots, and give up one that waits for time, workers or rounds.

        One that waits for servers continues, since it needs no more than their replies.
        """
        self.is_stopping = True
        refusals: Instructions = [
            SendError(event.call, CheckpointError("the server is ending")) for event in self._queue
        ]
        self._queue.clear()
        if self.stage is Stage.AWAITING_ROUND:
            return [*refusals, *self._postpone()]
        return [*refusals, *self._overdue(at)]

    @property
    def _now(self) -> SnapshotUnderWay:
        assert self._snapshot is not None
        return self._snapshot

    def _opened(self, path: str, folder: str, at: float) -> Instructions:
        now = self._now
        now.path, now.folder = path, folder
        now.agree_by = at + self._timeouts.cut
        return self._hold()

    def _hold(self) -> Instructions:
        """Ask every server which rounds it has closed and which workers it knows.

        In sync mode no server closes a round until it is told where to cut. Otherwise the round that is
        chosen next could already be over on one server.
        """
        self._enter(Stage.HOLDING)
        return [BeginCuts(self._now.folder, self._now.cutting())]

    def _replied(self, replies: tuple[Any, ...], at: float) -> Instructions:
        match self.stage:
            case Stage.HOLDING:
                return self._place(replies, at)
            case Stage.PLACING:
                return self._placed(replies, at)
            case Stage.CUTTING:
                self._enter(Stage.WRITING)
                return [AwaitParts(self._number, cut=False)]
            case Stage.WRITING:
                self._now.parts = replies
                return self._await_states(at)
            case Stage.SETTLING:
                return self._end()
        raise AssertionError(f"servers reply while the snapshot waits for {self.stage.value}")

    def _place(self, standings: tuple[Standing, ...], at: float) -> Instructions:
        """Tell all servers where to cut: after the same round, or at the marks of the same incarnations.

        A worker joins one server after the other, so servers may know different workers for a moment. Then
        they are asked again, until `agree_by`.
        """
        now, first = self._now, standings[0]
        # Without a mode no worker has joined. No push is under way, so any round will do.
        has_rounds = not first.mode or find_mode(first.mode).has_rounds
        if not has_rounds and any(other.incarnations != first.incarnations for other in standings):
            self._enter(Stage.DISAGREEING, at + _RETRY)
            return self._overdue(at) if self.is_stopping else []
        warnings = self._choose_base(standings) if now.asked.request.delta else []
        cutting = self._now.cutting()
        now.members = dict(first.incarnations)
        if has_rounds:
            now.round = cutting.round = self._round_after(max(each.closed for each in standings))
        else:
            cutting.members = dict(first.incarnations)
        self._enter(Stage.PLACING)
        return [*warnings, BeginCuts(now.folder, cutting)]

    def _round_after(self, last: int) -> int:
        """Return the round to cut after: the last closed one, or the next multiple of the interval."""
        every = self._now.asked.request.every
        if not every:
            return last
        # Rounded up to a multiple, and behind the last snapshot, so that no multiple gets two.
        return -(-max(last, self._last_round + 1) // every) * every

    def _choose_base(self, standings: tuple[Standing, ...]) -> Instructions:
        """Find the snapshot that a delta builds on.

        All servers must remember their changes since that snapshot. If one does not, the delta holds
        everything, and a line in the log says why.
        """
        base = self._last_base
        forgetful = [
            f"server {index}"
            for index, standing in enumerate(standings)
            if base is None or base[0] not in standing.delta_bases
        ]
        if not forgetful:
            self._now.base = base
            return []
        return [
            WarnOperator(
                f"snapshot {self._number} was to be a delta and holds everything: "
                f"{', '.join(forgetful)} remembers no earlier one (a server that was started again "
                "does not)"
            )
        ]

    def _placed(self, standings: tuple[Standing, ...], at: float) -> Instructions:
        """Continue once every server knows where to cut. A round that is still to come may take any time.

        A worker may have joined since the servers were asked first. In sync mode it takes part in the rounds
        up to the cut, so it becomes a member. In other modes no server waits for its mark, so the snapshot
        fails.
        """
        now = self._now
        if now.round is None:
            if any(standing.incarnations.items() - now.members.items() for standing in standings):
                return self._fail(_changed())
            return self._announce(at)
        now.members = dict(standings[0].incarnations)
        if not now.asked.request.every:
            return self._announce(at)
        self._enter(Stage.AWAITING_ROUND)
        if self._queue or self.is_stopping:
            return self._postpone()
        return [WatchCut(self._number)]

    def _postpone(self) -> Instructions:
        return self._fail(SnapshotPostponed(f"it waited for round {self._now.round}"))

    def _cut_made(self, number: int, at: float) -> Instructions:
        if self.stage is Stage.AWAITING_ROUND and number == self._number:
            return self._announce(at)
        return []

    def _cut_lost(self, number: int) -> Instructions:
        """Give up, because server 0 has lost its cut: a change of the fleet ends any snapshot not yet cut."""
        if number != self._number:
            return []
        if self.stage is Stage.AWAITING_ROUND:
            return self._fail(_changed())
        if self.stage is Stage.AWAITING_WORKERS:
            return self._fail(CheckpointError(f"snapshot {number} was given up; take it again"))
        return []

    def _announce(self, at: float) -> Instructions:
        """Announce the snapshot to the workers.

        Without rounds, workers mark their streams only once all workers know. The announcement reaches some
        of them up to a heartbeat later, and a push behind a mark waits for the last mark: if each marked at
        once, the quick ones would stand still for the slow ones.
        """
        announcement = AnnounceSnapshot(self._number)
        if self._now.round is not None:
            return [announcement, *self._await_cuts()]
        self._enter(Stage.AWAITING_WORKERS, self._until(at, self._timeouts.cut))
        return [announcement, WatchCut(self._number), *self._advance()]

    def _await_cuts(self) -> Instructions:
        self._enter(Stage.CUTTING)
        return [AwaitParts(self._number, cut=True)]

    def _learned(self, event: WorkerLearned) -> Instructions:
        now = self._snapshot
        is_member = now is not None and now.members.get(event.worker) == event.incarnation
        if event.number != self._number or self.stage not in ANNOUNCED or not is_member:
            over = CheckpointError(f"snapshot {event.number} is over")
            return [SendError(event.call, over)]
        if self.stage is not Stage.AWAITING_WORKERS:
            return [self._now.release(event.call)]
        self._now.learned[event.worker] = event.call
        return self._advance()

    def _state_arrived(self, event: WorkerStateArrived) -> None:
        now, worker = self._snapshot, event.worker
        if event.number == 0:
            self._workers.leave(event)
        elif now is not None and (event.number, event.incarnation) == (
            now.number,
            now.members.get(worker),
        ):
            now.states[worker, event.last] = event.state

    def _await_states(self, at: float) -> Instructions:
        self._enter(Stage.AWAITING_STATES, self._until(at, self._timeouts.worker))
        return self._advance()

    def _advance(self) -> Instructions:
        """Leave a stage that waits for workers, if there are none left to wait for."""
        if self.stage is Stage.NUMBERING and not self._workers.unheard:
            return self._open()
        if self.stage is Stage.AWAITING_WORKERS and not self._unaware():
            calls, self._now.learned = self._now.learned, {}
            releases = [self._now.release(call) for call in calls.values()]
            return [*releases, *self._await_cuts()]
        if self.stage is Stage.AWAITING_STATES and not self._stateless():
            return self._publish()
        return []

    def _unaware(self) -> list[int]:
        """Return the seats of members that do not know of the snapshot."""
        return sorted(self._workers.present(self._now.members) - self._now.learned.keys())

    def _stateless(self) -> list[int]:
        """Return the seats of members whose states are missing."""
        return sorted(self._workers.awaited(self._now.members) - self._now.states_at_cut().keys())

    def _publish(self) -> Instructions:
        self._enter(Stage.PUBLISHING)
        now = self._now
        states = self._workers.farewells(now.last)
        states |= {s: state for s, state in now.states_at_cut().items() if state is not None}
        contents = tuple(part.content for part in now.parts)
        base = now.base[1] if now.base else ""
        return [PublishSnapshot(now.parts[0].cut, contents, states, base)]

    def _published(self) -> Instructions:
        now = self._now
        self._last_round = now.round or 0
        if now.asked.request.base or now.asked.request.delta:
            self._last_base = (now.number, now.path)
        return self._settle()

    def _fail(self, error: Exception) -> Instructions:
        """Give the snapshot up. Before it has a folder no server knows of it, and only the caller is told."""
        now = self._now
        now.failure = now.explained(error)
        over = CheckpointError(f"snapshot {now.number} is over")
        refusals: Instructions = [SendError(call, over) for call in now.learned.values()]
        now.learned = {}
        if self.stage is Stage.OPENING:
            return self._end()
        return [*refusals, *self._settle()]

    def _settle(self) -> Instructions:
        """Tell the servers how the snapshot ended. A server that is away learns it with the next snapshot."""
        now = self._now
        self._enter(Stage.SETTLING)
        # Servers drop log records that a complete snapshot holds. That needs a snapshot that stays, and only
        # the job's own folder is sure to be there when a log starts from it.
        complete = now.failure is None and now.is_own
        base = self._last_base[0] if self._last_base else 0
        return [AnnounceSnapshot(None), SettleCuts(now.number, complete, base)]

    def _end(self) -> Instructions:
        now, call = self._now, self._now.asked.call
        self._enter(Stage.IDLE)
        self._snapshot = None
        if now.failure is not None:
            return [CloseDraft(), SendError(call, now.failure), *self._begin_next()]
        prune: Instructions = [PruneSnapshots()] if now.is_own else []
        complete = CompleteSnapshot(call, now.number, now.path)
        return [CloseDraft(), *prune, complete, *self._begin_next()]

    def _enter(self, stage: Stage, deadline: float = NEVER) -> None:
        self.stage, self.deadline = stage, deadline

    def _until(self, at: float, seconds: float) -> float:
        """Return the deadline of a wait that begins now. A server that is ending does not wait."""
        return at if self.is_stopping else at + seconds

    def _overdue(self, at: float) -> Instructions:
        """End a wait whose deadline has passed, or any wait if the server ends."""
        if at < self.deadline and not self.is_stopping:
            return []
        match self.stage:
            case Stage.NUMBERING:
                return self._open()  # a worker that is silent for so long is most likely dead
            case Stage.DISAGREEING:
                if not self.is_stopping and at <= self._now.agree_by:
                    return self._hold()
                return self._late("the servers do not agree on who is in the fleet")
            case Stage.AWAITING_WORKERS:
                return self._late(f"workers {self._unaware()} have not heard of it in time")
            case Stage.AWAITING_STATES:
                return self._late(f"it waits for what workers {self._stateless()} keep")
        return []

    def _late(self, what: str) -> Instructions:
        return self._fail(DeadlineExceeded(what))


def _changed() -> SnapshotPostponed:
    return SnapshotPostponed("a worker or a server came or went")
