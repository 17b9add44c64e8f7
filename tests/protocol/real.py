"""The shards and the coordinator that servers run, under the random scheduler of the model.

A server here is psfleet.shard.shard.Shard and on server 0 also psfleet_server.coordinator.Coordinator:
their journals become instructions to append to a log, so that the scheduler can kill a server before
and after every record, and a new one is made by replay. A worker makes the calls of ClusterRuntime: those
to one server in order, each again until it is answered.
"""

import random
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import Later, NotReady, PsfleetError
from psfleet.kernels.dedup import owned_by
from psfleet.rules import make_rule
from psfleet.runtime import Gradient, Read
from psfleet.shard.events import Answer, Join, Leave, Mode, Pull, Push, Refuse, Serve
from psfleet.shard.shard import Shard
from psfleet.tables.spec import Initializer, TableSpec
from psfleet_server.coordinator import Arrival, Coordinator, Outcome
from tests.protocol.scheduler import (
    Append,
    Boot,
    Broken,
    Chances,
    Disk,
    Instruction,
    Machine,
    Received,
    Scheduler,
    Send,
    Tick,
)
from tests.server.seating import register

__all__ = ["COUNTS", "IDS", "ROWS", "Fleet", "Plan", "RealServer", "RealWorker", "plain_rows"]

Rows = NDArray[np.float32]

ROWS = TableSpec(
    "rows",
    "sparse",
    (2,),
    make_rule("adagrad", {}),
    initializer=Initializer("uniform", -1.0, 1.0),
    seed=3,
)
COUNTS = TableSpec(
    "counts", "sparse", (1,), make_rule("sgd", {}), initializer=Initializer("constant", 0.0)
)
IDS = np.arange(12)
_EPOCH = 1000  # rows of one worker in COUNTS


@dataclass(frozen=True)
class Register:
    """A worker process has started."""

    worker: int
    boot: int


@dataclass(frozen=True)
class CreateTable:
    """A worker wants a table."""

    spec: TableSpec
    worker: int


@dataclass(frozen=True)
class Request:
    """A call to a server."""

    number: int
    content: Any


@dataclass(frozen=True)
class Response:
    """Its answer."""

    number: int
    content: Any


@dataclass(frozen=True)
class Plan:
    """What a job does: phases of some steps of each worker, with a meeting after each.

    Attributes:
        phases: The mode of each phase, and how many steps each worker makes in it.
        staleness: Of ssp.
    """

    servers: int
    phases: tuple[tuple[Mode, tuple[int, ...]], ...]
    staleness: int = 1

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return len(self.phases[0][1])

    @classmethod
    def drawn(cls, dice: random.Random, modes: Iterable[Mode]) -> "Plan":
        """A random job in these modes, one after the other."""
        workers = dice.choice([1, 2, 3])
        phases = [(mode, tuple(dice.randint(0, 6) for _ in range(workers))) for mode in modes]
        return cls(dice.choice([1, 2, 3]), tuple(phases), dice.choice([0, 1, 2]))


def slopes(rows: Rows, worker: int, step: int) -> Rows:
    """A gradient that depends on what was pulled, by whom and when."""
    dice = np.random.default_rng((worker, step))
    return (rows * np.float32(0.5) + dice.standard_normal(rows.shape, np.float32)).astype(
        np.float32
    )


def plain_rows(plan: Plan) -> Rows:
    """The rows after the plan in sync mode: one shard, no servers, no faults."""
    shard = Shard(workers=plan.workers)
    shard.create(ROWS, np.zeros(0, np.float32))
    for worker in range(plan.workers):
        shard.handle(Join(worker, 1, "sync"), None)
    total = [0] * plan.workers
    number = 0
    for rest, (_, steps) in enumerate(plan.phases, 1):
        for worker in [worker for worker in range(plan.workers) if not steps[worker]]:
            shard.handle(Leave(worker, 1, number, rest), worker)
        for step in range(max(steps)):
            number += 1
            [rows] = shard.tables.read([Read(ROWS.key, IDS)])
            members = [worker for worker in range(plan.workers) if steps[worker] > step]
            for worker in members:
                total[worker] += 1
                gradient = Gradient(ROWS.key, slopes(rows, worker, total[worker]), IDS, 0.1)
                shard.handle(Push(worker, 1, number, (gradient,)), worker)
            for worker in members:
                shard.handle(Pull(worker, 1, (), commit=number), worker)
            for worker in members:
                if steps[worker] == step + 1:
                    shard.handle(Leave(worker, 1, number, rest), worker)
    [rows] = shard.tables.read([Read(ROWS.key, IDS)])
    return rows


