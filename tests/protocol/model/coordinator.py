"""The coordinator of the model: who is in which seat, which server serves which shard, what is cut when."""

import copy
from dataclasses import dataclass, field, replace
from typing import Any

from tests.protocol.model.decisions import FINISHED, Decisions, Leases, Snapshot, chunks
from tests.protocol.model.messages import (
    Alive,
    AskMap,
    Drain,
    Drained,
    Ended,
    Fenced,
    Freeze,
    Hello,
    Install,
    Installed,
    Leased,
    Leave,
    Map,
    Next,
    Register,
    Report,
    Seated,
    SnapshotDone,
    SnapshotNoted,
    SnapshotWanted,
)
from tests.protocol.model.settings import Mode, Rule, Settings
from tests.protocol.model.values import (
    CutNumber,
    Key,
    Life,
    Stretch,
    View,
    left_at,
    live,
    members,
    open_life,
    samples_of,
    stretch_at,
)
from tests.protocol.scheduler import Boot, Disk, Instruction, Received, Send, Store, Tick

__all__ = ["Coordinator", "Expire", "ExpireServer", "TakeSnapshot", "WantMode"]


@dataclass(frozen=True)
class Expire:
    """The stated time of a seat has passed."""

    seat: str


@dataclass(frozen=True)
class ExpireServer:
    """The stated time of a server has passed."""

    name: str


@dataclass(frozen=True)
class TakeSnapshot:
    """A snapshot is due (async modes)."""


@dataclass(frozen=True)
class WantMode:
    """Somebody asks for another mode."""

    mode: Mode


@dataclass
class _ViewChange:
    """A view change in progress. `drained`: what was drained before its freeze was sent (R18)."""

    view: View
    removed: dict[str, int | None]
    silent: set[str]
    joining: dict[str, int]
    drained: set[Key]
    reports: dict[int, Report] = field(default_factory=dict)


@dataclass
class _Taking:
    """A snapshot in progress (async modes)."""

    number: CutNumber
    view: View
    parts: dict[int, SnapshotDone] = field(default_factory=dict)


