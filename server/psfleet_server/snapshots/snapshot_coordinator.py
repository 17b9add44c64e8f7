"""State machine of a snapshot, on server 0. Cuts all servers at one point, awaits their files and publishes.

A snapshot contains the same pushes on all servers, although training continues while it is taken. The point
up to which pushes are included is the *cut*. In sync mode all servers cut after the same round. In other
modes every worker sends a *mark* that names its last push before the cut, and each server cuts that worker's
stream of pushes there.

IDLE -> NUMBERING -> OPENING -> HOLDING <-> DISAGREEING
                                  `-> PLACING -> AWAITING_ROUND (sync, at a multiple of rounds)
                                        |   `-> AWAITING_WORKERS (other modes)
                                        `-> CUTTING -> WRITING -> AWAITING_STATES -> PUBLISHING
                                                                  SETTLING -> IDLE <-'

Any failure leads to SETTLING and ends this snapshot only. The next snapshot has a higher number (rules R11 to
R13 of the protocol). Requests that arrive meanwhile wait in a queue.

Pure like the shard: every event is a call of one method, which returns the instructions to perform, in order.
`SnapshotRunner` makes these calls and performs the instructions. A `call` identifies a request that waits for
a reply; the coordinator only passes it back.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from psfleet.checkpoint import Part
from psfleet.core.base.errors import CheckpointError, DeadlineExceeded, NotReady, PsfleetError
from psfleet.core.engine.consistency import find_mode
from psfleet.core.engine.shard.events import Call, SendError
from psfleet.core.engine.shard.snapshot_cuts import PendingCut
from psfleet_server.snapshots.worker_states import WorkerStates

NEVER = float("inf")
# Seconds until servers that disagree are asked again. Short, because servers differ only while a worker is on
# its way from one to the next.
_RETRY = 0.05


class Stage(Enum):
    """Stages of the snapshot under way. The value of each says what the snapshot waits for."""

    IDLE = "there is none"
    NUMBERING = (
        "a heartbeat of each worker, which may know of a snapshot that a server 0 before had begun"
    )
    OPENING = "its folder"
    HOLDING = "where every server stands"
    DISAGREEING = "servers that do not agree on who is in the fleet"
    PLACING = "every server to know where to cut"
    AWAITING_ROUND = "the round to cut after"
    AWAITING_WORKERS = "workers to learn of it"
    CUTTING = "every server's cut"
    WRITING = "every server's file"
    AWAITING_STATES = "the states of workers"
    PUBLISHING = "its manifest"
    SETTLING = "every server to know how it ended"


_ANNOUNCED = (
    Stage.AWAITING_WORKERS,
    Stage.CUTTING,
    Stage.WRITING,
    Stage.AWAITING_STATES,
    Stage.PUBLISHING,
)
"""Stages in which workers may request their part in the snapshot. In any other stage it is over for them."""


@dataclass(frozen=True)
class SnapshotTimeouts:
    """Time limits of a snapshot, in seconds.

    `SnapshotRunner` applies `cut` and `file` to its calls of servers. So the coordinator has a deadline only
    in the stages that wait for workers or for a retry.

    Attributes:
        cut: Limit until every server has made its cut (has fixed which pushes the snapshot contains). A push
            after a worker's mark, the last push in the snapshot, may wait for that long.
        file: Limit until every server's file is on the disk.
        worker: Limit until every worker has delivered its state.
    """

    # `cut` and `worker` are short, because pushes and the end of the snapshot wait for them. `file` is long:
    # a server may have to write many gigabytes. The numbers are estimates.
    cut: float = 10.0
    file: float = 600.0
    worker: float = 10.0


@dataclass(frozen=True)
class SnapshotRequest:
    """A request for a snapshot.

    Attributes:
        path: Folder of the snapshot, or empty for a numbered folder among the job's own snapshots.
        delta: True to save only the changes since the last snapshot that deltas can build on. If a
            restarted server no longer knows its changes, all rows are saved instead.
        base: True if the next delta may build on this snapshot.
        every: In sync mode, cut after the next round that is a multiple of this number. 0 cuts after any
            round.
        script_waits: True if the script of a worker waits until the snapshot is complete.
    """

    path: str = ""
    delta: bool = False
    base: bool = False
    every: int = 0
    script_waits: bool = False


class SnapshotPostponed(CheckpointError):
    """A snapshot has to wait, although nothing failed: members change, or another one was requested."""


@dataclass(frozen=True)
class Standing:
    """State of a server at the time of its reply to a request to take part in a snapshot.

    Attributes:
        mode: Consistency mode of the fleet, or empty if no worker has joined.
        closed: Last closed round.
        incarnations: For each worker that has not left, the number of its process (incarnation).
        delta_bases: Numbers of the snapshots that a delta can build on: the server knows its changes since
            each.
    """

    mode: str
    closed: int
    incarnations: Mapping[int, int]
    delta_bases: tuple[int, ...] = ()


@dataclass(frozen=True)
class OpenDraft:
    """Instruction to make the folder for a snapshot's files.

    Afterwards call `draft_opened` or `step_failed`.
    """

    number: int
    path: str


@dataclass(frozen=True)
class BeginCuts:
    """Instruction to tell every server after which pushes to cut (separate the snapshot from later ones).

    Each server replies with a Standing. Afterwards call `servers_replied` or `step_failed`. A message with
    neither a round nor members makes the servers stop closing rounds, until the next message contains either.
    """

    folder: str
    cutting: PendingCut


@dataclass(frozen=True)
class WatchCut:
    """Instruction to call `cut_ended` once server 0 has made its cut (fixed the last push) or given it up."""

    number: int


@dataclass(frozen=True)
class AwaitParts:
    """Instruction to wait until every server has made its cut (`cut` True) or has written its file (False).

    Afterwards call `servers_replied` or `step_failed`. A server that has written its file replies with a
    Part, the description of the file.
    """

    number: int
    cut: bool


@dataclass(frozen=True)
class SettleCuts:
    """Instruction to tell every server how the snapshot ended.

    Afterwards call `servers_replied`, even if calls have failed.

    Attributes:
        number: Number of the snapshot.
        complete: True if logs and standbys may start from the snapshot.
        base: Oldest snapshot that deltas may still refer to. 0 drops all delta bases.
    """

    number: int
    complete: bool
    base: int


@dataclass(frozen=True)
class AnnounceSnapshot:
    """Instruction to announce a snapshot to all workers, at once and with their heartbeats.

    If `number` is None, the announcement ends.
    """

    number: int | None


@dataclass(frozen=True)
class ReleaseWorker:
    """Instruction to tell a worker what to do for a snapshot, in reply to its call that waits for this.

    Attributes:
        call: The worker's call.
        mark: True if the worker must mark its stream of pushes: name its last push in the snapshot.
        round: If `mark` is False, the last round in the snapshot.
        script_waits: True if the script of some worker waits for the snapshot.
    """

    call: Call
    mark: bool
    round: int
    script_waits: bool = False


@dataclass(frozen=True)
class PublishSnapshot:
    """Instruction to write the manifest and give the folder its final name.

    Afterwards call `published` or `step_failed`.

    Attributes:
        number: Number of the snapshot.
        parts: For each server, its file and the last round or pushes in the file.
        states: States of workers, by worker number.
        base: Path of the snapshot that this delta builds on, or empty if it is not a delta.
    """

    number: int
    parts: tuple[Part, ...]
    states: Mapping[int, Any]
    base: str


@dataclass(frozen=True)
class CloseDraft:
    """Instruction to remove the remains of the draft folder, and to close the connections to the servers.

    With `prune`, also remove the oldest of the job's own snapshots.
    """

    prune: bool = False


@dataclass(frozen=True)
class CompleteSnapshot:
    """Instruction to reply to a request that the snapshot is complete."""

    call: Call
    number: int
    path: str


@dataclass(frozen=True)
class WarnOperator:
    """Instruction to write a line to the console of the job."""

    line: str


ServerCalls = BeginCuts | AwaitParts | SettleCuts
SnapshotInstruction = (
    OpenDraft
    | ServerCalls
    | WatchCut
    | AnnounceSnapshot
    | ReleaseWorker
    | SendError
    | PublishSnapshot
    | CloseDraft
    | CompleteSnapshot
    | WarnOperator
)
Instructions = list[SnapshotInstruction]
SnapshotEvent = Callable[["SnapshotCoordinator"], Instructions]
"""A call of one of the coordinator's methods, which `SnapshotRunner` makes in its thread."""