# -- servers ------------------------------------------------------------------------------------


class RealServer:
    """One process: made from its log, and journaling to it."""

    def __init__(self, index: int, plan: Plan, disk: Disk) -> None:
        self.out: list[Instruction] = []
        self.shard = Shard(index, plan.servers, plan.workers)
        self.coordinator = Coordinator(plan.workers) if index == 0 else None
        for part, record in disk.log:
            if part == "shard":
                self.shard.replay(record)
            elif self.coordinator is not None:
                self.coordinator.replay(record)
        self.shard.journal = lambda record: self.out.append(Append(("shard", record)))
        if self.coordinator is not None:
            self.coordinator.journal = lambda record: self.out.append(Append(("fleet", record)))

    def handle(self, event: Any) -> list[Instruction]:
        """See scheduler.Machine."""
        self.out = []
        match event:
            case Received(source, Request(number, content)):
                self._take((source, number), content)
            case Boot() | Tick():
                pass
        self.shard.validate()
        return self.out

    def _take(self, call: tuple[str, int], content: Any) -> None:
        try:
            match content:
                case Register(worker, boot):
                    assert self.coordinator is not None
                    life = register(self.coordinator, worker, boot, self.shard.workers.count)
                    self._answer(call, life)
                case Arrival():
                    assert self.coordinator is not None
                    self._release(self.coordinator.arrive(content, call))
                case CreateTable(spec, worker):
                    self.shard.create(spec, np.zeros(0, np.float32), worker)
                    self._answer(call, None)
                case _:
                    self._event(content, call)
        except PsfleetError as error:
            self._answer(call, error)

    def _event(self, event: Any, call: tuple[str, int]) -> None:
        for instruction in self.shard.handle(event, call):
            match instruction:
                case Answer(waiting, _, number):
                    self._answer(waiting, number)
                case Serve(waiting, reads):
                    self._answer(waiting, self.shard.tables.read(reads))
                case Refuse(waiting, error):
                    self._answer(waiting, error)
        if isinstance(event, Leave) and not event.rest and self.coordinator is not None:
            self._release(self.coordinator.leave(event.worker, event.incarnation))

    def _release(self, released: Iterable[Outcome]) -> None:
        for one in released:
            self._answer(one.call, one.error if isinstance(one, Refuse) else None)

    def _answer(self, call: Any, content: Any) -> None:
        source, number = call
        self.out.append(Send(source, Response(number, content)))


# -- workers ------------------------------------------------------------------------------------


@dataclass
class _Asked:
    """A call that a worker has asked for."""

    request: Request
    answer: Any = None
    is_answered: bool = False


