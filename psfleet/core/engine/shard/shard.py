"""Shard: the deterministic state machine of one server, which turns events into instructions.

    event (Push, Pull, Join, ...) --> handle --> instructions (SendValues, SendOutcome, WriteSnapshot, ...)
                                        |
                                        +--> journal gets a record before a change takes effect

It does no I/O, reads no clock and starts no thread. So the same records in the same order give bit-identical
tables in a server, in a standby, at replay and in the embedded runtime. A handler checks an event, records
the durable part of the change, and only then changes the shard. Changes that need not survive the process
have no record: commits that come with pulls, marks of a snapshot, and the announcement of a view.

The log and the shard must not differ. So any error that stops a change after its record *tears* the shard: it
then refuses every event, until a new process has replayed the log.
"""

from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import NoRoom, PsfleetError, UsageError, rows_move, type_and_text
from psfleet.core.base.observability.exposition import StalenessHistogram
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.events import (
    BeginCut,
    Call,
    CloseRound,
    CreateTable,
    EndCut,
    Event,
    Evict,
    Expire,
    FrozenShard,
    Instruction,
    Join,
    Journal,
    Leave,
    MakeCut,
    MarkCut,
    Pull,
    Push,
    Record,
    RestorePart,
    RetryRoom,
    SendError,
    SendOutcome,
    SendReport,
    SendValues,
    Shrink,
    Tick,
    WriteSnapshot,
    WriteState,
)
from psfleet.core.engine.shard.membership_view import InstallView, PrepareView, ViewReport
from psfleet.core.engine.shard.recent_events import RecentEvents
from psfleet.core.engine.shard.rounds import Rounds
from psfleet.core.engine.shard.shard_state import ConsistencyState, ShardState
from psfleet.core.engine.shard.shard_tables import DeltaBases, ShardCounters, ShardTables
from psfleet.core.engine.shard.snapshot_cuts import CutState, PendingCut
from psfleet.core.engine.shard.updates import apply_push, check_write_room, plan_push_room, update
from psfleet.core.engine.shard.workers import Workers
from psfleet.core.engine.tables.assigned_weights import check_columns, refill
from psfleet.core.engine.tables.row_data import ROW_IDS

Floats = NDArray[np.float32]


class _AppliedChange:
    """Context manager around the code that applies a change, which no table may refuse half-way.

    It makes the shard refuse all later events if an error stops the change. A class, because a generator
    would cost each push a microsecond more.
    """

    __slots__ = ("_shard",)

    def __init__(self, shard: "Shard") -> None:
        self._shard = shard

    def __enter__(self) -> None:
        self._shard.tables.budget.grants = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._shard.tables.budget.grants = False
        if isinstance(error, Exception):
            self._shard.tear(error)