@dataclass
class SnapshotUnderWay:
    """Snapshot that was requested or is being taken, until its end.

    Attributes:
        call: Call that requested it.
        request: The request.
        seen: Highest number of a snapshot on server 0's disk or in its shard when it was requested.
        number: Number of the snapshot, or 0 until it gets one. Numbers only rise.
        path: Folder or URL of the finished snapshot.
        folder: Folder of its files until it is complete.
        agree_by: Time until which the servers must agree on the members of the fleet.
        members: Workers in the snapshot, with the number of each worker's process (incarnation).
        round: In sync mode the last round in the snapshot, else None.
        base: Number and path of the snapshot that this delta builds on, or None if it is not a delta.
        learned: Maps each worker that knows of the snapshot to its call, which waits until all workers know.
        states: Maps the pair (worker, its last push or round in the state) to the delivered state.
        parts: Files of all servers, by server index. Empty until all are written.
        failure: Error for the caller if the snapshot is given up, else None.
    """

    call: Call
    request: SnapshotRequest
    seen: int
    number: int = 0
    path: str = ""
    folder: str = ""
    agree_by: float = NEVER
    members: dict[int, int] = field(default_factory=dict)
    round: int | None = None
    base: tuple[int, str] | None = None
    learned: dict[int, Call] = field(default_factory=dict)
    states: dict[tuple[int, int], Any] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    failure: PsfleetError | None = None

    @property
    def is_own(self) -> bool:
        """True if the snapshot goes to the job's own folder, so that logs may start from it."""
        return not self.request.path

    def cutting(self) -> PendingCut:
        """Return the request to servers to take part. The caller adds the round or the members to cut at."""
        since = self.base[0] if self.base else 0
        # The next delta builds on the last delta, not on the full snapshot before it.
        remembers = self.request.base or self.request.delta
        return PendingCut(self.number, since=since, remember=remembers)

    def last(self, seat: int) -> int:
        """Return the last push or round of the worker `seat` in the snapshot. Valid once `parts` is set."""
        # All parts agree on a worker that has sent a mark. On others only server 0 is sure to know the last
        # push, because it gets every push. `pushes` has pairs (incarnation, last push).
        part = self.parts[0]
        return part.round if self.round is not None else part.pushes.get(seat, (0, 0))[1]

    def states_at_cut(self) -> dict[int, Any]:
        """Return, for each worker, its state as of its last push in the snapshot.

        Other delivered states come from an earlier attempt: an earlier process of server 0 may have begun a
        snapshot with the same number that ended at another push.
        """
        return {seat: state for (seat, at), state in self.states.items() if at == self.last(seat)}

    def release(self, call: Call) -> ReleaseWorker:
        """Return the reply that makes a worker name its last push, or save its state after a round."""
        return ReleaseWorker(call, self.round is None, self.round or 0, self.request.script_waits)

    def explained(self, error: Exception) -> PsfleetError:
        """Return the error for the caller that requested the snapshot."""
        # The same class, because the schedule retries some errors silently, such as SnapshotPostponed.
        if isinstance(error, PsfleetError):
            return type(error)(f"snapshot {self.number} was not taken: {error}")
        why = str(error) if isinstance(error, OSError) else repr(error)
        return CheckpointError(f"snapshot {self.number} was not taken: {why}")