@dataclass
class RealWorker:
    """One worker process, as a program that yields the calls that it waits for.

    Attributes:
        queues: To each server, what is not answered; only the first has been sent.
        applied: Of each server, pushes that it has answered.
    """

    seat: int
    plan: Plan
    seed: object
    out: list[Instruction] = field(default_factory=list)
    queues: list[deque[_Asked]] = field(default_factory=list)
    applied: list[set[int]] = field(default_factory=list)
    done: bool = False

    def __post_init__(self) -> None:
        self.queues = [deque() for _ in range(self.plan.servers)]
        self.applied = [set() for _ in range(self.plan.servers)]
        self._dice = random.Random(f"{self.seed}/{self.seat}")
        self._asked = 0
        self._waited: list[_Asked] = []
        self._life = 0
        self._sequence = 0
        self._clock = 0
        self._steps = 0
        self._program = self._run()

    def handle(self, event: Any) -> list[Instruction]:
        """See scheduler.Machine."""
        self.out = []
        match event:
            case Boot():
                self._go_on()
            case Tick():
                for server, queue in enumerate(self.queues):
                    if queue:
                        self.out.append(Send(f"S{server}", queue[0].request))
            case Received(source, Response(number, content)):
                self._answered(int(source[1:]), number, content)
        return self.out

    def _answered(self, server: int, number: int, content: Any) -> None:
        queue = self.queues[server]
        if not queue or queue[0].request.number != number:
            return  # the answer to a repeat
        if isinstance(content, (Later, NotReady)):
            return  # again with the next tick
        if isinstance(content, PsfleetError):
            raise AssertionError(f"worker {self.seat} is refused: {content!r}")
        asked = queue.popleft()
        asked.answer, asked.is_answered = content, True
        if isinstance(asked.request.content, Push):
            self.applied[server].add(asked.request.content.sequence)
        if queue:
            self.out.append(Send(f"S{server}", queue[0].request))
        self._go_on()

    def _go_on(self) -> None:
        while not self.done and all(asked.is_answered for asked in self._waited):
            try:
                self._waited = next(self._program)
            except StopIteration:
                self.done = True

    def _ask(self, server: int, content: Any) -> _Asked:
        self._asked += 1
        asked = _Asked(Request(self._asked, content))
        self.queues[server].append(asked)
        if len(self.queues[server]) == 1:
            self.out.append(Send(f"S{server}", asked.request))
        return asked

    def _ask_all(self, content: Any) -> list[_Asked]:
        return [self._ask(server, content) for server in range(self.plan.servers)]

    # -- the program ---------------------------------------------------------------------------

    def _run(self) -> Generator[list[_Asked], None, None]:
        registered = self._ask(0, Register(self.seat, 100 + self.seat))
        yield [registered]
        self._life = registered.answer
        yield from self._join(self.plan.phases[0][0], 0)
        for spec in (ROWS, COUNTS):
            yield self._ask_all(CreateTable(spec, self.seat))
        for number, (mode, steps) in enumerate(self.plan.phases):
            if number:
                changes = mode != self.plan.phases[number - 1][0]
                yield from self._join(mode, self._switches + changes)
            for _ in range(steps[self.seat]):
                self._steps += 1
                yield from self._round() if mode == "sync" else self._step(mode)
            yield from self._meet(mode, 2 * number + 1)
            if mode == "sync":
                yield from self._join(mode, 0)
            yield from self._meet(mode, 2 * number + 2)
        yield self._ask_all(Leave(self.seat, self._life, self._sequence))

    _switches = 0

    def _join(self, mode: Mode, switch: int) -> Generator[list[_Asked], None, None]:
        joined = self._ask_all(
            Join(self.seat, self._life, mode, self.plan.staleness if mode == "ssp" else 0, switch)
        )
        yield joined
        assert len({asked.answer for asked in joined}) == 1, "servers stand at different rounds"
        self._sequence = joined[0].answer
        self._switches = max(switch, self._switches)

    def _meet(self, mode: Mode, number: int) -> Generator[list[_Asked], None, None]:
        """Meet all workers; in sync and ssp mode the others do not wait for this one meanwhile."""
        if mode in ("sync", "ssp"):
            yield self._ask_all(Leave(self.seat, self._life, self._sequence, rest=number))
        yield [self._ask(0, Arrival(self.seat, self._life, number))]
        self._clock = 0

    def _round(self) -> Generator[list[_Asked], None, None]:
        rows = yield from self._pull_rows()
        yield self._push(slopes(rows, self.seat, self._steps))
        yield self._ask_all(Pull(self.seat, self._life, (), commit=self._sequence))

    def _step(self, mode: Mode) -> Generator[list[_Asked], None, None]:
        """Push, and do not wait for it; pull from some servers only, so that the others lag."""
        self._push(np.zeros((len(IDS), 2), np.float32))
        some = [server for server in range(self.plan.servers) if self._dice.random() < 0.6]
        clock = self._clock if mode == "ssp" else 0
        yield [self._ask(server, Pull(self.seat, self._life, (), clock=clock)) for server in some]

    def _pull_rows(self) -> Generator[list[_Asked], None, Rows]:
        rows = np.zeros((len(IDS), 2), np.float32)
        owned = [owned_by(IDS, server, self.plan.servers) for server in range(self.plan.servers)]
        asked = [
            self._ask(server, Pull(self.seat, self._life, (Read(ROWS.key, IDS[mine]),)))
            for server, mine in enumerate(owned)
        ]
        yield asked
        for mine, one in zip(owned, asked, strict=True):
            [rows[mine]] = one.answer
        return rows

    def _push(self, gradient: Rows) -> list[_Asked]:
        """This step's row of COUNTS on every server, and each server's part of the gradient."""
        self._sequence += 1
        self._clock += 1
        asked = []
        for server in range(self.plan.servers):
            mine = owned_by(IDS, server, self.plan.servers)
            row = np.array([self.seat * _EPOCH + self._steps])
            gradients = (
                Gradient(ROWS.key, gradient[mine], IDS[mine], 0.1),
                Gradient(COUNTS.key, np.full((1, 1), -1, np.float32), row, 1.0),
            )
            push = Push(self.seat, self._life, self._sequence, gradients, clock=self._clock)
            asked.append(self._ask(server, push))
        return asked


