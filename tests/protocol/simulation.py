"""The real Shard and Coordinator under a seeded scheduler, without I/O.

Each step delivers, drops, doubles or leaves a message, lets somebody send again, or does harm: a
server, the coordinator or a worker dies between two messages or between two records of one, or a worker
is taken for dead although it may live. Then harm stops and everything must end. What holds then is
checked by tests/protocol/test_machines.py. Workers are small models of psfleet_worker; everything that
they must agree with, servers and coordinator, is what runs in production.
"""

import random
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, cast

from psfleet.dealing import Range, length, part
from psfleet.errors import Fenced, ProtocolError, PsfleetError
from psfleet.shard.events import Answer, Join, Leave, Mode, Pull, Push, Record, Refuse, Serve, Tell
from psfleet.shard.shard import Shard
from psfleet.shard.views import Freeze, Install
from psfleet_server.coordinator import Arrival, Beat, Coordinator, Outcome, Release, Seating
from psfleet_server.decisions import decode_decision, encode_decision
from psfleet_server.supply import Order

__all__ = ["Config", "Simulation", "Stuck"]

Call = tuple[str, Any]
"""To whom, and what."""
Script = Generator[list[Call], list[Any], None]


class Crash(Exception):
    """The process dies here."""


class Stuck(AssertionError):
    """Nothing happens any more, and not all is done."""


@dataclass(frozen=True)
class Config:
    """What one run is about; chances are per step."""

    mode: Mode = "sync"
    removal: bool = False
    servers: int = 2
    workers: int = 2
    size: int = 24
    batch: int = 2
    epochs: int = 1
    steps: int = 600
    drop: float = 0.1
    double: float = 0.15
    harm: float = 0.02
    torn: float = 0.003

    @classmethod
    def of(cls, mode: Mode, removal: bool, seed: int) -> "Config":
        """A configuration that the seed chooses."""
        dice = random.Random(f"{mode}/{removal}/{seed}")
        return cls(
            mode,
            removal,
            servers=dice.choice([1, 2, 3]),
            workers=dice.choice([1, 2, 3]),
            size=dice.choice([12, 24, 47]),
            epochs=dice.choice([1, 2]),
            steps=dice.choice([300, 800, 1500]),
            drop=dice.choice([0, 0.05, 0.2]),
            double=dice.choice([0, 0.1, 0.3]),
            harm=dice.choice([0.004, 0.015, 0.05]),
            torn=dice.choice([0, 0.001, 0.006]),
        )


@dataclass
class Disk:
    """What survives a process."""

    records: list[Any] = field(default_factory=list)
    boot: int = 0