class Shard:
    """The deterministic state machine of a server, and of the embedded runtime.

    Only one thread at a time may call `handle`. `tables.read` may run at the same time.

    Attributes:
        journal: Receives every record before it takes effect, or None if the shard has no log.
        waits_for_room: True if the log had no space to close a complete round; RetryRoom tries again.
        counters, staleness, recent: For metrics and error messages; not part of the shard's state.
        replaying: True while records of an earlier process are replayed (event_shortcuts.replay).
        moving: True while rows move to another number of servers: nothing may change them.
        torn: Error of every later event, after an error in the middle of a change, or None. The tables then
            have a part of the change, which is in the log as a whole.
    """

    def __init__(self, index: int = 0, servers: int = 1, workers: int = 1) -> None:
        self.index = index
        self.servers = servers
        self.workers = Workers(index, workers)
        self.consistency = ConsistencyState(index, Rounds(set(range(workers))))
        self.tables = ShardTables(index, servers)
        self.cuts = CutState()
        self.delta_bases = DeltaBases()
        self.last_cuts = DeltaBases(bounded=True)  # for followers that start from a snapshot
        self.journal: Journal | None = None
        self.waits_for_room = False
        self.counters = ShardCounters()
        self.staleness = StalenessHistogram()
        self.replaying = False
        self.moving = False
        self.torn: PsfleetError | None = None
        self.recent = RecentEvents()
        self._waiting: dict[Call, Pull] = {}

    @property
    def mode(self) -> Mode | None:
        """Consistency mode of the fleet, or None until the first worker joins."""
        return self.consistency.mode

    @property
    def rounds(self) -> Rounds:
        """Members of each round in sync mode. In every mode, the workers that have left."""
        return self.consistency.rounds

    @property
    def is_quiet(self) -> bool:
        """True if no pull waits, there is no log and no follower, no snapshot is begun and no rows move.

        Also the tables must be whole.
        """
        follows, keeps = self.tables.changes.is_kept, self.journal is not None
        stopped = self.moving or self.torn is not None
        return not (self._waiting or stopped or self.cuts.under_way or follows or keeps)

    def progress(self) -> int:
        """Return the progress of training: closed rounds (sync mode) or the pushes of the fastest worker."""
        return max(self.rounds.closed, self.workers.furthest())

    def handle(self, event: Event, call: Call) -> list[Instruction]:
        """Handle one event and return instructions.

        An error is returned as SendError, and nothing is changed. If the shard is torn by it, the pulls that
        wait are refused too.
        """
        self.recent.add(event)
        try:
            # These three change no rows: the end of a pull's wait, and the end or a mark of a snapshot.
            if not isinstance(event, Expire | EndCut | MarkCut):
                self._check_changeable()
            match event:
                case Push():
                    return self._push(event, call)
                case Pull():
                    return self._pull(event, call)
                case Join():
                    return self._join(event, call)
                case Leave():
                    return self._leave(event, call)
                case WriteState():
                    return self._write(event, call)
                case Shrink():
                    return self._shrink(event, call)
                case Tick(seconds):
                    return self._tick(seconds, call)
                case RestorePart():
                    self.fill(event)
                    return [SendOutcome(call)]
                case BeginCut():
                    return self._begin_cut(event, call)
                case MarkCut(number, worker, incarnation, last, addressed):
                    self.cuts.mark_worker(number, worker, incarnation, last, addressed)
                    return [SendOutcome(call), *self._advance()]
                case EndCut():
                    return self._end_cut(event, call)
                case RetryRoom():
                    return [SendOutcome(call), *self._advance()]
                case Expire():
                    return self._expire(call)
                case PrepareView():
                    return [SendReport(call, self._freeze(event))]
                case InstallView():
                    return self._install(event, call)
        except PsfleetError as error:
            if self.torn is None:
                return [SendError(call, error)]
            self._waiting.pop(call, None)
            return [SendError(call, error), *self.refuse_if_torn()]
        except Exception:
            self._waiting.pop(call, None)  # the caller refuses it
            raise

    def _check_changeable(self) -> None:
        if self.torn is not None:
            raise self.torn
        if self.moving:
            raise rows_move(self.index)

    def tear(self, error: Exception) -> None:
        """Refuse all later events, because an error has stopped a change in its middle."""
        self.torn = PsfleetError(
            f"the tables of server {self.index} have half of a change, which was stopped by "
            f"{type_and_text(error)}; start again from the log or a snapshot"
        )

    def refuse_if_torn(self) -> list[Instruction]:
        """Refuse the pulls that wait, if the tables have half of a change."""
        if self.torn is None:
            return []
        waiting, self._waiting = self._waiting, {}
        return [SendError(call, self.torn) for call in waiting]

    def _join(self, event: Join, call: Call) -> list[Instruction]:
        self.workers.check_seat(event.worker)
        event = self.consistency.adopted(event)
        self.consistency.check_mode(event)
        self.workers.check_incarnation(event.worker, event.incarnation)
        # With views an incarnation has begun already, and its first Join brings only the fleet's mode.
        begins = event.incarnation > self.workers.incarnations.get(event.worker, -1)
        if begins or self.mode is None:
            with self._recorded(event):
                self.consistency.start(event)
                if begins:
                    self.rounds.begin_incarnation(event.worker)
                    self._begin_incarnation(event.worker, event.incarnation)
        out = self._switch(event) if event.switch > self.consistency.switches else []
        has_rounds = self.consistency.declared.has_rounds
        last = self.rounds.closed if has_rounds else self.workers.sequences[event.worker]
        clock = self.consistency.gate.at.get(event.worker, 0)
        # A pull may have waited for this worker, whose clock (number of pushes) now begins beside the other
        # clocks.
        return [*out, SendOutcome(call, number=last, clock=clock), *self._advance()]

    def _begin_incarnation(self, worker: int, incarnation: int) -> None:
        self.cuts.give_up()  # the snapshot does not know of this incarnation
        self.workers.begin_incarnation(worker, incarnation)
        self.consistency.begin_incarnation(worker)

    def _switch(self, event: Join) -> list[Instruction]:
        """Switch to another mode, after a collective of all workers, with no push outstanding.

        Rounds and the pushes of every worker are numbered on from the highest number so far, so that a late
        message of the old mode is recognised as old. No worker waits for a pull during the switch, so pulls
        that wait here are late copies, and expire.
        """
        with self._recorded(event):
            late = [instruction for call in [*self._waiting] for instruction in self._expire(call)]
            # `event.last` is from all servers: a worker that this shard does not know may be further ahead.
            last = max(self.progress(), event.last)
            self.workers.go_on_from(last)
            self.consistency.switch(event, last)
        return late

    def _leave(self, event: Leave, call: Call) -> list[Instruction]:
        self.workers.admit(event.worker, event.incarnation, leaves=not event.rest)
        if not event.rest:
            if event.worker not in self.rounds.left:
                with self._recorded(event):
                    self.consistency.leave(event.worker)
                    if not self.consistency.declared.has_rounds:
                        self.workers.ended_at(event.worker, event.last)
        elif self.rounds.is_new_rest(event.worker, event.rest):
            with self._recorded(event):
                self.consistency.rest_worker(event.worker, event.rest)
        return [SendOutcome(call, number=self.rounds.remaining()), *self._advance()]

    def _push(self, push: Push, call: Call) -> list[Instruction]:
        self.workers.admit(push.worker, push.incarnation)
        for gradient in push.gradients:
            self.tables.check_gradient(gradient)
        holds = self.consistency.declared.has_rounds
        fresh = self.rounds.is_new(push) if holds else self.workers.is_new_push(push)
        if fresh:
            waiting = self.rounds.held if holds else None
            adds = self.consistency.declared.adds_deltas
            waiting_bytes, evictions = plan_push_room(self.tables, push, waiting, adds)
            if push.cut is not None or self.cuts.under_way is not None:
                self._wait_for_cut(push)
            # If the log is full after this record, the rows are removed all the same: the worker sends the
            # push again, and the push needs their memory.
            for key, ids in evictions:
                with self._recorded(Evict(key, ids)):
                    self.tables.evict(key, ids)
            # Everything only after the record, which may fail: then nothing of the push may be left.
            with self._recorded(push):
                self.tables.budget.held = waiting_bytes
                if holds:
                    self.rounds.hold(push)
                else:
                    self.note(push)
                    apply_push(self.tables, push, adds)
        self.counters.count(push, fresh)
        return [SendOutcome(call, "held" if holds else "applied"), *self._advance()]

    def note(self, push: Push) -> None:
        """Record, in a mode without rounds, that a new push is about to update the tables."""
        self.workers.pushed(push)
        self.staleness.pushed(push.worker)
        self.consistency.pushed(push)

    def serve(self, pull: Pull) -> None:
        """Record that a pull is answered."""
        self.staleness.pulled(pull.worker)
        self.consistency.serve(pull)

    def _pull(self, pull: Pull, call: Call) -> list[Instruction]:
        self.workers.admit(pull.worker, pull.incarnation)
        for read in pull.reads:
            self.tables[read.table]  # raises UnknownTable, which refuses the pull
        # A pull without a commit changes nothing for other pulls.
        if not pull.commit and self.consistency.is_ready(pull):
            return [self._serve(call, pull)]
        if pull.commit and self.rounds.commit(pull.worker, pull.commit):
            self.workers.said(pull.worker, pull.progress)
        self._waiting[call] = pull
        return self._advance()

    def _expire(self, call: Call) -> list[Instruction]:
        pull = self._waiting.pop(call, None)
        return [] if pull is None else [SendError(call, self.consistency.late(pull))]

    def _advance(self) -> list[Instruction]:
        """Take a snapshot that is due, close complete rounds, and answer pulls that no longer have to wait.

        The event that led here has already taken effect. If the log has no space for the record of a closed
        round, the round waits for RetryRoom, because an error would only go to the caller of this event.
        """
        # A snapshot after round r is due before round r + 1 closes: check before the loop and in each turn.
        instructions = [] if self.cuts.under_way is None else self._cut_if_due()
        self.waits_for_room = False
        while self._may_close() and not self.cuts.holds_rounds(self.rounds.closed):
            members = tuple(sorted(self.rounds.held))
            progress = self.workers.progress_of(members)
            try:
                applying = self._recorded(CloseRound(self.rounds.closed + 1, members, progress))
            except NoRoom:
                self.waits_for_room = True
                break
            with applying:
                update(self.tables, self.rounds.close())
                self.tables.budget.held = 0
            instructions += self._cut_if_due()
        if self._waiting:
            is_ready = self.consistency.is_ready
            ready = {call: pull for call, pull in self._waiting.items() if is_ready(pull)}
            instructions += [self._serve(call, pull) for call, pull in ready.items()]
            # Only now: if an unexpected error comes before, each of these pulls still waits here for its
            # deadline, and so gets a reply.
            for call in ready:
                del self._waiting[call]
        return instructions

    def _may_close(self) -> bool:
        settled = (
            not self.replaying and self.workers.is_settled()
        )  # during replay, records close rounds
        return settled and self.consistency.rounds.is_complete()

    def _serve(self, call: Call, pull: Pull) -> SendValues:
        self.serve(pull)
        return SendValues(call, pull.reads)

    def create(self, spec: TableSpec, value: Floats, maker: int | None = None) -> bool:
        """Make a table unless it exists; return whether it was made.

        Args:
            spec: Definition of the table.
            value: Initial values of this server's range (dense), or empty (sparse).
            maker: Worker that makes the table, or None if no worker does.

        Raises:
            TableConflict: A table of this name has another definition.
        """
        if self.tables.has(spec):
            return False
        self._check_changeable()
        # Made before its record and added after it: too little memory must not leave a record, and a record
        # that fails must not leave a table.
        table = self.tables.make(spec, value, may_refuse=not self.replaying)
        try:
            self._check_held_room(spec)
            applying = self._recorded(CreateTable(spec, value, maker))
        except BaseException:
            self.tables.release(spec)
            raise
        with applying:
            self.tables[spec.key] = table
            if maker is not None:
                self.tables.makers[spec.key] = maker
        return True

    def _check_held_room(self, spec: TableSpec) -> None:
        """Raise an error if a table that was just made leaves too little memory for the held pushes."""
        try:
            check_write_room(self.tables, (), self.rounds.held)
        except UsageError as error:
            raise UsageError(
                f"table {spec.name!r} cannot be made while pushes wait for their round: {error}"
            ) from None

    def fill(self, fill: RestorePart) -> None:
        """Restore a part of a table from a snapshot.

        Raises:
            UsageError: The table has no room, or the part does not fit it; nothing was changed.
        """
        table = self.tables[fill.table]
        check_columns(table, fill.columns)
        with self.tables.budget.loading():
            rows = (fill.table, fill.columns.get(ROW_IDS))
            check_write_room(self.tables, [rows], self.rounds.held)
            with self._recorded(fill):
                refill(table, fill.clock, fill.columns)

    def _write(self, write: WriteState, call: Call) -> list[Instruction]:
        for state in write.states:
            self.tables.check_state(state)
        if self.workers.is_new_write(write):
            rows = [(state.table, state.ids) for state in write.states]
            check_write_room(self.tables, rows, self.rounds.held)
            with self._recorded(write):
                self.workers.wrote(write)
                for state in write.states:
                    self.tables.restore(state)
        return [SendOutcome(call)]

    def _shrink(self, event: Shrink, call: Call) -> list[Instruction]:
        self.tables.check_shrink(event)
        if not self.workers.is_new_write(event):
            return [SendOutcome(call)]
        with self._recorded(event):
            self.workers.wrote(event)
            return [SendOutcome(call, number=self.tables.shrink(event))]

    @property
    def tick_every(self) -> float:
        """Seconds between the Tick events that this shard needs, or 0 if it needs none."""
        return self.consistency.tick_every(self.tables.tick_every)

    def _tick(self, seconds: float, call: Call) -> list[Instruction]:
        if seconds > 0 and self.tables.tick_every:
            with self._recorded(Tick(seconds)):
                self.tables.tick(seconds)
        return [SendOutcome(call), *(self._advance() if self.consistency.tick(seconds) else ())]

    def _begin_cut(self, event: BeginCut, call: Call) -> list[Instruction]:
        other_mode = None if self.consistency.declared.has_rounds else self.mode
        event.cutting.check_round(self.rounds.closed, other_mode, self.index)
        self.cuts.begin_cut(event.cutting)
        return [SendOutcome(call, number=self.rounds.closed), *self._advance()]

    def _end_cut(self, event: EndCut, call: Call) -> list[Instruction]:
        self.cuts.give_up(event.number)
        self.delta_bases.drop_before(self.tables, event.base)
        return [SendOutcome(call), *self._advance()]

    def _wait_for_cut(self, push: Push) -> None:
        """Raise Later for a push that is not in a snapshot which the shard has begun but not taken yet.

        Such a push comes after the worker's mark, the number of its last push in the snapshot. The mark that
        comes with the push takes effect even then, because the push may arrive before the worker's MarkCut.
        So this is the last check of a push: a push that is refused for another reason must not set a mark.
        """
        if push.cut is not None:
            number, last = push.cut
            addressed = None if push.sequence <= last else min(push.follows, last)
            self.cuts.mark_worker(number, push.worker, push.incarnation, last, addressed)
        self.cuts.check_behind(push.worker, push.sequence, self.index)

    def _cut_if_due(self) -> list[Instruction]:
        if not self.cuts.is_due(self.rounds.closed, self.workers.sequences, self.rounds.left):
            return []
        cutting = self.cuts.under_way
        assert cutting is not None
        try:
            applying = self._recorded(MakeCut(cutting.number))
        except PsfleetError as error:  # without its record the snapshot must not count as taken
            self.cuts.give_up(failure=error)
            return []
        with applying:
            self.cuts.complete_cut()
        return [WriteSnapshot(self.freeze(cutting))]

    def freeze(self, cutting: PendingCut | None = None) -> FrozenShard:
        """Return an image of the shard now. It can be read while the shard continues, and must be closed.

        Args:
            cutting: Snapshot that the image is for, or None if it is for another use.
        """
        cutting = cutting or PendingCut(0)
        frozen = FrozenShard(
            cutting.number,
            self.index,
            self.servers,
            self.delta_bases.freeze(self.tables, cutting.since),
            self.state(),
            self.mode or "",
            self.rounds.closed,
            self.workers.last_pushes(cutting.marks),
            cutting.since,
        )
        if cutting.remember:
            self.delta_bases.remember(self.tables, cutting.number)
        if cutting.number:
            self.last_cuts.advance(self.tables, cutting.number)
        return frozen

    def state(self) -> ShardState:
        """Return the shard's state without the content of its tables."""
        makers = self.tables.makers
        return ShardState(self.workers, self.consistency, self.cuts.last, makers).copied()

    def become(self, state: ShardState) -> None:
        """Replace this shard's state, except its tables' rows, with a saved state."""
        state = state.copied()  # it is changed from now on, and the caller may use its own further
        self.workers.become(state.workers)
        self.consistency = state.consistency
        self.consistency.server = self.index
        self.cuts = CutState(state.cut)
        self.tables.makers = state.makers

    def _freeze(self, event: PrepareView) -> ViewReport:
        """Stop closing rounds until the new membership is installed, and return the report of this shard."""
        self.workers.freeze(event)
        self.cuts.give_up()
        return self.workers.report(self.mode or "", self.rounds)

    def _install(self, event: InstallView, call: Call) -> list[Instruction]:
        if event.view == self.workers.view:  # a repeated message
            return [SendOutcome(call, number=self.rounds.remaining())]
        self.workers.check_install(event)
        with self._recorded(event):
            self.apply_view(event)
            self.workers.frozen = False
        refusals = [
            SendError(waiting_call, self.workers.fenced(pull.worker, pull.incarnation))
            for waiting_call, pull in self._waiting.items()
            if self.workers.incarnations.get(pull.worker) != pull.incarnation
        ]
        for refusal in refusals:
            del self._waiting[refusal.call]
        return [SendOutcome(call, number=self.rounds.remaining()), *refusals, *self._advance()]

    def apply_view(self, event: InstallView) -> None:
        """Adopt the membership of a view (numbered membership), and begin the worker processes new in it."""
        # Rounds first: they compare the view with the incarnations until now, which `workers.install`
        # replaces.
        self.consistency.install(event, self.workers.incarnations)
        for worker, incarnation in self.workers.install(event):
            self._begin_incarnation(worker, incarnation)

    def _recorded(self, record: Record) -> _AppliedChange:
        """Write a record, and return the context manager in which its change must be applied next.

        Raises:
            PsfleetError: The record was not written. Nothing may change.
        """
        self._record(record)
        return _AppliedChange(self)

    def _record(self, record: Record) -> None:
        if self.journal is None:
            return
        try:
            self.journal(record)
        except PsfleetError:
            raise
        # The log may have the record, for example if only the standby lacks it.
        except Exception as error:
            self.tear(error)
            raise

    def validate(self) -> None:
        """Check the invariants; for tests."""
        self.workers.validate()
        self.consistency.validate()
        assert not any(map(self.consistency.is_ready, self._waiting.values()))