class SnapshotCoordinator:
    """Takes snapshots one after the other, on server 0. Call its methods from one thread.

    Args:
        timeouts: Time limit of each step.
        clock: Returns a monotonic time in seconds.

    Attributes:
        stage: Stage of the snapshot under way.
        deadline: Time at which the caller must call `time_passed`. Infinite if no wait has a limit.
        is_stopping: True once the server is shutting down. Requests are then refused, and waits end at once.
    """

    def __init__(self, timeouts: SnapshotTimeouts, clock: Callable[[], float]) -> None:
        self.stage = Stage.IDLE
        self.deadline = NEVER
        self.is_stopping = False
        self._timeouts = timeouts
        self._clock = clock
        self._queue: deque[SnapshotUnderWay] = deque()
        self._snapshot: SnapshotUnderWay | None = None
        self._number = 0  # of the last snapshot that was begun
        self._last_multiple = 0  # round of the last complete snapshot that waited for a multiple
        self._last_base: tuple[int, str] | None = None
        self._workers = WorkerStates()

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

    def request(self, call: Call, request: SnapshotRequest, seen: int) -> Instructions:
        """Add a request for a snapshot. Its reply will be CompleteSnapshot or SendError.

        Args:
            call: The call to reply to.
            request: The requested snapshot.
            seen: Highest number of a snapshot on this server's disk or in its shard.
        """
        if self.is_stopping:
            return [SendError(call, _server_ends())]
        self._queue.append(SnapshotUnderWay(call, request, seen))
        if self.stage is Stage.AWAITING_ROUND:
            # That round may be far away. The snapshot that waits for it fails as postponed, so that this
            # request can begin.
            return self._postpone()
        return self._begin_next() if self.stage is Stage.IDLE else []

    def stop(self) -> Instructions:
        """Refuse new snapshots, and give up a snapshot that waits for time, workers or rounds.

        A snapshot that waits for servers continues, because it needs only their replies. So does one that
        waits for heartbeats to get its number: it takes a number without them.
        """
        self.is_stopping = True
        refusals: Instructions = [SendError(queued.call, _server_ends()) for queued in self._queue]
        self._queue.clear()
        if self.stage is Stage.AWAITING_ROUND:
            return [*refusals, *self._postpone()]
        return [*refusals, *self.time_passed()]

    def time_passed(self) -> Instructions:
        """End a wait whose deadline has passed. If the server is shutting down, end any wait."""
        if self._clock() < self.deadline and not self.is_stopping:
            return []
        match self.stage:
            case Stage.NUMBERING:
                return self._open()  # a worker that is silent for so long is most likely dead
            case Stage.DISAGREEING:
                if not self.is_stopping and self._clock() <= self._now.agree_by:
                    return self._hold()
                return self._late("the servers do not agree on who is in the fleet")
            case Stage.AWAITING_WORKERS:
                return self._late(f"workers {self._unaware()} have not heard of it in time")
            case Stage.AWAITING_STATES:
                return self._late(f"it waits for what workers {self._stateless()} keep")
        return []

    def draft_opened(self, path: str, folder: str) -> Instructions:
        """Continue with the snapshot's folder.

        Args:
            path: Folder or URL of the finished snapshot.
            folder: Folder for its files until the snapshot is complete.
        """
        now = self._now
        now.path, now.folder = path, folder
        now.agree_by = self._clock() + self._timeouts.cut
        return self._hold()

    def servers_replied(self, replies: Sequence[Any] = ()) -> Instructions:
        """Continue, because all servers have replied. `replies` has one reply per server, in their order."""
        match self.stage:
            case Stage.HOLDING:
                return self._place(replies)
            case Stage.PLACING:
                return self._placed(replies)
            case Stage.CUTTING:
                self._enter(Stage.WRITING)
                return [AwaitParts(self._number, cut=False)]
            case Stage.WRITING:
                self._now.parts = tuple(replies)
                self._enter(Stage.AWAITING_STATES, self._timeouts.worker)
                return self._advance()
            case Stage.SETTLING:
                return self._end()
        raise AssertionError(f"servers reply while the snapshot waits for {self.stage.value}")

    def cut_ended(self, number: int, failure: PsfleetError | None = None) -> Instructions:
        """Continue if server 0 has made its cut, or give the snapshot up if server 0 has given it up."""
        if number != self._number:
            return []
        if self.stage is Stage.AWAITING_ROUND and failure is None:
            return self._announce()
        # While it awaits workers no cut is made: it needs the marks of all workers, which they send later.
        if self.stage in (Stage.AWAITING_ROUND, Stage.AWAITING_WORKERS) and failure is not None:
            return self.step_failed(failure)
        return []

    def published(self) -> Instructions:
        """Notify the servers that the snapshot is complete, because its manifest is on the disk."""
        now = self._now
        # Only snapshots of the schedule wait for a multiple. A snapshot that a user requests must not make
        # the schedule skip the next multiple.
        if now.request.every:
            self._last_multiple = now.round or 0
        if now.request.base or now.request.delta:
            self._last_base = (now.number, now.path)
        return self._settle()

    def step_failed(self, error: Exception) -> Instructions:
        """Give the snapshot up, because its last instruction could not be performed."""
        # A server that gives its cut up because members change, or whose rows move, is at fault no more than
        # one that does so before the cuts are awaited.
        return self._fail(SnapshotPostponed(str(error)) if isinstance(error, NotReady) else error)

    def members_changed(
        self,
        left: frozenset[int],
        alive: frozenset[int],
        unheard: frozenset[int] = frozenset(),
        last_snapshot: int = 0,
    ) -> Instructions:
        """Note that a worker has left, or has sent its first heartbeat.

        The arguments become the attributes of WorkerStates.
        """
        workers = self._workers
        workers.left, workers.alive, workers.unheard = left, alive, unheard
        workers.last_snapshot = last_snapshot
        return self._advance()

    def worker_introduced(self, worker: int, incarnation: int, *, keeps: bool) -> Instructions:
        """Note that a worker has started, and whether it has state that belongs into snapshots (`keeps`)."""
        self._workers.introduce(worker, incarnation, keeps)
        return self._advance()

    def worker_learned(
        self, call: Call, number: int, worker: int, incarnation: int
    ) -> Instructions:
        """Handle the call of a worker that has learned of a snapshot.

        The reply is ReleaseWorker once all workers have learned of it, or an error if the snapshot is over.
        """
        now = self._snapshot
        is_member = now is not None and now.members.get(worker) == incarnation
        if number != self._number or self.stage not in _ANNOUNCED or not is_member:
            return [SendError(call, CheckpointError(f"snapshot {number} is over"))]
        # In sync mode workers need not wait for each other. In other modes a worker may repeat a call whose
        # reply was lost.
        if self.stage is not Stage.AWAITING_WORKERS:
            return [self._now.release(call)]
        # If the worker repeats its call, the earlier one expires by itself at its deadline.
        self._now.learned[worker] = call
        return self._advance()

    def state_delivered(
        self, number: int, worker: int, incarnation: int, last: int, state: Any
    ) -> Instructions:
        """Keep the state of a worker for a snapshot.

        Args:
            number: Number of the snapshot.
            worker, incarnation: The worker, and the number of its process.
            last: The worker's last push or round in the state.
            state: State as parsed JSON, or None if the worker has none.
        """
        now = self._snapshot
        if now is not None and number == now.number and incarnation == now.members.get(worker):
            now.states[worker, last] = state
        return self._advance()

    def farewell_delivered(self, worker: int, incarnation: int, steps: Any) -> Instructions:
        """Keep the states of a leaving worker's last steps, a list of [push or round, state]."""
        self._workers.keep_farewell(worker, incarnation, steps)
        return self._advance()

    @property
    def _now(self) -> SnapshotUnderWay:
        assert self._snapshot is not None
        return self._snapshot

    def _enter(self, stage: Stage, seconds: float = NEVER) -> None:
        """Enter a stage, which may take `seconds`. A server that is shutting down does not wait."""
        self.stage = stage
        self.deadline = NEVER
        if seconds < NEVER:
            self.deadline = self._clock() + (0.0 if self.is_stopping else seconds)

    def _advance(self) -> Instructions:
        """Leave a stage that waits for workers, if no worker is left to wait for."""
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
        """Return the members that do not know of the snapshot."""
        return sorted(self._workers.present(self._now.members) - self._now.learned.keys())

    def _stateless(self) -> list[int]:
        """Return the members whose states are missing."""
        return sorted(self._workers.awaited(self._now.members) - self._now.states_at_cut().keys())

    def _begin_next(self) -> Instructions:
        if not self._queue:
            return []
        self._snapshot = self._queue.popleft()
        self._enter(Stage.NUMBERING, self._timeouts.worker)
        return self._advance()

    def _open(self) -> Instructions:
        """Give the snapshot a number that no worker knows, and open its folder.

        A worker takes part in each number once. If an earlier process of server 0 has announced a number,
        workers would ignore a second snapshot with that number.
        """
        now = self._now
        self._number = max(self._number, now.seen, self._workers.last_snapshot) + 1
        now.number = self._number
        self._enter(Stage.OPENING)
        return [OpenDraft(self._number, now.request.path)]

    def _hold(self) -> Instructions:
        """Ask every server which rounds it has closed and which workers it knows.

        In sync mode no server closes a round until it is told where to cut. Otherwise the round that is
        chosen next could already be over on one server.
        """
        self._enter(Stage.HOLDING)
        return [BeginCuts(self._now.folder, self._now.cutting())]

    def _place(self, standings: Sequence[Standing]) -> Instructions:
        """Tell all servers where to cut: after the same round, or where the same worker processes tell them.

        A worker joins one server after the other, so servers may know different workers for a moment. Then
        the servers are asked again, until `agree_by`.
        """
        now, first = self._now, standings[0]
        # Without a mode no worker has joined. No push is under way, so every round is a valid cut.
        has_rounds = not first.mode or find_mode(first.mode).has_rounds
        if not has_rounds and any(
            standing.incarnations != first.incarnations for standing in standings
        ):
            self._enter(Stage.DISAGREEING, _RETRY)
            return []
        warnings = self._choose_base(standings) if now.request.delta else []
        cutting = now.cutting()
        now.members = dict(first.incarnations)
        if has_rounds:
            now.round = cutting.round = self._round_after(
                max(standing.closed for standing in standings)
            )
        else:
            cutting.members = dict(first.incarnations)
        self._enter(Stage.PLACING)
        return [*warnings, BeginCuts(now.folder, cutting)]

    def _round_after(self, last: int) -> int:
        """Return the round to cut after: the last closed one, or the next multiple of the interval."""
        every = self._now.request.every
        if not every:
            return last
        # Round up to a multiple after the last such snapshot, so that no multiple gets two snapshots.
        return -(-max(last, self._last_multiple + 1) // every) * every

    def _choose_base(self, standings: Sequence[Standing]) -> Instructions:
        """Find the snapshot that a delta builds on.

        All servers must know their changes since that snapshot. Otherwise the delta becomes a full snapshot,
        and a line in the log names the servers that do not know them.
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

    def _placed(self, standings: Sequence[Standing]) -> Instructions:
        """Continue once every server knows where to cut. A round in the future may take any time.

        A worker may have joined since the servers replied first. In sync mode the new worker takes part in
        the rounds up to the cut, so it becomes a member. In other modes no server waits for the new
        worker's mark, so the snapshot fails.
        """
        now = self._now
        if now.round is None:
            # A member that has left meanwhile does no harm: servers do not wait for the marks of leavers.
            if any(standing.incarnations.items() - now.members.items() for standing in standings):
                return self._fail(_changed())
            return self._announce()
        # The members that server 0 knows now, not those of the replies before (rule R13): otherwise a worker
        # that joined in between would be in the cut, but its state would be missing.
        now.members = dict(standings[0].incarnations)
        if not now.request.every:
            return self._announce()
        # The round may be far away, and a worker waits only seconds for its state at the end of a round
        # (`WorkerState.state_at`). So the snapshot is announced once the round has closed.
        self._enter(Stage.AWAITING_ROUND)
        if self._queue or self.is_stopping:
            return self._postpone()
        return [WatchCut(self._number)]

    def _announce(self) -> Instructions:
        """Announce the snapshot to the workers.

        Without rounds, workers mark their last push in the snapshot only once all workers have learned of the
        snapshot. Some workers learn of it up to a heartbeat later, and a push after a mark waits for the last
        mark. If each worker marked at once, fast workers would stop and wait for slow ones.
        """
        announcement = AnnounceSnapshot(self._number)
        if self._now.round is not None:
            return [announcement, *self._await_cuts()]
        self._enter(Stage.AWAITING_WORKERS, self._timeouts.cut)
        # Watched, because no call of a server is under way that would fail if the cut is given up.
        return [announcement, WatchCut(self._number), *self._advance()]

    def _await_cuts(self) -> Instructions:
        self._enter(Stage.CUTTING)
        return [AwaitParts(self._number, cut=True)]

    def _publish(self) -> Instructions:
        self._enter(Stage.PUBLISHING)
        now = self._now
        states = self._workers.farewells(now.last)
        # None is the report of a worker that has no state. It ends the wait, but is not stored.
        states |= {s: state for s, state in now.states_at_cut().items() if state is not None}
        return [PublishSnapshot(now.number, now.parts, states, now.base[1] if now.base else "")]

    def _postpone(self) -> Instructions:
        return self._fail(SnapshotPostponed(f"it waited for round {self._now.round}"))

    def _late(self, what: str) -> Instructions:
        return self._fail(DeadlineExceeded(what))

    def _fail(self, error: Exception) -> Instructions:
        """Give the snapshot up, and notify its requester and all servers.

        In the opening stage no server knows of it yet, so only the requester is notified.
        """
        now = self._now
        now.failure = now.explained(error)
        over = CheckpointError(f"snapshot {now.number} is over")
        refusals: Instructions = [SendError(call, over) for call in now.learned.values()]
        now.learned = {}
        if self.stage is Stage.OPENING:
            return self._end()
        return [*refusals, *self._settle()]

    def _settle(self) -> Instructions:
        """Tell the servers how the snapshot ended. An unreachable server is told with the next snapshot."""
        now = self._now
        self._enter(Stage.SETTLING)
        # Servers drop log records that a complete snapshot contains. That requires a snapshot that stays, and
        # only the job's own folder is sure to exist when a log starts from it.
        complete = now.failure is None and now.is_own
        base = self._last_base[0] if self._last_base else 0
        return [AnnounceSnapshot(None), SettleCuts(now.number, complete, base)]

    def _end(self) -> Instructions:
        # CloseDraft comes before the next snapshot, because the runner has one draft and one set of
        # connections at a time, and before the reply, so that the requester finds no remains of the draft.
        now = self._now
        self._enter(Stage.IDLE)
        self._snapshot = None
        if now.failure is not None:
            return [CloseDraft(), SendError(now.call, now.failure), *self._begin_next()]
        complete = CompleteSnapshot(now.call, now.number, now.path)
        return [CloseDraft(prune=now.is_own), complete, *self._begin_next()]


def _changed() -> SnapshotPostponed:
    return SnapshotPostponed("a worker or a server came or went")


def _server_ends() -> CheckpointError:
    return CheckpointError("the server is ending")
