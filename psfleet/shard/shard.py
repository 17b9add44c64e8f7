"""One shard: its tables and the order in which pushes reach them."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import (
    ConfigError,
    DeadlineExceeded,
    Fenced,
    Gap,
    Later,
    NotReady,
    ProtocolError,
    PsfleetError,
    ShapeError,
    TableConflict,
    UnknownTable,
    UsageError,
)
from psfleet.kernels.dedup import merge_pushes
from psfleet.routing import check_elements
from psfleet.runtime import Gradient, Read
from psfleet.shard import clocks, cuts, events, rounds, views
from psfleet.shard.clocks import Clocks
from psfleet.shard.core import Core, dataclasses_of, read_core, write_core
from psfleet.shard.cuts import Cuts, Cutting
from psfleet.shard.events import (
    Answer,
    BeginCut,
    Call,
    Close,
    Create,
    Cut,
    EndCut,
    Event,
    Evict,
    Expire,
    Fill,
    Instruction,
    Join,
    Journal,
    Keep,
    Leave,
    MarkCut,
    Mode,
    Pull,
    Push,
    Record,
    Refuse,
    Serve,
    Shrink,
    State,
    Tell,
    Tick,
    Write,
)
from psfleet.shard.frozen import FrozenShard
from psfleet.shard.layout import dense_range
from psfleet.shard.rounds import Rounds
from psfleet.shard.staleness import Staleness
from psfleet.shard.views import Freeze, Install, Position, Report
from psfleet.tables.budget import Budget
from psfleet.tables.content import Mark
from psfleet.tables.dense import DenseTable
from psfleet.tables.frozen import FrozenTable
from psfleet.tables.refilling import refill
from psfleet.tables.sparse import SparseTable
from psfleet.tables.spec import TableSpec
from psfleet.tables.weights import add_rows, add_values

__all__ = ["Counters", "Shard"]

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Table = DenseTable | SparseTable

_MOST = 2**62  # that a count may reach; those on the wire have 64 bits


@dataclass
class Counters:
    """What the shard has seen, for displays. Not part of its state."""

    pushes: int = 0
    repeats: int = 0
    samples: dict[int, int] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)


class Shard:
    """The deterministic state machine behind a server, and behind the embedded runtime.

    `handle` must be called by one thread at a time. `read` may run beside it.

    Attributes:
        journal: Gets every record before it takes effect; None: nothing is kept.
    """

    def __init__(self, index: int = 0, servers: int = 1, workers: int = 1) -> None:
        self.index = index
        self.servers = servers
        self.workers = workers
        self.mode: Mode | None = None
        self.tables: dict[int, Table] = {}
        self.lives: dict[int, int] = {}  # worker -> incarnation
        self.sequences: dict[int, int] = {}  # worker -> last applied push of its life (async)
        self.writes: dict[int, int] = {}  # worker -> last write of its life
        self.makers: dict[int, int] = {}  # table -> worker that made it
        self.positions: dict[int, Position] = {}  # worker -> how far it is with its data
        self.newest: dict[int, int] = {}  # worker -> its last life, which may be over
        self.rounds = Rounds(set(range(workers)))
        self.view = 0  # the one that is installed; 0: none, lives begin when they join
        self.promised = 0  # the one for which it is frozen, or `view`
        self.frozen = False  # it has just started and waits for a view
        self.refused: set[tuple[int, int]] = (
            set()
        )  # workers' lives that the next view will have ended
        self.clocks = Clocks()
        self.cuts = Cuts()
        self.moments: dict[int, dict[int, Mark]] = {}  # cut -> table -> mark, for deltas
        self.switches = 0  # changes of the mode so far
        self.staleness = Staleness()  # for displays
        self.journal: Journal | None = None
        self.counters = Counters()
        self.budget = Budget()
        self._replaying = False
        self._parked: dict[Call, Pull] = {}

    # -- tables --------------------------------------------------------------------------------

    def create(self, spec: TableSpec, value: Floats, maker: int | None = None) -> bool:
        """Make a table unless it is there; `value` is this server's slice (dense) or empty.

        Raises:
            TableConflict: It is there with another definition.
        """
        there = self.tables.get(spec.key)
        if there is not None:
            if there.spec != spec:
                raise TableConflict(f"table {spec.name!r} exists as {there.spec}; asked for {spec}")
            return False
        if spec.kind == "sparse":
            made: Table = SparseTable(spec, servers=self.servers, budget=self.budget)
        else:
            made = self._dense(spec, value)
        self._record(Create(spec, value, maker))
        self.tables[spec.key] = made
        if maker is not None:
            self.makers[spec.key] = maker
        return True

    def _dense(self, spec: TableSpec, value: Floats) -> DenseTable:
        low, high = dense_range(spec, self.index, self.servers)
        if value.shape != (high - low,):
            raise ShapeError(
                f"table {spec.name!r}: server {self.index} holds {high - low} values, "
                f"the first value has {value.shape}"
            )
        taken = value.nbytes * (1 + len(spec.rule.slots))
        self.budget.check(spec.name, taken, "be made")
        made = DenseTable(spec, value)
        self.budget.take(spec.name, made.bytes)
        return made

    def table(self, key: int) -> Table:
        """The table of that key."""
        found = self.tables.get(key)
        if found is None:
            raise UnknownTable(f"table {key:#x} is unknown to server {self.index}; create it first")
        return found

    def read(self, reads: Iterable[Read]) -> list[Floats]:
        """Values for a pull: sparse rows [n, dim] in the order of the ids, dense this slice."""
        reads = list(reads)
        out = [np.empty(shape, np.float32) for shape in map(self.shape_of, reads)]
        self.read_into(reads, out)
        return out

    def shape_of(self, read: Read) -> tuple[int, ...]:
        """The shape of the values that the read asks for."""
        table = self.table(read.table)
        if isinstance(table, DenseTable):
            return (table.count,)
        if read.ids is None:
            raise ShapeError(f"table {table.spec.name!r} is sparse; a pull from it needs ids")
        return (len(read.ids), table.spec.dim)

    def read_into(self, reads: Iterable[Read], out: Iterable[Floats]) -> None:
        """Write the values of each read to an array of its shape."""
        for read, values in zip(reads, out, strict=True):
            table = self.table(read.table)
            if isinstance(table, DenseTable):
                table.pull_into(values)
            else:
                assert read.ids is not None
                table.pull_into(read.ids, values)

    # -- events --------------------------------------------------------------------------------

    def handle(self, event: Event, call: Call) -> list[Instruction]:
        """Take one event; an error becomes a refusal of its call and changes nothing."""
        try:
            match event:
                case Push():
                    return self._push(event, call)
                case Pull():
                    return self._pull(event, call)
                case Join():
                    return self._join(event, call)
                case Leave():
                    return self._leave(event, call)
                case Write():
                    return self._write(event, call)
                case Shrink():
                    return self._shrink(event, call)
                case Tick(seconds):
                    return self._tick(seconds, call)
                case Fill():
                    self.fill(event)
                    return [Answer(call)]
                case BeginCut():
                    return self._begin_cut(event, call)
                case MarkCut(number, worker, incarnation, last):
                    self.cuts.mark(number, worker, incarnation, last)
                    return [Answer(call), *self._advance()]
                case EndCut():
                    return self._end_cut(event, call)
                case Expire():
                    return self._expire(call)
                case Freeze():
                    return [Tell(call, self._freeze(event))]
                case Install():
                    return self._install(event, call)
        except PsfleetError as error:
            return [Refuse(call, error)]

    def _join(self, event: Join, call: Call) -> list[Instruction]:
        managed = bool(self.view or self.frozen)
        if not managed and not 0 <= event.worker < self.workers:
            raise ConfigError(
                f"worker {event.worker} wants to join, "
                f"but the fleet has workers 0 to {self.workers - 1}"
            )
        if event.switch <= self.switches:
            self._check_mode(event)
        else:
            self._check_switch(event)
        if managed:
            self.admit(event.worker, event.incarnation)
        known = self.lives.get(event.worker, -1)
        if event.incarnation < known:
            raise Fenced(
                f"life {event.incarnation} of worker {event.worker} is over; life {known} has begun"
            )
        if event.incarnation > known or self.mode is None:
            self._record(event)
            self.mode, self.clocks.staleness = event.mode, event.staleness
        if event.incarnation > known:
            self.rounds.begin(event.worker)
            self._begin(event.worker, event.incarnation)
        if event.switch > self.switches:
            self._switch(event)
        last = self.rounds.closed if self.mode == "sync" else self.sequences[event.worker]
        clock = self.clocks.at.get(event.worker, 0)
        # A clock that begins beside others may be what a pull has waited for.
        return [Answer(call, number=last, clock=clock), *self._advance()]

    def _begin(self, worker: int, incarnation: int) -> None:
        self.cuts.give_up()  # the snapshot does not know of this life
        self.lives[worker] = self.newest[worker] = incarnation
        self.sequences[worker] = self.writes[worker] = 0
        self.positions.pop(worker, None)
        self.clocks.begin(worker, self.rounds.running())

    def _check_mode(self, event: Join) -> None:
        if self.mode is None:
            return
        if event.mode != self.mode:
            raise ConfigError(
                f"worker {event.worker} asks for mode {event.mode!r}, "
                f"but the fleet runs in mode {self.mode!r}"
            )
        if event.mode == "ssp" and event.staleness != self.clocks.staleness:
            raise ConfigError(
                f"worker {event.worker} asks for a staleness of {event.staleness}, "
                f"but the fleet runs with {self.clocks.staleness}"
            )

    def _check_switch(self, event: Join) -> None:
        if event.switch != self.switches + 1 or self.rounds.held or self._parked:
            raise ProtocolError(
                f"worker {event.worker} makes change {event.switch} of the mode, but server "
                f"{self.index} has made {self.switches} and not all is settled here"
            )

    def _switch(self, event: Join) -> None:
        """All workers have met with nothing under way: go on in another mode.

        Numbers go on from the highest that was used, in rounds and in every worker's sequence, so that
        whatever of the old mode still arrives late is recognised as old.
        """
        self._record(event)
        last = max(self.rounds.closed, *self.sequences.values())
        self.rounds.closed = last
        self.sequences = dict.fromkeys(self.sequences, last)
        self.mode, self.switches = event.mode, event.switch
        self.clocks = Clocks(event.staleness)

    def _leave(self, event: Leave, call: Call) -> list[Instruction]:
        self.admit(event.worker, event.incarnation)
        if not event.rest:
            if event.worker not in self.rounds.left:
                self._record(event)
                rested = bool(self.rounds.resting)
                self.rounds.leave(event.worker)
                if rested and not self.rounds.resting:
                    self.clocks.restart()
        elif self.rounds.is_new_rest(event.worker, event.rest):
            self._record(event)
            self.rounds.rest(event.worker, event.rest)
            if not self.rounds.resting:  # it was the last to come
                self.clocks.restart()
        return [Answer(call, number=self.rounds.remaining()), *self._advance()]

    def _push(self, push: Push, call: Call) -> list[Instruction]:
        self.admit(push.worker, push.incarnation)
        for gradient in push.gradients:
            self._check(gradient)
        fresh = self.rounds.is_new(push) if self.mode == "sync" else self._next_in_sequence(push)
        if fresh:
            self._wait_for_cut(push)
            self._hold_bytes(push)
            self._make_room(push.gradients)
            self._check_room(push.gradients)
            self._record(push)
            self._accept(push)
        self._count(push, fresh)
        return [Answer(call, "held" if self.mode == "sync" else "applied"), *self._advance()]

    def _accept(self, push: Push) -> None:
        if self.mode == "sync":
            self.rounds.hold(push)
        else:
            self.sequences[push.worker] = push.sequence
            if push.position is not None:
                self.positions[push.worker] = push.position
            self.staleness.pushed(push.worker)
            if self.mode == "ssp":
                self.clocks.advance(push.worker, push.clock)
            self._apply([push])

    def _write(self, write: Write, call: Call) -> list[Instruction]:
        for state in write.states:
            self._check_state(state)
        if write.number:  # a stock client may leave it out
            self.admit(write.worker, write.incarnation)
            if write.number <= self.writes[write.worker]:
                return [Answer(call)]
        self._check_room(write.states)
        self._record(write)
        if write.number:
            self.writes[write.worker] = write.number
        for state in write.states:
            self._restore(state)
        return [Answer(call)]

    def _shrink(self, event: Shrink, call: Call) -> list[Instruction]:
        if event.table and not isinstance(table := self.table(event.table), SparseTable):
            raise UsageError(f"table {table.spec.name!r} is dense; only sparse tables shrink")
        if not math.isfinite(event.threshold or 0.0):
            raise UsageError(f"the threshold of a shrink is {event.threshold}; it must be a number")
        if event.number:
            self.admit(event.worker, event.incarnation)
            if event.number <= self.writes[event.worker]:
                return [Answer(call)]
        self._record(event)
        if event.number:
            self.writes[event.worker] = event.number
        gone = [
            table.shrink(event.threshold, event.unseen)
            for key, table in self.tables.items()
            if isinstance(table, SparseTable) and event.table in (0, key)
        ]
        return [Answer(call, number=sum(gone))]

    def _evict(self, key: int, ids: Ids) -> None:
        table = self.table(key)
        assert isinstance(table, SparseTable)
        self._record(Evict(key, ids))
        table.remove(ids)

    @property
    def tick_every(self) -> float:
        """How many seconds should lie between ticks; 0: none are wanted."""
        tables = [table for table in self.tables.values() if isinstance(table, SparseTable)]
        return min((table.tick_every for table in tables if table.tick_every), default=0.0)

    def _tick(self, seconds: float, call: Call) -> list[Instruction]:
        if seconds > 0 and self.tick_every:
            self._record(Tick(seconds))
            for table in self.tables.values():
                if isinstance(table, SparseTable):
                    table.tick(seconds)
        return [Answer(call)]

    def _check_state(self, state: State) -> None:
        if state.step > _MOST:
            raise UsageError(
                f"a state says that its table has had {state.step} updates; 2^62 is most"
            )
        table = self.table(state.table)
        if isinstance(table, DenseTable):
            table.check_part(state.start, [state.values.shape[1]] * len(state.values))

    def _restore(self, state: State) -> None:
        table = self.table(state.table)
        if isinstance(table, DenseTable):
            table.restore(state.step, list(state.values), state.start)
        else:
            assert state.ids is not None
            table.restore_step(state.step)
            table.restore(state.ids, state.values, state.touched, state.scores)

    def _pull(self, pull: Pull, call: Call) -> list[Instruction]:
        self.admit(pull.worker, pull.incarnation)
        for read in pull.reads:
            self.table(read.table)
        if pull.commit:
            self.rounds.commit(pull.worker, pull.commit)
        self._parked[call] = pull
        return self._advance()

    def _expire(self, call: Call) -> list[Instruction]:
        pull = self._parked.pop(call, None)
        if pull is None:
            return []
        if self.mode == "ssp":
            awaited = self.clocks.awaited(pull.clock, self.rounds.running())
            what = (
                f"worker {pull.worker} is {self.clocks.staleness + 1} pushes ahead on "
                f"server {self.index} and was not caught up with in time"
            )
        else:
            awaited = self.rounds.awaited()
            what = f"round {pull.commit} did not close in time on server {self.index}"
        waiting = ", ".join(f"worker {seat}" for seat in awaited)
        error = DeadlineExceeded(f"{what}: it waits for {waiting}")
        return [Refuse(call, error)]

    def fill(self, fill: Fill) -> None:
        """Set a part of a table as a snapshot holds it.

        Raises:
            UsageError: The table has no room, or it is not a part of it; nothing was changed.
        """
        table = self.table(fill.table)
        if "ids" in fill.columns and isinstance(table, SparseTable):
            table.check_room([fill.columns["ids"]])
        self._record(fill)
        refill(table, fill.clock, fill.columns)

    # -- snapshots -----------------------------------------------------------------------------

    def _begin_cut(self, event: BeginCut, call: Call) -> list[Instruction]:
        cutting = event.cutting
        if cutting.round is not None and cutting.round < self.rounds.closed:
            raise ProtocolError(
                f"snapshot {cutting.number} is to hold round {cutting.round}, but round "
                f"{self.rounds.closed} is closed on server {self.index}"
            )
        self.cuts.begin(cutting)
        return [Answer(call, number=self.rounds.closed), *self._advance()]

    def _end_cut(self, event: EndCut, call: Call) -> list[Instruction]:
        self.cuts.give_up(event.number)
        for number in [n for n in self.moments if not 0 < event.base <= n]:
            for key, mark in self.moments.pop(number).items():
                table = self.tables[key]
                assert isinstance(table, SparseTable)
                table.release(mark)
        return [Answer(call), *self._advance()]

    def _wait_for_cut(self, push: Push) -> None:
        """Refuse for now a push behind the mark of a cut that has not been made."""
        if push.cut is not None:
            number, last = push.cut
            self.cuts.mark(number, push.worker, push.incarnation, last)
        if self.cuts.is_behind(push.worker, push.sequence):
            raise Later(
                f"push {push.sequence} of worker {push.worker} comes after the cut of a snapshot "
                f"that server {self.index} has not made; send it again"
            )

    def _cut_if_due(self) -> list[Instruction]:
        if not self.cuts.is_due(self.rounds.closed, self.sequences, self.rounds.left):
            return []
        cutting = self.cuts.under_way
        assert cutting is not None
        try:
            self._record(Cut(cutting.number))
        except PsfleetError:  # it cannot be kept; whoever wanted it is not told that it was made
            self.cuts.give_up()
            return []
        self.cuts.made()
        return [Keep(self.freeze(cutting))]

    def freeze(self, cutting: Cutting | None = None) -> FrozenShard:
        """The shard as it is now, to be read while it goes on; close it when it is read."""
        cutting = cutting or Cutting(0)
        moments = self.moments.get(cutting.since, {})
        frozen = FrozenShard(
            cutting.number,
            self.index,
            self.servers,
            [_frozen(table, moments.get(key)) for key, table in self.tables.items()],
            read_core(self),
            self.mode or "",
            self.rounds.closed,
            {seat: (life, self.sequences[seat]) for seat, life in self.lives.items()},
            cutting.since,
        )
        if cutting.remember:
            self.moments[cutting.number] = {
                key: table.mark()
                for key, table in self.tables.items()
                if isinstance(table, SparseTable)
            }
        return frozen

    def progress(self) -> int:
        """How far the training is: rounds in sync mode, else the pushes of the fastest worker."""
        return max(self.rounds.closed, *self.sequences.values(), 0)

    def become(self, core: Core) -> None:
        """Be what another shard was beside its tables.

        Raises:
            CheckpointError: The value is not one of a shard.
        """
        modules = (events, rounds, clocks, cuts, views)
        write_core(
            self, core, {Gradient, *(cls for module in modules for cls in dataclasses_of(module))}
        )

    # -- views ---------------------------------------------------------------------------------

    def _freeze(self, event: Freeze) -> Report:
        """Close no round until the view is installed; where this shard stands."""
        if event.view < self.promised or event.view <= self.view:
            raise ProtocolError(
                f"view {event.view} comes after view {max(self.promised, self.view)} "
                f"on server {self.index}"
            )
        self.promised = event.view
        self.refused |= set(event.ended.items())  # of decided views that have not come, too
        self.cuts.give_up()
        rounds = self.rounds
        return Report(
            self.mode or "",
            rounds.closed,
            dict(self.lives),
            {
                seat: max(rounds.committed.get(seat, 0), rounds.counted.get(seat, 0))
                for seat in self.lives
            },
            dict(rounds.rests),
            frozenset(rounds.left),
            dict(self.sequences),
            dict(self.positions),
        )

    def _install(self, event: Install, call: Call) -> list[Instruction]:
        if event.view == self.view:
            return [Answer(call, number=self.rounds.remaining())]
        if event.view != self.promised:
            raise ProtocolError(
                f"view {event.view} cannot be installed on server {self.index}, which is frozen for "
                f"view {self.promised}"
            )
        self._record(event)
        self._take_view(event)
        self.frozen = False
        ended = [
            Refuse(parked, self._fenced(pull.worker, pull.incarnation))
            for parked, pull in self._parked.items()
            if self.lives.get(pull.worker) != pull.incarnation
        ]
        for refusal in ended:
            del self._parked[refusal.call]
        return [Answer(call, number=self.rounds.remaining()), *ended, *self._advance()]

    def _take_view(self, event: Install) -> None:
        self.view = self.promised = event.view
        self.refused = set()
        rested = bool(self.rounds.resting)
        self.rounds.install(event.seats, self.lives)
        if rested and not self.rounds.resting:  # those that are left have met
            self.clocks.restart()
        now = {seat: seated.life for seat, seated in event.seats.items()}
        for worker in [*self.lives]:
            if worker not in self.rounds.seats:
                del self.lives[worker], self.sequences[worker], self.writes[worker]
                self.positions.pop(worker, None)
        for worker, life in now.items():
            if life is not None and life.incarnation not in (0, self.lives.get(worker)):
                self._begin(worker, life.incarnation)

    def _fenced(self, worker: int, incarnation: int) -> Fenced:
        now = self.lives.get(worker)
        then = "its seat is not taken" if now is None else f"life {now} has begun"
        return Fenced(f"life {incarnation} of worker {worker} is over; {then}")

    # -- the journal ---------------------------------------------------------------------------

    def _record(self, record: Record) -> None:
        if self.journal is not None:
            self.journal(record)

    def replay(self, record: Record) -> None:
        """Take a record of an earlier process once more; the journal must be None.

        Raises:
            ProtocolError: The record cannot follow those before it.
            PsfleetError: It was refused then too, or does not fit the tables.
        """
        limit, self.budget.limit = self.budget.limit, None  # what was accepted then is accepted now
        self._replaying = True
        try:
            self._replay(record)
        finally:
            self.budget.limit, self._replaying = limit, False

    def _replay(self, record: Record) -> None:
        match record:
            case Create(spec, value, maker):
                self.create(spec, value, maker)
            case Close(number, members):
                if number != self.rounds.closed + 1 or members != tuple(sorted(self.rounds.held)):
                    raise ProtocolError(
                        f"round {number} closes with the pushes of workers {list(members)}, but round "
                        f"{self.rounds.closed + 1} holds those of {sorted(self.rounds.held)}"
                    )
                self._apply(self.rounds.close())
            case Install():
                self._take_view(record)
            case Cut(number):
                self.cuts.last = number
            case Evict(key, ids):
                self._evict(key, ids)
            case _:
                for instruction in self.handle(record, None):
                    if isinstance(instruction, Refuse):
                        raise instruction.error

    def admit(self, worker: int, incarnation: int) -> None:
        """Refuse a caller whose life has not begun here, or is over."""
        if self.frozen or (worker, incarnation) in self.refused:
            raise NotReady(f"server {self.index} waits to hear who is in the fleet")
        if self.lives.get(worker) == incarnation:
            return
        if worker not in self.newest or incarnation > self.newest[worker]:
            raise NotReady(
                f"life {incarnation} of worker {worker} has not joined server {self.index}"
            )
        raise self._fenced(worker, incarnation)

    def _check(self, gradient: Gradient) -> None:
        table = self.table(gradient.table)
        name, shape = table.spec.name, gradient.values.shape
        if isinstance(table, DenseTable):
            if gradient.ids is not None:
                check_elements(table.spec, gradient.values, gradient.ids, table.count)
            elif shape != (table.count,):
                raise ShapeError(
                    f"table {name!r}: server {self.index} holds {table.count} values, "
                    f"the gradient has shape {shape}"
                )
        elif gradient.ids is None or shape != (len(gradient.ids), table.spec.push_width):
            raise ShapeError(
                f"table {name!r} has rows of {table.spec.push_width}, "
                f"the gradient has shape {shape} and "
                f"{'no' if gradient.ids is None else len(gradient.ids)} ids"
            )

    def _check_room(self, parts: Sequence[Gradient] | Sequence[State]) -> None:
        """Refuse rows for which a table has no room beside those of the pushes that are held."""
        for table, ids in self._wanted(parts):
            table.check_room(ids)

    def _make_room(self, parts: Sequence[Gradient]) -> None:
        """Where memory is short, let rows go of tables that may; none if a table refuses its part."""
        if self.budget.limit is None:
            return
        found = [(table, ids, table.surplus(ids)) for table, ids in self._wanted(parts)]
        for table, ids, gone in found:
            if not len(gone):
                table.check_room(ids)
        for table, _, gone in found:
            if len(gone):
                self._evict(table.spec.key, gone)

    def _hold_bytes(self, push: Push) -> None:
        """Refuse a push that has to wait for its round if there is no memory for it."""
        if self.budget.limit is None or self.mode != "sync":
            return
        pushes = [*self.rounds.held.values(), push]
        held = sum(
            gradient.values.nbytes + (0 if gradient.ids is None else gradient.ids.nbytes)
            for waiting in pushes
            for gradient in waiting.gradients
        )
        left = self.budget.room() + self.budget.held
        if held > left:
            raise UsageError(
                f"the pushes of round {push.sequence} take {held} bytes while they wait for it, "
                f"server {self.index} has {max(left, 0)} left for them; give the server more memory"
            )
        self.budget.held = held

    def _wanted(
        self, parts: Sequence[Gradient] | Sequence[State]
    ) -> Iterator[tuple[SparseTable, list[Ids]]]:
        """The sparse tables of these parts, and all ids that their next update may name."""
        wanted: dict[int, list[Ids]] = {part.table: [] for part in parts if part.ids is not None}
        held = (gradient for push in self.rounds.held.values() for gradient in push.gradients)
        for part in (*parts, *held):
            if part.ids is not None and part.table in wanted:
                wanted[part.table].append(part.ids)
        for key, ids in wanted.items():
            table = self.tables[key]
            if isinstance(table, SparseTable):
                yield table, ids

    def _next_in_sequence(self, push: Push) -> bool:
        last = self.sequences[push.worker]
        if push.sequence > last + 1:
            raise Gap(
                f"worker {push.worker} sent push {push.sequence}, "
                f"but push {last + 1} has not arrived"
            )
        return push.sequence > last

    def _advance(self) -> list[Instruction]:
        """Close what can be closed and serve every pull that waits for nothing more."""
        kept = self._cut_if_due()
        while self._may_close() and not self.cuts.holds_rounds(self.rounds.closed):
            self._record(Close(self.rounds.closed + 1, tuple(sorted(self.rounds.held))))
            self._apply(self.rounds.close())
            self.budget.held = 0
            kept += self._cut_if_due()
        ready = [call for call, pull in self._parked.items() if self._is_ready(pull)]
        return [*kept, *(self._serve(call, self._parked.pop(call)) for call in ready)]

    def _may_close(self) -> bool:
        settled = self.promised <= self.view and not self._replaying  # then records say what closes
        return settled and self.rounds.is_complete()

    def _is_ready(self, pull: Pull) -> bool:
        if self.mode == "ssp":
            return not self.clocks.awaited(pull.clock, self.rounds.running())
        return pull.commit <= self.rounds.closed

    def _serve(self, call: Call, pull: Pull) -> Serve:
        self.staleness.pulled(pull.worker)
        if self.mode == "ssp":
            self.clocks.serve(pull.clock, self.rounds.running())
        return Serve(call, pull.reads)

    # -- updates -------------------------------------------------------------------------------

    def _apply(self, pushes: Sequence[Push]) -> None:
        """One update of every table: the mean over the pushes that name it, in seat order."""
        by_table: dict[int, list[Gradient]] = {}
        for push in pushes:
            for gradient in push.gradients:
                by_table.setdefault(gradient.table, []).append(gradient)
        for key, gradients in by_table.items():
            self._update(self.tables[key], gradients, 1.0 / len(gradients))

    def _update(self, table: Table, gradients: list[Gradient], scale: float) -> None:
        rate = gradients[0].learning_rate
        if self.mode == "geo":
            self._add(table, gradients[0])
        elif isinstance(table, DenseTable):
            table.push(
                _mean((_whole(gradient, table.count) for gradient in gradients), scale), rate
            )
        elif len(gradients) == 1 and scale == 1.0:
            assert gradients[0].ids is not None
            table.push(gradients[0].ids, gradients[0].values, rate)
        else:
            parts = [
                (gradient.ids, gradient.values)
                for gradient in gradients
                if gradient.ids is not None
            ]
            ids, rows = merge_pushes(parts, scale)
            if table.spec.scores:  # shows and clicks are counted, not averaged
                counts = [(ids, values[:, table.spec.dim :]) for ids, values in parts]
                rows[:, table.spec.dim :] = merge_pushes(counts, 1.0)[1]
            table.push(ids, rows, rate)

    def _add(self, table: Table, delta: Gradient) -> None:
        """Geo mode: what a push brings has been learned elsewhere."""
        if isinstance(table, DenseTable):
            add_values(table, _whole(delta, table.count))
        else:
            assert delta.ids is not None
            add_rows(table, delta.ids, delta.values)

    def _count(self, push: Push, fresh: bool) -> None:
        counters = self.counters
        if not fresh:
            counters.repeats += 1
            return
        counters.pushes += 1
        samples = counters.samples.get(push.worker, 0) + push.samples
        counters.samples[push.worker] = min(samples, _MOST)
        if push.loss is not None:
            counters.losses[push.worker] = push.loss

    def validate(self) -> None:
        """Check what must always hold; for tests."""
        self.rounds.validate()
        assert not any(map(self._is_ready, self._parked.values()))
        self.clocks.validate()
        assert set(self.sequences) == set(self.lives)


def _frozen(table: Table, mark: Mark | None) -> FrozenTable:
    """The table as it is now; of a sparse one, if there is a mark, what has changed since."""
    if isinstance(table, DenseTable) or mark is None:
        return table.freeze()
    changes = table.changed_since(mark)
    return table.freeze(changes.ids, changes.removed)


def _whole(gradient: Gradient, count: int) -> Floats:
    """A dense gradient of `count` values, zero where none was sent."""
    if gradient.ids is None:
        return gradient.values
    values = np.zeros(count, np.float32)
    values[gradient.ids] = gradient.values
    return values


def _mean(values: Iterator[Floats], scale: float) -> Floats:
    """The values summed in their order, times scale."""
    total = next(values)
    for number, value in enumerate(values):
        total = np.add(total, value, out=total if number else None)
    return total if scale == 1.0 else total * np.float32(scale)
