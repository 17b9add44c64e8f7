"""A worker process: the machines of psfleet_worker under the scheduler, and the script that they serve.

Session, Stream, Shares, Collectives and Retries are those that run in production. What they ask for becomes
messages: calls to one server in order, each again until it is answered.
"""

import random
from collections import deque
from typing import Any

import numpy as np

from psfleet.core.base.errors import Fenced, ProtocolError, PsfleetError
from psfleet.core.engine.kernels.id_routing import owned_by
from psfleet.core.engine.round_plan import RoundPlan
from psfleet.core.engine.runtime_interface import Read
from psfleet.core.engine.shard.events import Join, Leave, Pull, Push
from psfleet_server.coordinator.barriers import Arrival, CollectiveReply
from psfleet_server.coordinator.data_dispatch import DatasetRequest
from psfleet_worker.session import instructions
from psfleet_worker.session.data_shares import WorkerData
from psfleet_worker.session.worker_session import WINDOW, Collectives, Session, Stream
from tests.protocol.fleet import calls
from tests.protocol.fleet.asked import Asked, Pulled, Script, seated
from tests.protocol.fleet.job import (
    COUNTS,
    FEW,
    IDS,
    ROWS,
    Ids,
    Job,
    Phase,
    Rows,
    counted,
    gradients,
    own_sample,
    places,
    slopes,
)
from tests.protocol.fleet.pushes import Pushes
from tests.protocol.scheduler import Boot, Die, Received, Send, Tick
from tests.protocol.scheduler import Instruction as Action