# -- the run ------------------------------------------------------------------------------------


class Fleet(Scheduler):
    """Servers "S0", "S1", ..., workers "w0", ...; servers die, workers do not."""

    def __init__(
        self, plan: Plan, chances: Chances, seed: object, suppressed: Iterable[int] = ()
    ) -> None:
        self.plan = plan
        self.seed = seed
        self.servers = [f"S{server}" for server in range(plan.servers)]
        self.workers = [f"w{worker}" for worker in range(plan.workers)]
        super().__init__([*self.servers, *self.workers], chances, seed, suppressed)

    def make(self, name: str, disk: Disk, boot: int) -> Machine:
        """See Scheduler."""
        if name in self.servers:
            return RealServer(int(name[1:]), self.plan, disk)
        return RealWorker(int(name[1:]), self.plan, self.seed)

    def may_die(self, name: str) -> bool:
        """See Scheduler."""
        return name in self.servers

    def random_fault(self) -> None:
        """See Scheduler."""
        name = self.dice.choice(self.servers)
        if name not in self.crashed and self.fault(f"{name} dies"):
            self.counts["dead servers"] += 1
            self.crash(name)

    def sent(self, source: str, to: str, message: object) -> None:
        """See Scheduler. Nobody gets values who is too far ahead."""
        server = self.machines.get(source)
        if not isinstance(server, RealServer) or server.shard.mode != "ssp":
            return
        if server.shard.consistency.clocks.lead > self.plan.staleness:
            raise Broken(
                f"{source} let a worker be {server.shard.consistency.clocks.lead} pushes ahead"
            )

    def is_over(self) -> bool:
        """See Scheduler."""
        return all(self.machines[name].done for name in self.workers)

    def describe(self) -> str:
        """See Scheduler."""
        return repr(
            {
                name: [
                    type(queue[0].request.content).__name__ if queue else "-"
                    for queue in self.machines[name].queues
                ]
                for name in self.workers
            }
        )

    def check(self) -> None:
        """See Scheduler."""
        shards = {name: self.machines[name].shard for name in self.servers}
        if len({shard.rounds.closed for shard in shards.values()}) > 1:
            raise Broken("servers stand at different rounds")
        for name, shard in shards.items():
            self._check_counts(name, shard)
            again = RealServer(int(name[1:]), self.plan, self.disks[name]).shard
            if not np.array_equal(_rows(shard, ROWS, IDS), _rows(again, ROWS, IDS)):
                raise Broken(f"the log of {name} does not give what it holds")
        if {mode for mode, _ in self.plan.phases} == {"sync"}:
            self._check_bits(shards)

    def _check_counts(self, name: str, shard: Shard) -> None:
        """Every step of every worker is there once: mode sync takes the mean of a round's pushes."""
        for worker in range(self.plan.workers):
            steps = sum(steps[worker] for _, steps in self.plan.phases)
            ids = worker * _EPOCH + 1 + np.arange(steps)
            found = _rows(shard, COUNTS, ids).reshape(-1)
            wanted = self._wanted_counts(worker)
            if not np.allclose(found, wanted, atol=1e-6):
                raise Broken(f"{name} counts the steps of worker {worker} as {found.tolist()}")

    def _wanted_counts(self, worker: int) -> list[float]:
        wanted = []
        for mode, steps in self.plan.phases:
            for step in range(steps[worker]):
                members = sum(count > step for count in steps)
                wanted.append(1.0 / members if mode == "sync" else 1.0)
        return wanted

    def _check_bits(self, shards: Mapping[str, Shard]) -> None:
        rows = np.zeros((len(IDS), 2), np.float32)
        for server, shard in enumerate(shards.values()):
            mine = owned_by(IDS, server, self.plan.servers)
            rows[mine] = _rows(shard, ROWS, IDS[mine])
        if not np.array_equal(rows.view(np.uint32), plain_rows(self.plan).view(np.uint32)):
            raise Broken("the rows are not those of the run without faults")


def _rows(shard: Shard, spec: TableSpec, ids: NDArray[np.int64]) -> Rows:
    [rows] = shard.tables.read([Read(spec.key, ids)])
    return rows