class Coordinator:
    """One process. `decisions` are what is on its disk, with the change that is being made."""

    def __init__(self, settings: Settings, disk: Disk) -> None:
        self.settings = settings
        self.out: list[Instruction] = []
        self.decisions: Decisions = copy.deepcopy(disk.fields["decisions"])
        self.decisions.starts += 1
        self.changing: _ViewChange | None = None
        self.installing: dict[int, Install] = {}
        self.is_due = True
        self._views = 0
        self._silent: set[str] = set()
        self._joining: dict[str, int] = {}
        self._attaching: set[int] = set()
        self._dead: set[str] = set()
        self._drained: set[Key] = set()
        self._taking: _Taking | None = None
        self._taken = 0
        self._rounds_kept: dict[CutNumber, dict[int, SnapshotDone]] = {}

    def handle(self, event: Any) -> list[Instruction]:
        """See scheduler.Machine."""
        self.out = []
        match event:
            case Boot():
                self._persist()
            case Tick():
                self._again()
            case Expire(seat):
                self._silent.add(seat)
                self.is_due = True
            case ExpireServer(name):
                self._server_is_dead(name)
            case WantMode(mode):
                if not self.decisions.wanted and mode != self.decisions.mode:
                    self.decisions.wanted = mode
                    self._persist()
                    self.is_due = True
            case TakeSnapshot():
                self._take_snapshot()
            case Received(source, message):
                self._receive(source, message)
        self._begin_if_due()
        return self.out

    def _receive(self, source: str, message: Any) -> None:
        match message:
            case Hello():
                self._hello(message)
            case Report():
                self._report(message)
            case Installed(view, shard):
                install = self.installing.get(shard)
                if install and install.view == view == self.decisions.view:
                    del self.installing[shard]
            case Register():
                self._register(source, message)
            case Drained():
                self._worker_drained(source, message)
            case Leave(seat, incarnation):
                self._leave((seat, incarnation))
            case Alive():
                self._alive(source, message)
            case AskMap():
                pairs = self.decisions.pairs
                self._send(source, Map({s: (p.term, p.primary) for s, p in pairs.items()}))
            case Next():
                self._next(source, message)
            case SnapshotDone():
                self._snapshot_done(source, message)

    def _send(self, to: str, message: Any) -> None:
        self.out.append(Send(to, message))

    def _persist(self) -> None:
        self.out.append(Store({"decisions": copy.deepcopy(self.decisions)}))

    def _again(self) -> None:
        """Say once more whatever may not have been heard."""
        if self.changing:
            self._send_freezes()
        for shard, install in self.installing.items():
            self._send(self.decisions.pairs[shard].primary, install)
        if self._taking:
            self._send_wanted()
        if self.decisions.wanted and self.decisions.mode != "sync":
            for seat, incarnation in live(self.decisions.roster).items():
                self._send(seat, Drain(incarnation or 0))

    # -- servers -------------------------------------------------------------------------------

    def _hello(self, hello: Hello) -> None:
        decisions, name = self.decisions, hello.name
        pair = decisions.pairs[hello.shard]
        self._dead.discard(name)
        if hello.boot > decisions.boots.get(name, 0):
            decisions.boots[name] = hello.boot
            if pair.primary == name:
                pair.term += 1
                self._start_again()
            self._persist()
        is_spare = self.settings.standby and name != pair.primary and not pair.standby
        if is_spare and hello.shard not in self._attaching and not self.changing:
            self.is_due = True
        caught_up = hello.caught_up
        if (
            caught_up
            and pair.primary == name
            and pair.standby is None
            and caught_up[1] > pair.floor
        ):
            self.is_due = True

    def _server_is_dead(self, name: str) -> None:
        """Take over, or drop a standby; persisted before any freeze tells of it (R10)."""
        self._dead.add(name)
        for shard, pair in self.decisions.pairs.items():
            if pair.primary == name and pair.standby:
                pair.primary, pair.standby = pair.standby[0], None
                pair.term, pair.floor = pair.term + 1, pair.attachment
            elif self.settings.standby and name == self._other(shard):
                pair.standby, pair.floor = None, pair.attachment
            else:
                continue
            self._persist()
            self._start_again()

    def _other(self, shard: int) -> str:
        """The server of the shard that is not its primary."""
        primary = self.decisions.pairs[shard].primary
        return f"S{shard}.{1 - int(primary[-1])}"

    def _start_again(self) -> None:
        """A view change that a primary's start has overtaken begins anew."""
        self.changing, self.installing, self.is_due = None, {}, True

    # -- view changes --------------------------------------------------------------------------

    def _begin_if_due(self) -> None:
        decisions = self.decisions
        if self.changing or not self.is_due:
            return
        if any(pair.primary not in decisions.boots for pair in decisions.pairs.values()):
            return
        self.is_due, self.installing, self._taking = False, {}, None
        self._views += 1
        removed = {
            seat: life.incarnation
            for seat in self._silent | set(self._joining)
            if (life := open_life(decisions.roster, seat)) is not None
        }
        self.changing = _ViewChange(
            (decisions.starts, self._views),
            removed,
            set(self._silent),
            dict(self._joining),
            set(self._drained),
        )
        self._silent, self._joining = set(), {}
        self._send_freezes()

    def _send_freezes(self) -> None:
        change = self.changing
        assert change is not None
        ended = tuple((seat, life) for seat, life in change.removed.items() if life is not None)
        for shard, pair in self.decisions.pairs.items():
            if shard not in change.reports:
                boot = self.decisions.boots[pair.primary]
                freeze = Freeze(change.view, pair.term, boot, pair.standby, pair.floor, ended)
                self._send(pair.primary, freeze)

    def _report(self, report: Report) -> None:
        change = self.changing
        if not change or report.view != change.view:
            return
        if report.term != self.decisions.pairs[report.shard].term:
            return
        change.reports[report.shard] = report
        if len(change.reports) == self.settings.shards:
            self.changing = None
            self._decide(change)

    def _decide(self, change: _ViewChange) -> None:
        decisions, reports = self.decisions, change.reports
        if any(report.lost for report in reports.values()):
            decisions.roll_back()
        elif any(report.generation < decisions.generation for report in reports.values()):
            # It has missed a roll-back; the install repeats that, the rest has to wait.
            self._silent |= change.silent
            self._joining.update(change.joining)
            self.is_due = True
        elif self._may_switch(change):
            self._switch(reports)
        else:
            self._change_members(change)
        attach = self._pair_up(reports)
        decisions.view = change.view
        if self.settings.obeys(Rule.PERSIST_FIRST):
            self._persist()
        self._send_installs(attach)
        if not self.settings.obeys(Rule.PERSIST_FIRST):
            self._persist()

    def _pair_up(self, reports: dict[int, Report]) -> dict[int, tuple[str, int]]:
        """Register standbys that are required; those that primaries are to attach."""
        pairs = self.decisions.pairs
        for shard, pair in pairs.items():
            found = reports[shard].standby
            pair.standby = found if found and found[1] > pair.floor else None
            if pair.standby:
                pair.attachment = max(pair.attachment, pair.standby[1])
        self._attaching = set()
        attach = {}
        for shard, pair in pairs.items():
            other = self._other(shard)
            alive = other in self.decisions.boots and other not in self._dead
            if self.settings.standby and not pair.standby and alive:
                pair.attachment += 1
                attach[shard] = (other, pair.attachment)
                self._attaching.add(shard)
        return attach

    def _send_installs(self, attach: dict[int, tuple[str, int]]) -> None:
        decisions = self.decisions
        for shard, pair in decisions.pairs.items():
            install = Install(
                decisions.view,
                pair.term,
                decisions.boots[pair.primary],
                decisions.generation,
                decisions.base,
                dict(decisions.roster),
                decisions.plan,
                decisions.mode,
                attach.get(shard),
            )
            self.installing[shard] = install
            self._send(pair.primary, install)

    # -- members -------------------------------------------------------------------------------

    def _change_members(self, change: _ViewChange) -> None:
        decisions, batch = self.decisions, self.settings.batch
        reports = change.reports
        closed = max(report.closed for report in reports.values())
        is_sync = decisions.mode == "sync"
        stopped = is_sync and stretch_at(decisions.plan, closed + 1).stops
        rest = left_at(decisions.plan, closed + 1, batch)
        if is_sync and decisions.wanted and not stopped and not rest:
            decisions.wanted = None  # nothing is left to train in another mode
        for seat, incarnation in change.removed.items():
            life = open_life(decisions.roster, seat)
            if life is None or life.incarnation != incarnation:
                continue
            if is_sync:
                first = self._end_in_round(seat, life, closed, reports)
            else:
                self._end_in_sequence(seat, life, reports)
                first = self._joining_clock(seat, reports)
            if seat in change.joining:
                decisions.seat(seat, change.joining[seat], first)
        for seat, boot in change.joining.items():
            if seat in change.removed:
                continue
            if is_sync and not rest:
                decisions.processes[seat] = (boot, FINISHED)
            else:
                first = closed + (1 if stopped else 2)
                decisions.seat(seat, boot, first if is_sync else self._joining_clock(seat, reports))
        if is_sync:
            self._plan_anew(closed, stopped)

    def _end_in_round(self, seat: str, life: Life, closed: int, reports: dict[int, Report]) -> int:
        """A life ends with its last push that all servers hold; where its successor begins."""
        roster, last = self.decisions.roster, life.first - 1
        if life.incarnation is not None:
            key = (seat, life.incarnation)
            commits = [report.commits.get(key, 0) for report in reports.values()]
            if not self.settings.obeys(Rule.LAST_COMMIT):
                commits = []
            last = max([last, *commits, *([closed] if closed >= life.first else [])])
        earlier = roster[seat][:-1]
        is_empty = last < life.first
        roster[seat] = earlier if is_empty else (*earlier, replace(life, last=last))
        return last + 1

    def _end_in_sequence(self, seat: str, life: Life, reports: dict[int, Report]) -> None:
        """A life ends where the furthest server stands; the others miss a torn step."""
        decisions = self.decisions
        earlier = decisions.roster[seat][:-1]
        if life.incarnation is None:
            decisions.roster[seat] = earlier
            return
        decisions.roster[seat] = (*earlier, replace(life, last=0))
        key = (seat, life.incarnation)
        stands = {shard: report.sequences.get(key, (0, None)) for shard, report in reports.items()}
        furthest = max(stands.values(), key=lambda stand: stand[0])
        is_torn = any(last != furthest[0] for last, _ in stands.values())
        if is_torn and self.settings.obeys(Rule.TORN_NAMED):
            decisions.torn[key] = {shard: last for shard, (last, _) in stands.items()}
        decisions.take_back(key, furthest[1])

    def _joining_clock(self, seat: str, reports: dict[int, Report]) -> int:
        """The lowest clock of the other live members (ssp)."""
        clocks = [
            min(report.clocks.get((other, life), begun.first) for report in reports.values())
            for other, life in live(self.decisions.roster).items()
            if (begun := open_life(self.decisions.roster, other)) and life and other != seat
        ]
        return min(clocks, default=0)

    def _plan_anew(self, closed: int, stopped: bool) -> None:
        """Round closed + 1 stays as it is; what its lost members leave is dealt after it (R5)."""
        decisions, batch = self.decisions, self.settings.batch
        seats = tuple(sorted(live(decisions.roster)))
        following = closed + 1
        if stopped:
            earlier = tuple(stretch for stretch in decisions.plan if stretch.first <= closed)
            rest = left_at(decisions.plan, following, batch)
            decisions.plan = (*earlier, Stretch(following, seats, rest, stops=True))
            return
        kept = tuple(stretch for stretch in decisions.plan if stretch.first <= following)
        included = members(decisions.roster, following)
        left_over = [
            sample
            for seat in stretch_at(kept, following).seats
            if seat not in included
            for sample in samples_of(kept, following, seat, batch)
        ]
        if not self.settings.obeys(Rule.LEFTOVERS):
            left_over = []
        stream = (*left_over, *left_at(kept, following + 1, batch))
        stops = decisions.wanted is not None
        decisions.plan = (*kept, Stretch(following + 1, seats, stream, stops))

    # -- modes ---------------------------------------------------------------------------------

    def _may_switch(self, change: _ViewChange) -> bool:
        seats = set(live(self.decisions.roster).items())
        drained = change.drained
        if not self.settings.obeys(Rule.DRAINED_BEFORE):
            drained = self._drained
        nobody_moves = not change.removed and not change.joining
        return (
            self.decisions.wanted is not None and nobody_moves and bool(seats) and seats <= drained
        )

    def _switch(self, reports: dict[int, Report]) -> None:
        """Nothing is under way: the same seats, in new lives, in the other mode (R15)."""
        decisions = self.decisions
        now = live(decisions.roster)
        [closed] = {report.closed for report in reports.values()}
        stands = {}
        for seat, incarnation in now.items():
            key = (seat, incarnation or 0)
            [stands[key]] = {r.sequences.get(key, (0, None)) for r in reports.values()}
        if decisions.mode == "sync":
            rest = left_at(decisions.plan, closed + 1, self.settings.batch)
        else:
            for key, leases in decisions.leases.items():
                if leases.is_open:
                    decisions.take_back(key, stands[key][1] if key in stands else None)
            rest = tuple(sample for chunk in decisions.pool for sample in chunk)
        assert decisions.wanted is not None
        decisions.mode, decisions.wanted, self._drained = decisions.wanted, None, set()
        first = 0
        decisions.pool = chunks(rest)
        if decisions.mode == "sync":
            first, decisions.pool = closed + 1, []
            decisions.plan = (Stretch(first, tuple(sorted(now)), rest),)
        decisions.roster = {
            seat: (Life(lives[-1].incarnation, 0, -1),)
            for seat, lives in decisions.roster.items()
            if lives and seat not in now
        }
        for seat in now:
            decisions.seat(seat, decisions.processes[seat][0], first)

    def _worker_drained(self, source: str, drained: Drained) -> None:
        decisions, key = self.decisions, (drained.seat, drained.incarnation)
        life = open_life(decisions.roster, drained.seat)
        known = decisions.processes.get(drained.seat)
        if life and life.incarnation == drained.incarnation:
            if decisions.wanted:
                self._drained.add(key)
                if set(live(decisions.roster).items()) <= self._drained:
                    self.is_due = True
        elif life and known == (drained.boot, life.incarnation):
            self._send(source, Seated(drained.call, known[1], life.first, decisions.mode))
        else:
            self._send(source, Fenced(drained.call, drained.incarnation))

    # -- workers -------------------------------------------------------------------------------

    def _register(self, source: str, register: Register) -> None:
        seat, boot = register.seat, register.boot
        known, incarnation = self.decisions.processes.get(seat, (0, 0))
        if boot < known:
            return  # STALE_BOOT: a late message of an earlier process
        if boot == known:
            life = open_life(self.decisions.roster, seat)
            if incarnation == FINISHED:
                self._send(source, Ended(register.call))
            elif life and life.incarnation == incarnation:
                mode = self.decisions.mode
                self._send(source, Seated(register.call, incarnation, life.first, mode))
            else:
                self._send(source, Fenced(register.call, incarnation))
            return
        if self.changing and self.changing.joining.get(seat, 0) >= boot:
            return
        if self._joining.get(seat, 0) < boot:
            self._joining[seat] = boot
            self._silent.discard(seat)
            self.is_due = True

    def _is_live(self, seat: str, incarnation: int) -> bool:
        life = open_life(self.decisions.roster, seat)
        return life is not None and life.incarnation == incarnation

    def _leave(self, key: Key) -> None:
        if not self._is_live(*key):
            return
        if key not in self.decisions.left:
            self.decisions.left.add(key)
            self._persist()
        if not (self.changing and key[0] in self.changing.removed):
            self._silent.add(key[0])
            self.is_due = True

    def _alive(self, source: str, alive: Alive) -> None:
        key = (alive.seat, alive.incarnation)
        if key not in self.decisions.left and not self._is_live(*key):
            self._send(source, Fenced(("alive", alive.incarnation), alive.incarnation))

    def _next(self, source: str, wanted: Next) -> None:
        """The n-th lease of a life: the same one however often it asks (async modes)."""
        decisions, key, number = self.decisions, (wanted.seat, wanted.incarnation), wanted.number
        going = bool(self.changing and wanted.seat in self.changing.removed)
        if not self._is_live(*key) or going or decisions.wanted or decisions.mode == "sync":
            return
        leases = decisions.leases.setdefault(key, Leases())
        leases.done = max(leases.done, number)
        if number == len(leases.chunks) and decisions.pool:
            leases.chunks.append(decisions.pool.pop(0))
            self._persist()
        if number < len(leases.chunks):
            self._send(source, Leased(wanted.call, leases.chunks[number]))
        elif all(x.done >= len(x.chunks) for x in decisions.leases.values() if x.is_open):
            self._persist()
            self._send(source, Ended(wanted.call))

    # -- snapshots -----------------------------------------------------------------------------

    def _take_snapshot(self) -> None:
        seats = live(self.decisions.roster)
        busy = self.changing or self.installing or self.is_due or self._taking
        if busy or self.decisions.mode == "sync" or not seats or None in seats.values():
            return
        self._taken += 1
        number = ("a", self.decisions.starts, self._taken)
        self._taking = _Taking(number, self.decisions.view)
        self._send_wanted()

    def _send_wanted(self) -> None:
        assert self._taking is not None
        for seat, incarnation in live(self.decisions.roster).items():
            wanted = SnapshotWanted(self._taking.number, self._taking.view, incarnation or 0)
            self._send(seat, wanted)

    def _snapshot_done(self, source: str, part: SnapshotDone) -> None:
        decisions, number = self.decisions, part.number
        parts = None if number in decisions.snapshots else self._parts(part)
        if parts is None:
            self._send(source, SnapshotNoted(number))
            return
        parts[part.shard] = part
        if len(parts) < self.settings.shards:
            return
        if (
            not decisions.snapshots
            or number > next(reversed(decisions.snapshots))
            or number[0] == "a"
        ):
            decisions.snapshots[number] = self._complete(parts)
            self._persist()
            self._taking = None
        for pair in decisions.pairs.values():
            self._send(pair.primary, SnapshotNoted(number))

    def _parts(self, part: SnapshotDone) -> dict[int, SnapshotDone] | None:
        """What else there is of a snapshot that is still wanted; None: it is not."""
        decisions, taking = self.decisions, self._taking
        if part.number[0] == "r":
            if part.generation != decisions.generation:
                return None
            return self._rounds_kept.setdefault(part.number, {})
        is_now = part.view == decisions.view and part.term == decisions.pairs[part.shard].term
        if taking and part.number == taking.number and is_now and not self.changing:
            return taking.parts
        return None

    def _complete(self, parts: dict[int, SnapshotDone]) -> Snapshot:
        furthest: dict[Key, Any] = {}
        for part in parts.values():
            for key, stand in part.sequences.items():
                furthest[key] = max(furthest.get(key, (0, None)), stand, key=lambda x: x[0])
        decisions = self.decisions
        closed = next(iter(parts.values())).closed
        return Snapshot(
            closed,
            furthest,
            decisions.generation,
            dict(decisions.torn),
            dict(live(decisions.roster)),
        )
