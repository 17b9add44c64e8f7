"""A worker process, as a program that yields the calls that it waits for.

Small models of psfleet_worker: they make the calls of its ClusterRuntime, those to one server in order,
each again until it is answered. All that they must agree with is what runs in production.
"""

import random
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np

from psfleet.data.assignment import length, part
from psfleet.errors import Fenced, Later, ProtocolError, PsfleetError
from psfleet.kernels.dedup import owned_by
from psfleet.runtime.interface import Gradient, Read
from psfleet.settings.mode import Mode
from psfleet.shard.events import Join, Leave, MarkCut, Pull, Push
from psfleet.shard.membership_view import Position
from psfleet_server.coordinator.coordinator import Arrival
from psfleet_server.coordinator.data_dispatch import Order
from tests.protocol.fleet.calls import (
    Announced,
    CreateTable,
    Deal,
    Delivered,
    Depart,
    Learned,
    Mark,
    Register,
    Request,
    Response,
)
from tests.protocol.fleet.job import (
    COUNTS,
    IDS,
    ROWS,
    Ids,
    Job,
    Phase,
    Rows,
    own_sample,
    places,
    slopes,
)
from tests.protocol.scheduler import Boot, Die, Instruction, Received, Send, Tick

__all__ = ["Pushes", "Worker"]

Pushes = dict[tuple[int, int, int], Ids]
"""By worker, life and sequence the samples that a push brings."""


@dataclass
class _Asked:
    """A call that a worker has asked for."""

    request: Request
    answer: Any = None
    is_answered: bool = False


Waits = Generator[list[_Asked], None, None]