class Worker:
    """One process.

    Attributes:
        queues: To each server what is not answered, of which only the first has been sent; likewise of the
            marks of snapshots, which are told beside the training.
        done: It has ended in order.
    """

    def __init__(self, seat: int, job: Job, boot: int, pushes: Pushes) -> None:
        self.seat, self.job, self.pushes = seat, job, pushes
        self.boot = 1000 * seat + boot
        self.out: list[Action] = []
        self.servers = [f"S{server}" for server in range(job.servers)]
        marks = [f"marks {name}" for name in self.servers]
        self.queues: dict[str, deque[Asked]] = {
            name: deque() for name in [*self.servers, job.home, *marks]
        }
        self.done = False
        self.session = Session(seat, job.declared(job.phases[0].mode), patience=float("inf"))
        self.stream = Stream(self.session)
        self.worker_data = WorkerData(self.session)
        self.collectives = Collectives(self.session, self.stream, self.reached)
        self.dice = random.Random(self.boot)
        self._steps = 0
        self._samples = np.zeros(0, np.int64)  # of the next push
        self._gradient: Rows | None = None
        self._waiting: dict[str, Push] | None = None  # a push that waits for company
        self._under_way: deque[list[Asked]] = deque()
        self._ahead: Pulled | None = None
        self._markings: dict[int, Asked] = {}  # by snapshot: the wait until it is to be marked
        self._told: dict[int, calls.Learned | calls.Delivered] = {}  # of snapshots, to server 0
        self._asked = self.boot << 20  # no answer to a process before this one is taken for its own
        self._threads: list[tuple[Script, list[Asked]]] = [(self.script(), [])]

    def reached(self) -> tuple[int, int]:
        """How far the script is with its data."""
        return self.worker_data.reached

    # -- events --------------------------------------------------------------------------------

    def handle(self, event: Any) -> list[Action]:
        self.out = []
        match event:
            case Boot():
                self._go_on()
            case Tick():
                self._send_waiting()
                for name in self.queues:
                    self._send(name)
            case Received(_, calls.Response(number, content, servers)):
                self._answered(number, content, servers)
            case Received(source, calls.Announced(number)) if self.session.incarnation:
                self._hear(source, number)
            case Received(_, calls.Mark() as mark) if mark.incarnation == self.session.incarnation:
                self._mark(mark)
        self.session.validate()
        self.stream.validate()
        self.worker_data.validate()
        return self.out

    def _answered(self, number: int, content: Any, servers: tuple[str, ...]) -> None:
        name = next(
            (name for name, q in self.queues.items() if q and q[0].request.number == number), None
        )
        if name is None:
            return  # the answer to a repeat
        asked = self.queues[name][0]
        if isinstance(content, Fenced):
            self.out.append(Die())  # its seat is another's: begin again
        elif self.job.standbys and isinstance(content, ProtocolError):
            pass  # perhaps of a deposed primary, to which no connection would lead: again
        elif isinstance(content, PsfleetError):  # again with the next tick, or the worker ends
            asked.retries.after(content, 0.0, inline=True, closing=False)
        else:
            self.queues[name].popleft()
            asked.reply, asked.servers, asked.is_answered = content, servers, True
            push = asked.request.content
            if isinstance(push, Push) and self.session.declared.name != "sync":
                acknowledged = int(name[1:]), push.worker, push.incarnation, push.sequence
                self.pushes.acknowledged.append(acknowledged)
            self._send(name)
            self._go_on()

    def _hear(self, source: str, number: int) -> None:
        """A snapshot is wanted: a thread of its own takes part, and repeats what it has said."""
        if self.stream.hears(number):
            self._threads.append((self.run(self.stream.mark(number)), []))
            self._go_on()
        if number in self._told:
            self.out.append(Send(source, self._told[number]))

    def _mark(self, mark: calls.Mark) -> None:
        marking = self._markings.get(mark.number)
        if marking is not None and not marking.is_answered:
            marking.reply, marking.is_answered = (mark.round is None, mark.round or 0), True
            self._go_on()

    def _go_on(self) -> None:
        """Let every thread run until it waits for an answer."""
        for place, (script, waited) in enumerate(self._threads):
            try:
                while all(asked.is_answered for asked in waited):
                    waited = next(script)
                    self._threads[place] = (script, waited)
            except StopIteration:
                self._threads[place] = (script, [Asked(calls.Request(0, None))])
                self.done = self.done or place == 0

    # -- calls ---------------------------------------------------------------------------------

    def ask(self, name: str, content: Any) -> Asked:
        """Make a call to a server after those before it."""
        self._asked += 1
        asked = Asked(calls.Request(self._asked, content))
        self.queues[name].append(asked)
        if len(self.queues[name]) == 1:
            self._send(name)
        return asked

    def _send(self, name: str) -> None:
        if self.queues[name]:
            self.out.append(Send(name.split()[-1], self.queues[name][0].request))

    def ask_all(self, content: Any) -> list[Asked]:
        """The same call to every server."""
        return [self.ask(name, content) for name in self.servers]

    def home(self, content: Any) -> Script:
        """Ask the coordinator; returns the answer, after which there may be other servers."""
        yield [asked := self.ask(self.job.home, content)]
        self._move_to(asked.servers)
        return asked.reply

    def _move_to(self, servers: tuple[str, ...]) -> None:
        """Go on with these servers, as a Connection does; none: their number has not changed."""
        if not servers or [*servers] == self.servers:
            return
        for name in self.servers[len(servers) :]:
            assert not self.queues.pop(name), "something is under way to a server that is gone"
        self.servers = [*servers]
        for name in servers:
            self.queues.setdefault(name, deque())
            self.queues.setdefault(f"marks {name}", deque())
        self.stream.reroute()

    # -- instructions --------------------------------------------------------------------------

    def run(self, program: instructions.Program[Any]) -> Script:
        """Do what a program asks for, until it ends; returns what it does."""
        outcome: Any = None
        while True:
            try:
                wanted = program.send(outcome)
            except StopIteration as end:
                return end.value
            outcome = yield from self.perform(wanted)

    def perform(self, instruction: instructions.Instruction) -> Script:
        """Do what a program asks for; returns what came of it."""
        match instruction:
            case instructions.AwaitPushes(under_way, leaves):
                yield from self._settle(under_way, leaves)
            case instructions.SendPull():
                return (yield from self._read(instruction))
            case instructions.LayOutPush():
                return self._holders()
            case instructions.AwaitMarking() | instructions.ReportState():
                return (yield from self._snapshot(instruction))
            case instructions.SendPush():
                self._push(instruction)
            case instructions.AwaitReads():
                return (yield from self._land())
            case Join():
                joined = self.ask_all(instruction)
                yield joined
                return [asked.reply for asked in joined]
            case Leave():
                yield self.ask_all(instruction)
            case instructions.CutStream():
                yield [
                    self.ask(f"marks {name}", instruction.to(server))
                    for server, name in enumerate(self.servers)
                ]
            case instructions.Pause():
                pass  # what follows is asked again and again
            case (
                instructions.RegisterWorker()
                | instructions.JoinCollective()
                | instructions.RequestData()
            ):
                return (yield from self._coordinate(instruction))
            case instructions.FlushPushes():
                yield from self.run(self.stream.flush())
            case instructions.SkipStep():
                yield from self.push(np.zeros(0, np.int64))

    def _coordinate(
        self,
        wanted: instructions.RegisterWorker
        | instructions.JoinCollective
        | instructions.RequestData,
    ) -> Script:
        session = self.session
        match wanted:
            case instructions.RegisterWorker():
                return seated((yield from self.home(calls.Register(self.seat, self.boot))))
            case instructions.JoinCollective(number, mode, value, change, reached):
                incarnation, last = session.incarnation, session.sequence
                arrival = Arrival(
                    self.seat, incarnation, number, mode, value, change, last, reached
                )
                released: CollectiveReply = yield from self.home(arrival)
                mode_request = released.mode_request
                return instructions.CollectiveResult(
                    released.value, (mode_request.mode, {}) if mode_request is not None else None
                )
            case instructions.RequestData(dataset, batch, number, lease, used):
                job = self.job
                request = DatasetRequest(
                    dataset, job.size, batch, job.epochs, round=number, lease=lease, used=used
                )
                dealt = calls.AssignData(self.seat, session.incarnation, request)
                what, view = yield from self.home(dealt)
                if number and what == ():
                    what = RoundPlan(job.size, batch)
                elif not number and isinstance(what, RoundPlan):
                    what = ()
                return instructions.DataReply(what, view)

    def _snapshot(self, wanted: instructions.AwaitMarking | instructions.ReportState) -> Script:
        incarnation = self.session.incarnation
        match wanted:
            case instructions.AwaitMarking(number):
                self._told[number] = calls.Learned(number, self.seat, incarnation)
                self._markings[number] = Asked(calls.Request(0, None))
                yield [self._markings[number]]
                return self._markings[number].reply
            case instructions.ReportState(number, last):
                self._told[number] = calls.Delivered(number, self.seat, incarnation, last)

    def _holders(self) -> list[bool]:
        """Which servers hold a table of the next push, or hear of all pushes."""
        count = len(self.servers)
        if not self.job.groups or self.session.declared.pulls_wait:
            return [True] * count
        needed = [
            self.job.moves and counted(self._samples, i, count, True).any() for i in range(count)
        ]
        return [True, *(bool(it) or self.dice.random() < 0.5 for it in needed[1:])]

    def _push(self, send: instructions.SendPush) -> None:
        """Each server's part of the gradient, and a use of each sample, on every server that it goes to."""
        self._send_waiting()
        session, samples, count = self.session, self._samples, len(self.servers)
        there = [server for server in range(count) if send.addressed[server] == send.sequence]
        self.pushes[self.seat, session.incarnation, send.sequence] = samples
        self.pushes.sent[self.seat, session.incarnation, send.sequence] = frozenset(there)
        self._waiting = {
            self.servers[server]: Push(
                self.seat,
                session.incarnation,
                send.sequence,
                gradients(samples, self._gradient, server, count, self.job),
                len(samples),
                clock=session.clock + 1,
                cut=send.cut if send.cut[0] else None,
                position=self.position(),
                skipped=send.skipped(server),
                addressed=() if server or min(send.addressed) == send.sequence else send.addressed,
            )
            for server in there
        }
        if not send.lingers:
            self._send_waiting()

    def position(self) -> tuple[int, int] | None:
        """What the next push says of the worker's data."""
        return self.worker_data.position

    def _owned(self) -> list[Any]:
        return [owned_by(IDS, server, len(self.servers)) for server in range(len(self.servers))]

    def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._under_way.append([self.ask(name, push) for name, push in waiting.items()])
            assert len(self._under_way) <= WINDOW + 1

    def _settle(self, under_way: int, leaves: bool) -> Script:
        if leaves:
            self._send_waiting()
        while len(self._under_way) > under_way:
            yield self._under_way[0]
            self._under_way.popleft()

    def _read(self, read: instructions.SendPull) -> Script:
        """Rows in sync mode; else pull from some servers only, so that the others lag."""
        self._send_waiting()
        session = self.session
        sync = session.declared.name == "sync"
        asked = []
        for name, mine in zip(self.servers, self._owned(), strict=True):
            if sync or self.dice.random() < 0.6:
                rows = (Read(ROWS.key, IDS[mine]),) if sync and read.own else ()
                clock = session.clock if session.declared.name == "ssp" else 0
                pull = Pull(self.seat, session.incarnation, rows, read.commit, clock)
                asked.append(self.ask(name, pull))
        pulled = Pulled(asked)
        if read.ahead:
            self._ahead = pulled
            return pulled
        yield asked
        for one in asked:
            _, closed, view = one.reply
            assert not read.commit or closed == read.commit, f"{closed} for {read.commit}"
            pulled.view = max(pulled.view, view)
        if sync and read.own:
            pulled.rows = np.zeros((len(IDS), 2), np.float32)
            for mine, one in zip(self._owned(), asked, strict=True):
                [pulled.rows[mine]] = one.reply[0]
        return pulled

    def _land(self) -> Script:
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return 0
        yield ahead.asked
        return max((one.reply[2] for one in ahead.asked), default=0)

    # -- the script ----------------------------------------------------------------------------

    def script(self) -> Script:
        """The main program."""
        yield from self.begin()
        yield from self.run(self.collectives.gather())
        phases = self.job.phases
        for number, phase in enumerate(phases):
            if number and phase.mode != phases[number - 1].mode:
                yield from self.run(self.collectives.set_mode(self.job.declared(phase.mode)))
            yield from self._train(phase)
            yield from self.run(self.collectives.gather())
            yield from self.run(self.collectives.gather())
        yield from self.end()

    def begin(self) -> Script:
        """Register, join, and make the tables."""
        yield from self.run(self.session.start())
        self.stream.begin()
        for spec in (ROWS, COUNTS, FEW) if self.job.followers else (ROWS, COUNTS):
            yield self.ask_all(calls.CreateTable(spec, self.seat))

    def end(self) -> Script:
        """Leave in order."""
        yield from self.run(self.stream.flush())
        yield from self.run(self.session.leave())
        yield from self.home(calls.Depart(self.seat, self.session.incarnation))

    def _train(self, phase: Phase) -> Script:
        if phase.steps is not None:
            for _ in range(phase.steps[self.seat]):
                self._steps += 1
                yield from self.step(own_sample(self.seat, self._steps))
            return
        program = self.worker_data.steps(self.job.batch)
        outcome: Any = None
        while True:
            try:
                wanted = program.send(outcome)
            except StopIteration:
                return
            if isinstance(wanted, instructions.TrainStep):
                yield from self.step(places(wanted.ranges))
            outcome = yield from self.perform(wanted)

    def step(self, samples: Ids) -> Script:
        """Train with these samples: in rounds what is pushed depends on what was pulled."""
        if self.session.declared.name == "sync":
            pulled: Pulled = yield from self.run(self.stream.pull())
            assert pulled.rows is not None
            yield from self.push(samples, slopes(pulled.rows, samples))
            return
        yield from self.push(samples)
        if self.stream.reads_ahead and self.dice.random() < 0.3:
            yield from self.run(self.stream.pull_ahead())
        elif self.session.declared.name == "ssp" or self.dice.random() < 0.5:
            yield from self.run(self.stream.pull())

    def push(self, samples: Ids, gradient: Rows | None = None) -> Script:
        """A push that uses these samples."""
        self._samples, self._gradient = samples, gradient
        yield from self.run(self.stream.push())