class Worker:
    """One process of a worker: its script, and the calls that are not answered."""

    def __init__(self, seat: int, boot: int, config: Config, data: dict[Any, Any]) -> None:
        self.seat, self.boot, self.config, self.data = seat, boot, config, data
        self.done = False
        self.life = 0
        self.view = self.met = self.meetings = self.sequence = 0
        self.numbers = iter(range(1, 1 << 40))
        self.calls: dict[int, Call] = {}
        self.answers: dict[int, Any] = {}
        self.script = self.run()
        self.begin(next(self.script))

    def begin(self, calls: list[Call]) -> None:
        self.calls = {next(self.numbers): call for call in calls}
        self.answers = {}

    def take(self, number: int, answer: Any) -> None:
        """An answer; goes on when all are there."""
        if number not in self.calls or number in self.answers:
            return
        self.answers[number] = answer
        if len(self.answers) == len(self.calls):
            try:
                self.begin(self.script.send([self.answers[n] for n in self.calls]))
            except StopIteration:
                self.done, self.calls = True, {}

    def to_servers(self, event: Any) -> list[Call]:
        return [(f"S{server}", event) for server in range(self.config.servers)]

    def run(self) -> Script:
        config = self.config
        [seating] = yield [("C", ("register", self.seat, self.boot, config.workers))]
        self.life, self.view, self.met = seating.incarnation, seating.view, seating.met
        joined = yield self.to_servers(Join(self.seat, self.life, config.mode))
        self.first = seating.first
        self.sequence = seating.first - 1 if config.mode == "sync" else joined[0].number
        self.open = self.sequence if config.mode == "sync" else 0
        yield from self.meet()
        order = (config.size, config.batch, config.epochs)
        yield from self.rounds(order) if config.mode == "sync" else self.leases(order)
        yield from self.meet()
        yield [
            *self.to_servers(Leave(self.seat, self.life, self.sequence)),
            ("C", ("leave", self.seat, self.life)),
        ]

    def meet(self) -> Script:
        yield from self.flush()
        self.meetings += 1
        arrive = [("C", ("arrive", Arrival(self.seat, self.life, self.meetings)))]
        if self.meetings <= self.met or self.config.mode != "sync":
            yield arrive
            return
        yield self.to_servers(Leave(self.seat, self.life, self.sequence, self.meetings))
        yield arrive
        joined = yield self.to_servers(Join(self.seat, self.life, self.config.mode))
        assert len({answer.number for answer in joined}) == 1, joined
        self.sequence = joined[0].number

    def flush(self) -> Script:
        if self.open:
            answers = yield self.to_servers(Pull(self.seat, self.life, (), self.open))
            assert {closed for closed, _ in answers} == {self.open}, answers  # the very version
            self.view = max(self.view, *(view for _, view in answers))
            self.open = 0

    def push(self, positions: tuple[Range, ...], place: tuple[int, int] | None = None) -> Script:
        yield from self.flush()
        self.sequence += 1
        self.data[self.seat, self.life, self.sequence] = positions
        event = Push(self.seat, self.life, self.sequence, (), length(positions), position=place)
        yield self.to_servers(event)
        self.open = self.sequence if self.config.mode == "sync" else 0

    def rounds(self, order: tuple[int, int, int]) -> Script:
        plan, known = yield from self.plan(order)
        assert self.first > plan.entries[0].first or self.sequence + 1 == plan.entries[0].first
        while True:
            number = self.sequence + 1
            if self.view > known:
                plan, known = yield from self.plan(order)
            if number > plan.last():
                yield from self.flush()
                if self.view > known:
                    continue
                return
            yield from self.push(plan.share(self.seat, number))

    def plan(self, order: tuple[int, int, int]) -> Generator[list[Call], list[Any], Any]:
        wish = Order(1, *order, round=self.sequence + 1)
        [found] = yield [("C", ("deal", self.seat, self.life, wish))]
        return found

    def leases(self, order: tuple[int, int, int]) -> Script:
        taken = used = 0
        while True:
            wish = Order(1, *order, lease=taken, used=used)
            [(lease, _)] = yield [("C", ("deal", self.seat, self.life, wish))]
            if lease == ():
                return
            if lease is None:
                used = taken  # every push is answered before the next call
                continue
            for low in range(0, length(lease), self.config.batch):
                high = min(low + self.config.batch, length(lease))
                yield from self.push(part(lease, low, high), (taken, high))
            taken += 1


