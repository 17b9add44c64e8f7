"""A worker of the model: it registers, pulls, pushes, and sends again what is not answered."""

from dataclasses import replace
from typing import Any

from tests.protocol.model.messages import (
    Alive,
    Answer,
    Applied,
    AskMap,
    Call,
    Drain,
    Drained,
    Ended,
    Fenced,
    Gap,
    Held,
    IdleNote,
    Leased,
    Leave,
    Map,
    Mark,
    MarkNote,
    Next,
    PullCall,
    PushCall,
    Register,
    Seated,
    SnapshotWanted,
    Values,
)
from tests.protocol.model.replica import COORDINATOR
from tests.protocol.model.settings import Mode, Rule, Settings
from tests.protocol.model.values import Plan, Samples, digest, left_at, samples_of, stretch_at
from tests.protocol.scheduler import Boot, Die, Instruction, Received, Send, Tick

__all__ = ["Worker"]

Request = Register | Next | PushCall | PullCall


class Worker:
    """One process in a seat. It has no disk.

    Attributes:
        calls: What is not answered, by its name: the shard (None: the coordinator) and the request.
        done: It has nothing more to train.
    """

    def __init__(self, seat: str, settings: Settings, boot: int) -> None:
        self.seat, self.settings, self.boot = seat, settings, boot
        self.out: list[Instruction] = []
        self.incarnation = 0
        self.map = {shard: (0, f"S{shard}.0") for shard in range(settings.shards)}
        self.calls: dict[Call, tuple[int | None, Request]] = {}
        self.done = False
        self._calls_made = 0
        self._weights: dict[int, int] = {}
        self._seen: dict[int, tuple[int, int]] = {}
        self._plan: Plan = ()
        self._begin("sync", 0)

    def _begin(self, mode: Mode, first: int) -> None:
        """A life begins, or goes on in another mode."""
        self.mode: Mode = mode
        self._round = first - 1 if mode == "sync" else 0
        self._clock = first
        self._sequence = 0
        self._chunk: Samples | None = None
        self._lease, self._offset = 0, 0
        self._mark: Mark | None = None
        self._resumes = True  # it has waited for data: fresh weights, and the clock of the others
        self._others: dict[int, int] = {}
        self._draining = self._drained = False

    def handle(self, event: Any) -> list[Instruction]:
        """See scheduler.Machine."""
        self.out = []
        match event:
            case Boot():
                self._send(COORDINATOR, AskMap())
                self._register()
            case Tick():
                self._again()
            case Received(_, Map(primaries)):
                self._learn(primaries)
            case Received(_, SnapshotWanted() as wanted):
                self._mark_for(wanted)
            case Received(_, Drain(incarnation)):
                if incarnation == self.incarnation and self.mode != "sync" and not self.done:
                    self._draining = True
                    self._step()
            case Received(_, answer):
                self._answered(answer)
        return self.out

    # -- calls ---------------------------------------------------------------------------------

    def _send(self, to: str, message: Any) -> None:
        self.out.append(Send(to, message))

    def _to_shard(self, shard: int, message: Any) -> None:
        """Data calls name the term that the worker believes in (R17)."""
        term, primary = self.map[shard]
        self._send(primary, replace(message, term=term))

    def _name(self) -> Call:
        self._calls_made += 1
        return (self.boot, self._calls_made)

    def _call(self, shard: int | None, request: Request) -> None:
        self.calls[request.call] = (shard, request)
        self._dispatch(shard, request)

    def _dispatch(self, shard: int | None, request: Request) -> None:
        if shard is None:
            self._send(COORDINATOR, request)
        else:
            self._to_shard(shard, request)

    def _register(self) -> None:
        self._call(None, Register(self._name(), self.seat, self.boot))

    def _waits_for(self, kind: type) -> bool:
        return any(isinstance(request, kind) for _, request in self.calls.values())

    def _again(self) -> None:
        """Say once more whatever may not have been heard."""
        self._send(COORDINATOR, AskMap())
        if self._drained:
            name = ("drained", self.incarnation)
            self._send(COORDINATOR, Drained(name, self.seat, self.incarnation, self.boot))
        elif self.incarnation:
            self._send(COORDINATOR, Alive(self.seat, self.incarnation))
        for shard, request in self.calls.values():
            self._dispatch(shard, request)
        if self._mark:
            self._send_marks()
        if self.done and not self.incarnation and not self.calls:
            self._register()
        if self._waits_for(Next):
            for shard in range(self.settings.shards):
                self._to_shard(shard, IdleNote(self.seat, self.incarnation, self._sequence))
            self._resumes = True
        if self.done and self.mode != "sync":
            self._send(COORDINATOR, Leave(self.seat, self.incarnation))

    def _learn(self, primaries: dict[int, tuple[int, str]]) -> None:
        if self.settings.obeys(Rule.CALL_TERM):
            primaries = {shard: max(said, self.map[shard]) for shard, said in primaries.items()}
        self.map = primaries

    # -- marks ---------------------------------------------------------------------------------

    def _mark_for(self, wanted: SnapshotWanted) -> None:
        is_old = self._mark is not None and wanted.number <= self._mark[0]
        if wanted.incarnation == self.incarnation and not is_old:
            self._mark = (wanted.number, wanted.view, self._sequence)
            self._send_marks()

    def _send_marks(self) -> None:
        assert self._mark is not None
        for shard in range(self.settings.shards):
            self._to_shard(shard, MarkNote(self.seat, self.incarnation, self._mark))

    # -- answers -------------------------------------------------------------------------------

    def _answered(self, answer: Answer) -> None:
        if isinstance(answer, Fenced):
            mine = answer.incarnation == self.incarnation
            if mine or (not self.incarnation and answer.call in self.calls):
                self.out.append(Die())
            return
        if isinstance(answer, Seated) and answer.call == ("drained", self.incarnation):
            if self._drained:
                self._sit(answer)
            return
        if isinstance(answer, Gap) or answer.call not in self.calls:
            return  # a gap: sent again in order with the next tick
        self.calls.pop(answer.call)
        match answer:
            case Seated():
                self._sit(answer)
            case Values():
                self._take(answer)
            case Held():
                if not self.calls or not self.settings.obeys(Rule.COMMIT_ALL):
                    self._pull(commit=True)
            case Applied():
                self._step()
            case Leased(_, chunk):
                self._chunk, self._offset = chunk, 0
                if self._resumes:
                    self._pull(commit=False)
                else:
                    self._step()
            case Ended():
                self.done = True

    def _sit(self, seated: Seated) -> None:
        self.incarnation = seated.incarnation
        self._begin(seated.mode, seated.first)
        self._pull(commit=False)

    def _take(self, values: Values) -> None:
        self._weights.update(values.blocks)
        self._seen[values.shard] = (values.generation, values.length)
        self._plan = values.plan
        if values.clocks is not None:
            others = [clock for seat, clock in values.clocks.items() if seat != self.seat]
            self._others[values.shard] = min(others, default=0)
        if not self._waits_for(PullCall):
            self._step()

    # -- steps ---------------------------------------------------------------------------------

    def _pull(self, commit: bool) -> None:
        if self._waits_for(PullCall):
            return
        number = self._round if self.mode == "sync" else self._clock + self._sequence
        for shard in range(self.settings.shards):
            self._call(shard, PullCall(self._name(), self.seat, self.incarnation, number, commit))

    def _step(self) -> None:
        """Go on if nothing has to be waited for."""
        if self._draining:  # a wait may be for others that drain too (R16)
            self.calls = {
                name: call for name, call in self.calls.items() if isinstance(call[1], PushCall)
            }
            self._drained = not self.calls
        elif not (self.done or self._waits_for(PullCall) or self._waits_for(Next)):
            if self.mode == "sync":
                self._next_round()
            else:
                self._next_push()

    def _next_round(self) -> None:
        following, batch = self._round + 1, self.settings.batch
        if stretch_at(self._plan, following).stops:
            self._drained = True
        elif not left_at(self._plan, following, batch):
            self.done = True
        else:
            self._round = following
            samples = samples_of(self._plan, following, self.seat, batch)
            self._push(following, samples)

    def _next_push(self) -> None:
        if self._chunk is None or self._offset >= len(self._chunk):
            self._ask_for_data()
            return
        flying = {r.number for _, r in self.calls.values() if isinstance(r, PushCall)}
        if len(flying) >= self.settings.window:
            return
        if self._resumes and self._others:
            self._clock = max(self._clock, min(self._others.values()) - self._sequence)
        self._resumes = False
        self._sequence += 1
        samples = self._chunk[self._offset : self._offset + self.settings.batch]
        self._offset += len(samples)
        self._push(self._sequence, samples)
        self._pull(commit=False)

    def _ask_for_data(self) -> None:
        """The next lease, once every push of the last one is acknowledged everywhere."""
        if self._waits_for(PushCall):
            return
        if self._chunk is not None:
            self._lease, self._chunk = self._lease + 1, None
        self._call(None, Next(self._name(), self.seat, self.incarnation, self._lease))

    def _push(self, number: int, samples: Samples) -> None:
        version = digest(tuple(sorted(self._weights.items())))
        gradients = {
            block: digest(version, self.seat, number, samples, block) for block in self._weights
        }
        for shard in range(self.settings.shards):
            push = PushCall(self._name(), self.seat, self.incarnation, number, gradients, samples)
            if self.mode != "sync":
                push = replace(
                    push,
                    position=(self._lease, self._offset),
                    seen=dict(self._seen),
                    mark=self._mark,
                    clock=self._clock + self._sequence,
                )
            self._call(shard, push)