class Worker:
    """One process.

    Attributes:
        queues: To each server, what is not answered; only the first has been sent.
        done: It has ended in order.
    """

    def __init__(self, seat: int, job: Job, boot: int, pushes: Pushes) -> None:
        self.seat, self.job, self.pushes = seat, job, pushes
        self.boot = 1000 * seat + boot
        self.out: list[Instruction] = []
        self.servers = [f"S{server}" for server in range(job.servers)]
        self.queues: dict[str, deque[_Asked]] = {
            name: deque() for name in [*self.servers, job.home]
        }
        self.done = False
        self.life = self.view = self.met = self.meetings = 0
        self.sequence = self.open = self.clock = self.steps = self.switches = 0
        self.mark: tuple[int, int] | None = None
        self.heard = 0  # the last snapshot
        self._dice = random.Random(self.boot)
        self._asked = self.boot << 20  # no answer to a process before this one is taken for its own
        self._waited: list[_Asked] = []
        self._program = self._run()

    def handle(self, event: Any) -> list[Instruction]:
        """See scheduler.Machine."""
        self.out = []
        match event:
            case Boot():
                self._go_on()
            case Tick():
                for name, queue in self.queues.items():
                    if queue:
                        self.out.append(Send(name, queue[0].request))
            case Received(_, Response(number, content)):
                self._answered(number, content)
            case Received(source, Announced(number)):
                self.out.append(Send(source, Learned(number, self.seat, self.life)))
            case Received(source, Mark() as mark) if mark.life == self.life:
                self._released(source, mark)
        return self.out

    def _answered(self, number: int, content: Any) -> None:
        queue = next((q for q in self.queues.values() if q and q[0].request.number == number), None)
        if queue is None:
            return  # the answer to a repeat
        if isinstance(content, Fenced):
            self.out.append(Die())  # its seat is another's: begin anew
        elif isinstance(content, (Later, ProtocolError)):
            pass  # again with the next tick
        elif isinstance(content, PsfleetError):
            raise AssertionError(f"worker {self.seat} is refused: {content!r}")
        else:
            asked = queue.popleft()
            asked.answer, asked.is_answered = content, True
            if queue:
                name = next(name for name, q in self.queues.items() if q is queue)
                self.out.append(Send(name, queue[0].request))
            self._go_on()

    def _go_on(self) -> None:
        while not self.done and all(asked.is_answered for asked in self._waited):
            try:
                self._waited = next(self._program)
            except StopIteration:
                self.done = True

    def _released(self, source: str, mark: Mark) -> None:
        """Cut the stream of pushes here, between two steps, and deliver the state as of the cut."""
        number, last = mark.number, mark.round
        if last is None and number > self.heard:
            self.heard = number
            self.mark = (number, self.sequence)
            self._ask_all(MarkCut(number, self.seat, self.life, self.sequence))
        if last is None and self.mark is not None and self.mark[0] == number:
            last = self.mark[1]
        if last is not None:
            self.out.append(Send(source, Delivered(number, self.seat, self.life, last)))

    def _ask(self, name: str, content: Any) -> _Asked:
        self._asked += 1
        asked = _Asked(Request(self._asked, content))
        self.queues[name].append(asked)
        if len(self.queues[name]) == 1:
            self.out.append(Send(name, asked.request))
        return asked

    def _ask_all(self, content: Any) -> list[_Asked]:
        return [self._ask(name, content) for name in self.servers]

    # -- the program ---------------------------------------------------------------------------

    def _run(self) -> Waits:
        registered = self._ask(self.job.home, Register(self.seat, self.boot))
        yield [registered]
        seating = registered.answer
        self.life, self.view, self.met = seating.incarnation, seating.view, seating.met
        first = self.job.phases[0]
        yield from self._join(first.mode)
        if first.mode == "sync":
            self.sequence = seating.first - 1
            self.open = self.sequence
        for spec in (ROWS, COUNTS):
            yield self._ask_all(CreateTable(spec, self.seat))
        yield from self._meet(first.mode)
        for number, phase in enumerate(self.job.phases):
            if number:
                changes = phase.mode != self.job.phases[number - 1].mode
                yield from self._join(phase.mode, self.switches + changes)
            yield from self._phase(phase, seating.first)
            yield from self._meet(phase.mode)
            yield from self._meet(phase.mode, comes_back=False)
        yield [
            *self._ask_all(Leave(self.seat, self.life, self.sequence)),
            self._ask(self.job.home, Depart(self.seat, self.life)),
        ]

    def _phase(self, phase: Phase, first: int) -> Waits:
        if phase.steps is not None:
            for _ in range(phase.steps[self.seat]):
                self.steps += 1
                sample = own_sample(self.seat, self.steps)
                yield from self._round(sample) if phase.mode == "sync" else self._step(sample)
        elif phase.mode == "sync":
            yield from self._rounds(first)
        else:
            yield from self._leases()

    def _join(self, mode: Mode, switch: int = 0) -> Waits:
        staleness = self.job.staleness if mode == "ssp" else 0
        joined = self._ask_all(Join(self.seat, self.life, mode, staleness, switch))
        yield joined
        self.mode = mode
        self.switches = max(switch, self.switches)
        numbers = {asked.answer.number for asked in joined}
        if self.meetings or mode != "sync":
            assert len(numbers) == 1, f"servers stand at different places: {numbers}"
            [self.sequence] = numbers
        self.clock = 0

    def _meet(self, mode: Mode, comes_back: bool = True) -> Waits:
        """Meet all workers; in sync and ssp mode the others do not wait for this one meanwhile."""
        yield from self._flush()
        self.meetings += 1
        arrival = Arrival(self.seat, self.life, self.meetings)
        if self.meetings <= self.met or mode not in ("sync", "ssp"):
            yield [self._ask(self.job.home, arrival)]
            return
        yield self._ask_all(Leave(self.seat, self.life, self.sequence, rest=self.meetings))
        yield [self._ask(self.job.home, arrival)]
        self.clock = 0
        if mode == "sync" and comes_back:
            yield from self._join(mode)

    def _flush(self) -> Waits:
        """Wait until the last push is in a closed round, or applied."""
        yield [asked for queue in self.queues.values() for asked in queue]
        if self.open:
            yield from self._pull()

    def _pull(self) -> Generator[list[_Asked], None, Rows]:
        """The rows; in sync mode as they are after the last round."""
        rows = np.zeros((len(IDS), 2), np.float32)
        owned = [owned_by(IDS, server, self.job.servers) for server in range(self.job.servers)]
        asked = [
            self._ask(
                name, Pull(self.seat, self.life, (Read(ROWS.key, IDS[mine]),), commit=self.open)
            )
            for name, mine in zip(self.servers, owned, strict=True)
        ]
        yield asked
        for mine, one in zip(owned, asked, strict=True):
            [rows[mine]], closed, view = one.answer
            assert not self.open or closed == self.open, f"round {closed} is served for {self.open}"
            self.view = max(self.view, view)
        self.open = 0
        return rows

    def _push(
        self, samples: Ids, gradient: Rows | None = None, position: Position | None = None
    ) -> list[_Asked]:
        """A step: each server's part of the gradient, and a use of each sample, on every server."""
        self.sequence += 1
        self.clock += 1
        self.pushes[self.seat, self.life, self.sequence] = samples
        self.open = self.sequence if self.mode == "sync" else 0
        asked = []
        for server, name in enumerate(self.servers):
            mine = owned_by(IDS, server, self.job.servers)
            values = np.zeros((len(IDS), 2), np.float32) if gradient is None else gradient
            uses = np.full((len(samples), 1), -1, np.float32)
            push = Push(
                self.seat,
                self.life,
                self.sequence,
                (
                    Gradient(ROWS.key, values[mine], IDS[mine], 0.1),
                    Gradient(COUNTS.key, uses, samples, 1.0),
                ),
                len(samples),
                clock=self.clock,
                cut=self.mark,
                position=position,
            )
            asked.append(self._ask(name, push))
        return asked

    def _round(self, samples: Ids) -> Waits:
        """One round of sync mode; it is waited for with the next pull."""
        rows = yield from self._pull()
        yield self._push(samples, slopes(rows, samples))

    def _step(self, samples: Ids) -> Waits:
        """Push, and do not wait for it; pull from some servers only, so that the others lag."""
        self._push(samples)
        some = [name for name in self.servers if self._dice.random() < 0.6]
        clock = self.clock if self.mode == "ssp" else 0
        yield [self._ask(name, Pull(self.seat, self.life, (), clock=clock)) for name in some]

    # -- data that the fleet hands out -----------------------------------------------------------

    def _rounds(self, first: int) -> Waits:
        plan, known = yield from self._deal(round=self.sequence + 1)
        assert first > plan.entries[0].first or self.sequence + 1 == plan.entries[0].first
        while True:
            number = self.sequence + 1
            if self.view > known:
                plan, known = yield from self._deal(round=number)
            if number > plan.last():
                yield from self._flush()
                if self.view > known:
                    continue
                return
            yield from self._round(places(plan.share(self.seat, number)))

    def _leases(self) -> Waits:
        taken = used = 0
        while True:
            lease, _ = yield from self._deal(lease=taken, used=used)
            if lease == ():
                return
            if lease is None:
                used = taken  # every push is answered before the next call
                continue
            for low in range(0, length(lease), self.job.batch):
                high = min(low + self.job.batch, length(lease))
                yield self._push(places(part(lease, low, high)), position=(taken, high))
            taken += 1

    def _deal(self, **wish: int) -> Generator[list[_Asked], None, Any]:
        order = Order(1, self.job.size, self.job.batch, self.job.epochs, **wish)
        asked = self._ask(self.job.home, Deal(self.seat, self.life, order))
        yield [asked]
        return asked.answer