class Simulation:
    """One run.

    Attributes:
        data: By worker, life and sequence the positions that a push brings.
        suppressed: Numbers of harms that are left out; for finding out which ones matter.
    """

    def __init__(self, config: Config, seed: int, suppressed: frozenset[int] = frozenset()) -> None:
        self.config, self.dice, self.suppressed = config, random.Random(seed), suppressed
        self.harms: list[str] = []
        self.harming = True
        self.now = 0.0
        self.data: dict[tuple[int, int, int], tuple[Range, ...]] = {}
        self.net: list[tuple[str, str, int, Any]] = []
        self.disks = {name: Disk() for name in self.names()}
        self.shards: dict[str, Shard] = {}
        self.coordinator: Coordinator | None = None
        self.sent: dict[str, int] = {}  # of the coordinator to servers, for answers
        self.workers: dict[int, Worker] = {}
        self.boots = dict.fromkeys(range(config.workers), 0)
        self.gone: set[int] = set()
        for name in self.names():
            self.start(name)
        for seat in range(config.workers):
            self.start_worker(seat)

    def names(self) -> list[str]:
        return ["C", *(f"S{server}" for server in range(self.config.servers))]

    # -- processes -----------------------------------------------------------------------------

    def start(self, name: str) -> None:
        disk = self.disks[name]
        disk.boot += 1
        if name == "C":
            made = Coordinator(self.config.workers, self.config.servers, dead_after=1.0)
            for body in disk.records:
                made.replay(decode_decision(memoryview(body)))
            made.journal = lambda decision: self.keep("C", b"".join(encode_decision(decision)))
            try:
                made.start()
            except Crash:
                return
            self.coordinator = made
            return
        index = int(name[1:])
        shard = Shard(index, self.config.servers, self.config.workers)
        for record in disk.records:
            shard.replay(record)
        shard.workers.frozen = True
        shard.journal = lambda record: self.keep(name, record)
        self.shards[name] = shard

    def start_worker(self, seat: int) -> None:
        self.boots[seat] += 1
        self.workers[seat] = Worker(seat, 1000 * seat + self.boots[seat], self.config, self.data)

    def keep(self, name: str, record: Record | bytes) -> None:
        """The journal of a process, which may die before or after it writes."""
        torn = self.harming and self.dice.random() < self.config.torn and self.harm(f"torn {name}")
        if torn and self.dice.random() < 0.5:
            raise Crash
        self.disks[name].records.append(record)
        if torn:
            raise Crash

    def crash(self, name: str) -> None:
        if name == "C":
            self.coordinator = None
        else:
            self.shards.pop(name, None)

    def harm(self, what: str) -> bool:
        self.harms.append(what)
        return len(self.harms) - 1 not in self.suppressed

    # -- messages ------------------------------------------------------------------------------

    def send_again(self, who: str) -> None:
        """Whatever of it is not answered is sent once more."""
        if who == "C":
            if self.coordinator is not None:
                for due in self.coordinator.due():
                    self.net.append(("C", f"S{due.server}", due.boot, due.message))
            return
        if who[0] == "S":
            if who in self.shards:
                beat = Beat(int(who[1:]), True, boot=self.disks[who].boot)
                self.net.append((who, "C", 0, ("beat", beat)))
            return
        worker = self.workers.get(int(who[1:]))
        for number, (to, what) in list(worker.calls.items()) if worker else []:
            if worker and number not in worker.answers:
                self.net.append((f"{who}.{worker.boot}", to, number, what))

    def deliver(self, message: tuple[str, str, int, Any]) -> None:
        source, to, number, what = message
        try:
            if to[0] == "W":
                self.to_worker(to, number, what)
            elif to == "C" and self.coordinator is not None:
                self.to_coordinator(self.coordinator, source, number, what)
            elif to in self.shards:
                self.to_shard(to, source, number, what)
        except Crash:
            self.crash(to)

    def to_worker(self, to: str, number: int, what: Any) -> None:
        seat, _, boot = to[1:].partition(".")
        worker = self.workers.get(int(seat))
        if worker is None or worker.boot != int(boot):
            return
        if isinstance(what, Fenced) and number in worker.calls:
            self.start_worker(int(seat))
        elif isinstance(what, ProtocolError):
            pass  # it sends again
        elif isinstance(what, PsfleetError):
            raise what
        else:
            worker.take(number, what)

    def to_coordinator(self, c: Coordinator, source: str, number: int, what: Any) -> None:
        call = (source, number)
        outcomes: list[Outcome] = []
        match what:
            case ("register", seat, boot, workers):
                outcomes = c.register(seat, boot, workers, call)
            case ("arrive", arrival):
                outcomes = c.arrive(arrival, call)
            case ("leave", seat, life):
                outcomes = c.leave(seat, life)
                self.net.append(("C", source, number, True))
            case ("deal", seat, life, order):
                self.net.append(("C", source, number, self.deal(c, seat, life, order)))
            case ("beat", beat):
                c.beat(beat, self.now)
            case ("frozen", server, boot, view, report):
                outcomes = c.reported(server, boot, view, report)
            case ("installed", server, boot, view):
                outcomes = c.installed(server, boot, view)
            case ("other", server, boot):
                c.rebooted(server, boot)
        for outcome in outcomes:
            to, of = cast("tuple[str, int]", outcome.call)
            match outcome:
                case Seating() | Release():
                    self.net.append(("C", to, of, outcome))
                case Refuse(_, error):
                    self.net.append(("C", to, of, error))

    def deal(self, c: Coordinator, seat: int, life: int, order: Order) -> Any:
        try:
            return c.deal(seat, life, order), c.view
        except PsfleetError as error:
            return error

    def to_shard(self, name: str, source: str, number: int, what: Any) -> None:
        shard, boot, index = self.shards[name], self.disks[name].boot, int(name[1:])
        if isinstance(what, Freeze | Install) and number != boot:
            self.net.append((name, "C", 0, ("other", index, boot)))
            return
        for instruction in shard.handle(what, (source, number)):
            to, of = cast("tuple[str, int]", instruction.call)
            match instruction:
                case Tell(_, report):
                    self.net.append((name, "C", 0, ("frozen", index, boot, what.view, report)))
                case Answer() if isinstance(what, Install) and to == "C":
                    self.net.append((name, "C", 0, ("installed", index, boot, what.view)))
                case Answer():
                    self.net.append((name, to, of, instruction))
                case Serve():
                    self.net.append((name, to, of, (shard.rounds.closed, shard.workers.view)))
                case Refuse(_, error) if to != "C":
                    self.net.append((name, to, of, error))
        shard.validate()

    # -- the run -------------------------------------------------------------------------------

    def everybody(self) -> list[str]:
        return [*self.names(), *(f"W{seat}" for seat in self.boots)]

    def run(self) -> None:
        """Harm for a while, then peace until all is done."""
        for _ in range(self.config.steps):
            self.step()
        self.harming = False
        for name in self.names():
            if (self.coordinator is None) if name == "C" else (name not in self.shards):
                self.start(name)
        for seat in self.boots:
            if seat not in self.workers:
                if self.config.removal and len(self.workers) > 0 and self.dice.random() < 0.5:
                    self.gone.add(seat)
                else:
                    self.start_worker(seat)
        for turn in range(800):
            waiting, self.net = self.net, []
            self.dice.shuffle(waiting)
            for message in waiting:
                self.deliver(message)
            if turn % 3 == 0:
                for who in self.everybody():
                    self.send_again(who)
                for seat in self.gone:
                    self.expire(seat, 200.0)  # even who has never come
            if all(worker.done for worker in self.workers.values()) and self.is_settled():
                return
        raise Stuck(self.describe())

    def is_settled(self) -> bool:
        c = self.coordinator
        return (
            c is not None
            and not c.is_busy
            and len({s.workers.view for s in self.shards.values()}) == 1
        )

    def step(self) -> None:
        config, chance = self.config, self.dice.random()
        if chance < config.harm:
            self.do_harm()
        elif self.net and chance < 0.9:
            message = self.net[self.dice.randrange(len(self.net))]
            if self.dice.random() >= config.double:
                self.net.remove(message)
            if self.dice.random() >= config.drop:
                self.deliver(message)
        else:
            self.send_again(self.dice.choice(self.everybody()))
        while len(self.net) > 120:
            self.net.pop(self.dice.randrange(len(self.net)))

    def do_harm(self) -> None:
        dice = self.dice
        kind = dice.choice(
            ["server", "coordinator", "worker", "worker", "expire", *["restart"] * 4]
        )
        seat, name = dice.choice([*self.boots]), dice.choice(self.names()[1:])
        if kind == "server" and name in self.shards and self.harm(f"crash {name}"):
            self.crash(name)
        elif kind == "coordinator" and self.harm("crash C"):
            self.crash("C")
        elif kind == "worker" and seat in self.workers and self.harm(f"crash W{seat}"):
            del self.workers[seat]
        elif kind == "expire" and self.config.removal and self.harm(f"expire W{seat}"):
            self.expire(seat)
        elif kind == "restart":
            down = [n for n in self.names()[1:] if n not in self.shards]
            down += ["C"] if self.coordinator is None else []
            idle = [seat for seat in self.boots if seat not in self.workers]
            if down:
                self.start(dice.choice(down))
            elif idle:
                self.start_worker(dice.choice(idle))

    def expire(self, seat: int, after: float = 2.0) -> None:
        """The worker's time is over, the others' is not."""
        c = self.coordinator
        if c is None:
            return
        c.look(self.now)
        self.now += after
        for other in c.members.present():
            life = c.members.seats[other].incarnation
            if other != seat and life:
                c.beat(Beat(other, incarnation=life), self.now)
        c.look(self.now)

    def describe(self) -> str:
        c = self.coordinator
        return repr(
            {
                "seats": c and c.members.seats,
                "busy": c and c.due(),
                "workers": {
                    seat: (
                        w.done,
                        w.life,
                        w.sequence,
                        [w.calls[n] for n in w.calls if n not in w.answers],
                    )
                    for seat, w in self.workers.items()
                },
                "shards": {
                    name: (
                        s.workers.view,
                        s.workers.frozen,
                        s.rounds.closed,
                        s.rounds.awaited(),
                        s.rounds.first,
                    )
                    for name, s in self.shards.items()
                },
            }
        )
