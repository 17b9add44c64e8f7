"""A server of the model: views, rounds, pushes in sequence, and cuts, around a replicated log."""

from dataclasses import dataclass, field, replace
from typing import Any

from tests.protocol.model.messages import (
    Applied,
    Fenced,
    Freeze,
    Gap,
    Held,
    IdleNote,
    Install,
    Installed,
    Mark,
    MarkNote,
    PullCall,
    PushCall,
    Replicate,
    Replicated,
    Report,
    SnapshotNoted,
    Values,
)
from tests.protocol.model.replica import Replica
from tests.protocol.model.settings import Mode, Rule, Settings
from tests.protocol.model.values import (
    Close,
    Cut,
    CutNumber,
    Hold,
    Key,
    Plan,
    Push,
    Record,
    Roster,
    View,
    live,
    members,
    open_life,
)
from tests.protocol.scheduler import Boot, Disk, Instruction, Received, Store, Tick

__all__ = ["Server"]


@dataclass
class _Alignment:
    """A snapshot for which marks are collected, and the pushes that wait behind them."""

    number: CutNumber
    view: View
    marks: dict[Key, int] = field(default_factory=dict)
    parked: dict[tuple[str, int, int], tuple[str, PushCall]] = field(default_factory=dict)


class Server(Replica):
    """One process.

    Attributes:
        promised: The highest view that it has frozen for; `view`: the one that is installed.
        fenced: Lives that are being removed.
        commits: Highest round that each life has committed.
        parked: Pulls that wait.
        tail: Last push of each life in the log, applied or not.
        idle: After which push a life waits for data.
        lost: It has lost what it held.
    """

    def __init__(
        self, name: str, shard: int, blocks: list[int], settings: Settings, disk: Disk, boot: int
    ) -> None:
        super().__init__(name, shard, blocks, settings, disk, boot)
        self.promised: View = (0, 0)
        self.view: View = (0, 0)
        self.roster: Roster = {}
        self.plan: Plan = ()
        self.mode: Mode = settings.mode
        self.fenced: set[Key] = set()
        self.commits: dict[Key, int] = {}
        self.parked: dict[Key, tuple[str, PullCall]] = {}
        self.tail: dict[Key, int] = {}
        self.idle: dict[Key, int] = {}
        self.lost = settings.durability == "snapshot" and boot > 1
        self._closing = False
        self._frozen_by: tuple[str, View, int] | None = None  # and records to apply before
        self._last_cut: CutNumber = ("a", 0, 0)
        self._alignment: _Alignment | None = None
        self._cutting = False

    def handle(self, event: Any) -> list[Instruction]:
        """See scheduler.Machine."""
        self.out = []
        match event:
            case Boot() | Tick():
                self.beat()
            case Received(source, message):
                self._receive(source, message)
        return self.out

    def _receive(self, source: str, message: Any) -> None:
        match message:
            case PushCall():
                self._push(source, message)
            case PullCall():
                self._pull(source, message)
            case MarkNote():
                self._mark_note(message)
            case IdleNote():
                self._idle_note(message)
            case Replicate():
                self.replicate(source, message)
            case Replicated():
                self.replicated(message)
            case Freeze():
                self._freeze(source, message)
            case Install():
                self._install(source, message)
            case SnapshotNoted():
                self.noted(message)

    # -- what records do -----------------------------------------------------------------------

    def applied(self, record: Record) -> None:
        """See Replica."""
        match record:
            case Cut(number, view):
                self._last_cut = max(number, self._last_cut)
                self._cutting = False
                self.keep(number, view)
                self._release()
            case Close(number):
                self._closing = False
                if number % self.settings.snapshot_every == 0:
                    self.keep(("r", self.generation, number), None)

    def advanced(self) -> None:
        """See Replica."""
        if self._frozen_by and self.done >= self._frozen_by[2]:
            self._report()
        self._close_if_complete()
        self._wake()
        self._cut_if_aligned()

    def follow(self) -> None:
        """See Replica."""
        self._frozen_by, self.parked = None, {}

    # -- views ---------------------------------------------------------------------------------

    def _freeze(self, source: str, freeze: Freeze) -> None:
        if freeze.boot != self.boot and self.obeys(Rule.BOOT_FENCE):
            return
        again = freeze.view == self.promised and self._frozen_by is None
        if (freeze.view <= self.promised and not again) or freeze.term < self.term:
            return
        if freeze.view > self.promised:
            self.promised = freeze.view
            if self.role != "primary" or freeze.term > self.term:
                self._become_primary(freeze)
            dropped = self.standby and self.attached <= freeze.floor
            if dropped and self.obeys(Rule.FLOOR):
                self.standby, self.synced = None, False
            if self._alignment and self.obeys(Rule.VIEW_ABORTS):
                self._cutting = False
                self._release()
            self.fenced |= set(freeze.removed)
        self._frozen_by = (source, freeze.view, len(self.log))
        self.advance()

    def _become_primary(self, freeze: Freeze) -> None:
        """After a start or a takeover: all records count, and the term is kept before any answer."""
        self.role, self.term, self.thawed = "primary", freeze.term, False
        self.out.append(Store({"term": self.term}))
        self.rebuild()
        self.commits, self.waiters, self.parked = {}, {}, {}
        self._alignment, self._closing, self._cutting = None, False, False
        self.standby, self.attached, self.synced, self.acknowledged = None, 0, False, 0
        if freeze.standby:
            self.standby, self.attached = freeze.standby
            self.synced = True
        self.tail = {key: last for key, (last, _) in self.core.sequences.items()}
        for record in self.log:
            if isinstance(record, Push):
                self.tail[record.seat, record.incarnation] = record.sequence

    def _report(self) -> None:
        assert self._frozen_by is not None
        source, view, _ = self._frozen_by
        self._frozen_by = None
        self.send(
            source,
            Report(
                view,
                self.shard,
                self.term,
                self.generation,
                self.lost,
                self.core.closed,
                dict(self.commits),
                dict(self.core.sequences),
                dict(self.core.clocks),
                (self.standby, self.attached) if self.synced and self.standby else None,
            ),
        )

    def _install(self, source: str, install: Install) -> None:
        if install.boot != self.boot and self.obeys(Rule.BOOT_FENCE):
            return
        is_mine = install.term == self.term and install.view == self.promised
        if not is_mine or self.role != "primary":
            return
        if install.view > self.view:
            self._enter(install)
        self.send(source, Installed(install.view, self.shard))
        self.advance()

    def _enter(self, install: Install) -> None:
        if install.generation > self.generation:
            self._roll_back(install)
        self.lost, self.view, self.fenced, self.thawed = False, install.view, set(), True
        self.roster, self.plan, self.mode = dict(install.roster), install.plan, install.mode
        now = live(self.roster)
        self.commits = {key: n for key, n in self.commits.items() if now.get(key[0]) == key[1]}
        if install.attach and not self.synced and install.attach[1] > self.attached:
            self.standby, self.attached = install.attach
            self.acknowledged = 0
        waiting, self.parked = self.parked, {}  # all of them first: one may wake another (H2)
        for caller, pull in waiting.values():
            self._pull(caller, replace(pull, term=self.term))

    def _roll_back(self, install: Install) -> None:
        self.generation = install.generation
        self.base = self.files[install.base].copy() if install.base else None
        self.log = []
        self.rebuild()
        self.tail = {key: last for key, (last, _) in self.core.sequences.items()}
        self.waiters, self.parked, self._closing = {}, {}, False
        self.reported, self.acknowledged = {}, 0
        self.out.append(Store({"log": [], "base": self.base, "generation": self.generation}))

    # -- who may call --------------------------------------------------------------------------

    def _serves(self, call: PushCall | PullCall | MarkNote | IdleNote) -> bool:
        """Else the caller asks for the map again and sends it once more."""
        if not self.obeys(Rule.CALL_TERM):
            return self.role == "primary" and self.thawed
        if self.role == "primary" and call.term > self.term:  # deposed
            self.role, self.thawed, self._frozen_by = None, False, None
        return self.role == "primary" and self.thawed and call.term == self.term

    def _standing(self, seat: str, incarnation: int) -> str:
        """Whether a life is "live", "over" or "unknown" yet."""
        if not self.obeys(Rule.LIFE_FENCE):
            return "live"
        lives = self.roster.get(seat, ())
        is_open = bool(lives) and lives[-1].last is None and lives[-1].incarnation == incarnation
        if is_open and (seat, incarnation) not in self.fenced:
            return "live"
        newest = max((life.incarnation or 0 for life in lives), default=0)
        if (seat, incarnation) in self.fenced:
            return "unknown" if is_open and incarnation >= newest else "over"
        return "unknown" if incarnation > newest else "over"

    def _admits(self, source: str, call: PushCall | PullCall) -> bool:
        if not self._serves(call):
            return False
        standing = self._standing(call.seat, call.incarnation)
        if standing == "over":
            self.send(source, Fenced(call.call, call.incarnation))
        return standing == "live"

    # -- pushes --------------------------------------------------------------------------------

    def _push(self, source: str, push: PushCall) -> None:
        if not self._admits(source, push):
            return
        if self.mode == "sync":
            self._hold(source, push)
        else:
            self._take(source, push)

    def _hold(self, source: str, push: PushCall) -> None:
        number, key = push.number, (push.seat, push.incarnation)
        answer = Held(push.call, self.shard)
        if number <= self.core.closed or (number, *key) in self.core.held:
            self.send(source, answer)
            return
        if number > self.core.closed + 1:
            self.send(source, Gap(push.call))
            return
        waiting = self.waiters.setdefault(("hold", number, *key), [])
        waiting.append((source, answer))
        if not self.obeys(Rule.LOG_FIRST):
            self.send(source, answer)
        if len(waiting) == 1:
            self.propose(Hold(number, *key, push.gradients, push.samples))

    def _take(self, source: str, push: PushCall) -> None:
        key, number = (push.seat, push.incarnation), push.number
        if self._standing(*key) != "live" or not self._is_before_cut(source, push):
            return
        answer = Applied(push.call, self.shard)
        last, waiting = self.tail.get(key, 0), ("push", *key, number)
        once = self.obeys(Rule.ONCE)
        if once and number <= self.core.sequences.get(key, (0, None))[0]:
            self.send(source, answer)
        elif waiting in self.waiters:
            self.waiters[waiting].append((source, answer))
        elif once and number > last + 1:
            self.send(source, Gap(push.call))
        elif once and number <= last:  # in the log of an earlier process, not yet safe
            self.waiters[waiting] = [(source, answer)]
        else:
            self.waiters[waiting] = [(source, answer)]
            self.tail[key] = number
            self.propose(
                Push(
                    *key,
                    number,
                    push.gradients,
                    push.samples,
                    push.position,
                    push.seen or {},
                    push.clock,
                )
            )

    # -- pulls and rounds ----------------------------------------------------------------------

    def _pull(self, source: str, pull: PullCall) -> None:
        if not self._admits(source, pull):
            return
        key = (pull.seat, pull.incarnation)
        if self.mode == "sync" and pull.commit:
            self.commits[key] = max(pull.number, self.commits.get(key, 0))
            if pull.number > self.core.closed + 1:
                self.send(source, Gap(pull.call))
                return
        self.parked[key] = (source, pull)
        self._close_if_complete()
        self._wake()

    def _wake(self) -> None:
        if not self.thawed:
            return
        for key, (source, pull) in list(self.parked.items()):
            if self._is_ready(pull) and key in self.parked:
                del self.parked[key]
                self.send(source, self._values(pull))

    def _is_ready(self, pull: PullCall) -> bool:
        if self.mode == "sync":
            return self.core.closed >= pull.number
        if self.mode == "ssp" and self.obeys(Rule.BOUND):
            least = pull.number - self.settings.staleness
            return all(clock >= least for clock in self._clocks().values())
        return True

    def _values(self, pull: PullCall) -> Values:
        core = self.core
        return Values(
            pull.call,
            self.shard,
            core.closed,
            dict(core.blocks),
            self.plan,
            len(core.history),
            self.generation,
            self._clocks() if self.mode == "ssp" else None,
        )

    def _clocks(self) -> dict[str, int]:
        """Of live members that do not wait for data (R14)."""
        found = {}
        for seat, incarnation in live(self.roster).items():
            if incarnation is None:
                continue
            key = (seat, incarnation)
            life = open_life(self.roster, seat)
            assert life is not None
            pushed = self.core.sequences.get(key, (0, None))[0]
            if not self.obeys(Rule.IDLE) or self.idle.get(key, -1) < pushed:
                found[seat] = self.core.clocks.get(key, life.first)
        return found

    def _idle_note(self, note: IdleNote) -> None:
        if self._serves(note):
            key = (note.seat, note.incarnation)
            self.idle[key] = max(note.last, self.idle.get(key, -1))
            self._wake()

    def _close_if_complete(self) -> None:
        if self.role != "primary" or not self.thawed or self.mode != "sync" or self._closing:
            return
        if self.promised != self.view and self.obeys(Rule.FROZEN):
            return
        number = self.core.closed + 1
        included = members(self.roster, number)
        if not included and not self._goes_on_after(number):
            return
        for seat, life in included.items():
            if life.incarnation is None or not self._counts(number, (seat, life.incarnation)):
                return
        self._closing = True
        keys = sorted((seat, life.incarnation or 0) for seat, life in included.items())
        self.propose(Close(number, tuple(keys)))

    def _goes_on_after(self, number: int) -> bool:
        """Whether a round that everybody has left is followed by one with members (R8)."""
        return any(
            life.last is None and life.first > number
            for lives in self.roster.values()
            for life in lives
        )

    def _counts(self, number: int, key: Key) -> bool:
        """Whether a member's push of the open round can be counted now."""
        is_held = (number, *key) in self.core.held
        if not self.obeys(Rule.COMMIT_FIRST):
            return is_held
        last = next(life.last for life in self.roster[key[0]] if life.incarnation == key[1])
        if last is None and self.commits.get(key, 0) < number:
            return False
        assert is_held, f"{self.name} round {number}: {key} is decided or committed but not held"
        return True

    # -- cuts ----------------------------------------------------------------------------------

    def _is_before_cut(self, source: str, push: PushCall) -> bool:
        """False: the push waits behind a mark, or must come again."""
        if push.mark is None or not self.obeys(Rule.ALIGN):
            return True
        number, view, last = push.mark
        if view > self.view:
            return False
        if view == self.view == self.promised and self._is_new(number):
            key = (push.seat, push.incarnation)
            self._mark(key, push.mark)
            alignment = self._alignment
            if alignment and alignment.number == number and push.number > last:
                alignment.parked[*key, push.number] = (source, push)
                return False
        return True

    def _is_new(self, number: CutNumber) -> bool:
        return number > self._last_cut or not self.obeys(Rule.MARKS_GROW)

    def _mark(self, key: Key, mark: Mark) -> None:
        number, view, last = mark
        if self._alignment is None or self._alignment.number < number:
            given_up, self._alignment = self._alignment, _Alignment(number, view)
            if given_up:
                for source, push in given_up.parked.values():
                    self._take(source, push)
        if self._alignment and self._alignment.number == number:
            self._alignment.marks[key] = last

    def _mark_note(self, note: MarkNote) -> None:
        number, view, _ = note.mark
        if not self._serves(note) or not view == self.view == self.promised:
            return
        key = (note.seat, note.incarnation)
        if self._is_new(number) and self._standing(*key) == "live":
            self._mark(key, note.mark)
            self._cut_if_aligned()

    def _cut_if_aligned(self) -> None:
        alignment = self._alignment
        if not alignment or self._cutting or self.view != self.promised or not self.thawed:
            return
        for seat, incarnation in live(self.roster).items():
            key = (seat, incarnation or 0)
            if key not in alignment.marks or self.tail.get(key, 0) < alignment.marks[key]:
                return
        self._cutting = True
        self.propose(Cut(alignment.number, alignment.view))

    def _release(self) -> None:
        """The pushes behind the marks go on."""
        alignment, self._alignment = self._alignment, None
        for source, push in alignment.parked.values() if alignment else ():
            self._take(source, push)
