"""Run one shard: serialise events under a lock and perform the instructions that it returns."""

import contextlib
import os
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from psfleet.errors import DeadlineExceeded, LimitExceeded, ProtocolError, PsfleetError
from psfleet.faults.crash_points import CrashFaults
from psfleet.runtime.interface import Read
from psfleet.settings.limits import ServerLimits
from psfleet.shard.events import (
    Call,
    Event,
    Expire,
    Instruction,
    Pull,
    Push,
    RetryRoom,
    SendError,
    SendOutcome,
    SendReport,
    SendValues,
    WriteSnapshot,
)
from psfleet.shard.membership_view import InstallView, PrepareView, ViewReport
from psfleet.shard.shard import Shard
from psfleet.tables.dense import DenseTable
from psfleet.wire.mode_messages import mode_fields, write_mode
from psfleet.wire.v1 import coordinator_pb2, frame_pb2, shard_pb2
from psfleet.wire.v1.frame_pb2 import OUTCOME_APPLIED, OUTCOME_HELD, OUTCOME_UNSPECIFIED, Header
from psfleet_server.coordinator.barriers import CollectiveReply
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.coordinator.coordinator_messages import Outcome, Registration
from psfleet_server.coordinator.data_dispatch import DataDispatch
from psfleet_server.coordinator.mode_requests import ModeRequestFile
from psfleet_server.durability.coordinator_state import server_state
from psfleet_server.durability.journal import Journal
from psfleet_server.durability.log_shipping import LogShipping
from psfleet_server.durability.snapshot_writer import SnapshotWriter
from psfleet_server.engine.memory_budget import resident
from psfleet_server.engine.server_measurements import CallBytes, CallLatencies, WorkerReports
from psfleet_server.rpc.attached_memory import AttachedMemory
from psfleet_server.rpc.deferred_reply import Deadlines, DeferredReply
from psfleet_server.rpc.pull_response import PullResponse, lay_out

if TYPE_CHECKING:
    from psfleet.observability.spans import Tracing

__all__ = ["OUTCOMES", "ShardHost"]

OUTCOMES = {"applied": OUTCOME_APPLIED, "held": OUTCOME_HELD}


class ShardHost:
    """One shard, on server 0 the coordinator, and what waits for them.

    `lock` is held for each event. Tables are read outside it, so that pulls run beside pushes.

    Attributes:
        keeper: Keeps what changes in the log; None: nothing is kept.
        feed: Brings what changes to the standby, if there is one.
        parts: Of snapshots.
        latencies, bytes: Of the calls of the training.
        tracing: Makes the spans of pushes; None: they are not traced.
        worker_reports: On server 0, what workers have sent of theirs.
        tensor_endpoint: Port or path at which the methods of tensors are answered too.
        boot: Number of this process's start.
        wishes: For another mode, from outside the job's scripts.
        poke: Called when the coordinator may have something for the servers.
        aim: Called with the endpoint of the coordinator.
        find: Called with the endpoints of all servers, as a worker knows them.
        members_changed: Called when a worker may have left, or is heard for the first time.
    """

    def __init__(
        self,
        shard: Shard,
        coordinator: Coordinator | None,
        deadlines: Deadlines,
        limits: ServerLimits | None = None,
    ) -> None:
        self.limits = limits or ServerLimits()
        self.shard = shard
        self.coordinator = coordinator
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.lanes = AttachedMemory()
        self.tensor_endpoint = (0, "")
        self.keeper: Journal | None = None
        self.feed = LogShipping(CrashFaults.wanted())
        self.parts = SnapshotWriter(CrashFaults.wanted())
        self.tracing: Tracing | None = None
        self.latencies = CallLatencies()
        self.bytes = CallBytes()
        self.worker_reports = WorkerReports()
        self.boot = int.from_bytes(os.urandom(8), "little") | 1  # 0 is nobody's
        self.wishes = ModeRequestFile(None)
        self.poke: Callable[[], None] = lambda: None
        self.aim: Callable[[str], None] = lambda endpoint: None
        self.find: Callable[[Sequence[str]], None] = lambda endpoints: None
        self.members_changed: Callable[[], None] = lambda: None
        self._deadlines = deadlines

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """The lock; after it, what has changed meanwhile is durable and may be answered.

        With a standby that is: the standby has it too, and it can be answered whoever lives on.
        """
        with self.lock:
            yield
            log = None if self.keeper is None else self.keeper.log
            end = 0 if log is None else log.end
            fed = self.feed.end
        if log is not None:
            log.reach("applied")
            log.settle(end)
            log.reach("settled")
        self.feed.settle(fed)

    def _changes(self) -> contextlib.AbstractContextManager[object]:
        """`changing`, or the lock alone where that is all."""
        return self.lock if self.keeper is None and not self.feed.enabled else self.changing()

    def _take(self, event: Event, call: Call) -> list[Instruction]:
        with self._changes():
            return self._handle(event, call)

    def _handle(self, event: Event, call: Call) -> list[Instruction]:
        """Let the shard take an event; what it wants kept is read as it is now.

        The traceback of an error holds frames, and with them the event and the memory that a worker
        shares in which its tensors lie. A frame that held the error too would keep all that until the
        garbage collector comes, so errors travel without.
        """
        cutting = self.shard.cuts.under_way
        instructions = self.shard.handle(event, call)
        if cutting is not None and self.shard.cuts.is_lost(cutting.number):
            self.parts.forget(cutting.number)
        answers: list[Instruction] = []
        for instruction in instructions:
            if isinstance(instruction, WriteSnapshot):
                frozen = instruction.frozen
                self.parts.begin(frozen, server_state(frozen.state, self.coordinator))
                continue
            if isinstance(instruction, SendError):
                instruction.error.__traceback__ = None
            answers.append(instruction)
        return answers

    def ask(self, event: Event) -> SendOutcome:
        """Take an event that is answered at once."""
        mine = self._ask(event)
        assert isinstance(mine, SendOutcome)
        return mine

    def _ask(self, event: Event) -> Instruction:
        call = object()
        instructions = self._take(event, call)
        [mine] = [i for i in instructions if i.call is call]
        if len(instructions) > 1:
            self._perform([i for i in instructions if i.call is not call])
        if not isinstance(mine, SendError):
            return mine
        error = mine.error
        del mine, instructions  # see _handle
        try:
            raise error
        finally:
            del error

    def freeze(self, event: PrepareView) -> ViewReport:
        """Freeze the shard for a new view; where it stands. A snapshot under way is given up.

        If a standby has taken over, this process ends before it reports.
        """
        told = self._ask(event)
        assert isinstance(told, SendReport)
        self.feed.settle(self.feed.confirm())
        return told.report

    def install(self, event: InstallView) -> None:
        """Continue with the new view; end the process if the view has no members."""
        self.ask(event)
        self.end_if_over()

    def end_if_over(self) -> None:
        """Somebody may have left; let the process end once every worker has."""
        self.members_changed()
        with self.lock:
            over = self.shard.rounds.is_over()
        if over:
            self.ended.set()

    def reach(self, point: str) -> None:
        """Die here if a test wants that."""
        if self.keeper is not None:
            self.keeper.log.reach(point)

    def submit(self, event: Event, reply: DeferredReply) -> None:
        """Take an event whose reply may have to wait."""
        self._check_parked()
        self._follow(self._take(event, reply), reply)

    def _follow(self, instructions: Sequence[Instruction], reply: DeferredReply) -> None:
        """Perform what an event has led to whose reply may have to wait."""
        self._perform(instructions)
        if not reply.done:
            reply.waited = self.latencies.waited
            reply.park(self._deadlines, lambda: self._expire(reply))

    def exchange(self, push: Push, pull: Pull, reply: DeferredReply) -> None:
        """Take a push, then the pull that came with it, whose reply may have to wait.

        Raises:
            ProtocolError: The mode has rounds, where a pull has to wait until every server holds the push.
        """
        if self.shard.consistency.declared.has_rounds:
            raise ProtocolError(
                f"the fleet runs in mode {self.shard.mode!r}, in which a pull cannot travel with "
                "the push before it; push first, then pull"
            )
        # All that could be wrong with the pull, before the push is applied.
        if pull.commit:
            raise ProtocolError(
                f"the pull of an exchange commits round {pull.commit}; only sync mode has rounds"
            )
        self._check_parked()
        with self._changes():
            answer, *instructions = self._handle(push, reply)
            if isinstance(answer, SendOutcome):
                assert answer.outcome is not None
                reply.outcome = OUTCOMES[answer.outcome]
                instructions += self._handle(pull, reply)
            else:
                instructions.append(answer)
        reply.measure(self.latencies.push)
        self._follow(instructions, reply)

    def _values(self, serve: SendValues, reply: DeferredReply) -> bytes:
        """The message with the current values of the reads, or with word that they are in place."""
        tables, view = self.shard.tables, self.shard.workers.view
        laid = reply.response
        if laid is None:
            header = Header(outcome=reply.outcome, view=view)
            laid = lay_out(header, serve.reads, tables.shape_of)
        tables.read_into(serve.reads, laid.values)
        if serve.keeper is not None:
            self.shard.stale_gradients.keep(serve.keeper, serve.reads, laid.values)
        return self._finish(laid, reply.outcome, view)

    def _finish(self, laid: PullResponse, outcome: frame_pb2.Outcome, view: int) -> bytes:
        message = laid.finish(outcome, view)
        self.bytes.values += laid.size
        self.bytes.saved += laid.saved
        self.settle_read()
        return message

    def read(self, reads: Sequence[Read]) -> bytes:
        """The answer to whoever pulls without a seat: it waits for no worker, and nothing remembers it.

        In a mode with rounds all values are of one round: none closes meanwhile.
        """
        has_rounds = self.shard.consistency.declared.has_rounds
        with self.changing() if has_rounds else contextlib.nullcontext():
            tables, closed = self.shard.tables, self.shard.rounds.closed
            header = Header(
                round=closed if has_rounds else 0,
                steps=[tables[read.table].step for read in reads],
                view=self.shard.workers.view,
            )
            laid = lay_out(header, reads, tables.shape_of)
            tables.read_into(reads, laid.values)
        return self._finish(laid, OUTCOME_UNSPECIFIED, header.view)

    def settle_read(self) -> None:
        """Return when what was read may be told: it may be newer than what the call waited for."""
        self.feed.settle(self.feed.end)

    def meet(
        self,
        step: Callable[[Coordinator], Sequence[Outcome]],
        reply: DeferredReply | None = None,
        *,
        registers: bool = False,
    ) -> None:
        """Take a step of the coordinator; `reply` waits for it unless it is answered.

        Calls that register have places of their own to wait in: who comes in is not kept out by
        those who wait for it.
        """
        assert self.coordinator is not None
        coordinator = self.coordinator
        if reply is not None:
            self._check_parked(registers=registers)
        with self.changing():
            outcomes = step(coordinator)
            busy = coordinator.is_busy
        _release(outcomes)
        if busy:
            self.poke()
        if reply is not None and not reply.done:
            reply.park(self._deadlines, lambda: self._expire_meeting(coordinator, reply))

    def retry(self) -> None:
        """Do what had to wait for room on the disk of the log.

        Raises:
            NoRoom: There is none yet.
        """
        if self.shard.waits_for_room:
            self.ask(RetryRoom())
        if self.coordinator is not None and self.coordinator.waits_for_room:
            self.meet(lambda c: c.retry())

    def park(self, reply: DeferredReply, expired: str) -> None:
        """Let a call wait that somebody else answers; `expired`: what it is told at its deadline."""
        if not reply.done:
            reply.park(self._deadlines, lambda: reply.fail(DeadlineExceeded(expired)))

    def _check_parked(self, *, registers: bool = False) -> None:
        if not registers and len(self._deadlines) < self.limits.parked:
            return
        registering = 0 if self.coordinator is None else self.coordinator.registering
        waiting = registering if registers else len(self._deadlines) - registering
        if waiting >= self.limits.parked:
            raise LimitExceeded(
                f"{waiting} calls wait at server {self.shard.index}, its limit is "
                f"{self.limits.parked}; raise parked in PSFLEET_LIMITS"
            )

    @property
    def parked(self) -> int:
        """How many calls wait."""
        return len(self._deadlines)

    def status(self) -> shard_pb2.StatusReply:
        """Counts for displays."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        with self.lock:
            shard, counters = self.shard, self.shard.counters
            supply = DataDispatch() if self.coordinator is None else self.coordinator.supply
            return shard_pb2.StatusReply(
                server=shard.index,
                servers=shard.servers,
                tables=[_table_status(t) for t in shard.tables.values()],
                pushes=counters.pushes,
                repeats=counters.repeats,
                bytes_in=self.bytes.received,
                bytes_out=self.bytes.values,
                samples=counters.samples,
                losses=counters.losses,
                round=shard.rounds.closed,
                cpu_seconds=usage.ru_utime + usage.ru_stime,
                resident_bytes=resident(),
                workers=len(set(shard.workers.lives) - shard.rounds.left),
                pid=os.getpid(),
                staleness=shard.staleness.counts,
                lead=shard.consistency.gate.lead,
                mode=write_mode(shard.mode) if shard.mode else None,
                torn=[
                    shard_pb2.TornStep(
                        worker=step.worker, incarnation=step.incarnation, last=step.sequences
                    )
                    for step in supply.torn
                ],
                samples_left=supply.samples_left(shard.rounds.closed),
            )

    def _expire(self, reply: DeferredReply) -> None:
        self._perform(self._take(Expire(), reply))

    def _expire_meeting(self, coordinator: Coordinator, reply: DeferredReply) -> None:
        with self.lock:
            outcomes = coordinator.expire(reply)
        _release(outcomes)

    def _perform(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            reply = instruction.call
            assert isinstance(reply, DeferredReply)
            match instruction:
                case SendValues():
                    self._serve(instruction, reply)
                case SendError():
                    reply.fail(instruction.error)
                case SendOutcome() | SendReport():
                    raise AssertionError(f"{instruction} answers a call that waits for values")

    def _serve(self, serve: SendValues, reply: DeferredReply) -> None:
        try:
            message = self._values(serve, reply)
        except PsfleetError as error:
            reply.fail(error)
        else:
            reply.answer(message)


def _release(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        reply = outcome.call
        assert isinstance(reply, DeferredReply)
        match outcome:
            case SendError():
                reply.fail(outcome.error)
            case CollectiveReply():
                reply.answer(_met(outcome))
            case Registration():
                reply.answer(_seated(outcome))


def _seated(seating: Registration) -> bytes:
    switch, changed = seating.switch, {}
    if switch is not None:
        changed = {"switches": switch.number, "last": switch.last, **mode_fields(switch.mode)}
    reply = coordinator_pb2.RegisterReply(
        incarnation=seating.incarnation,
        first=seating.first,
        view=seating.view,
        met=seating.met,
        progress=seating.progress,
        **changed,
    )
    return bytes(reply.SerializeToString())


def _met(release: CollectiveReply) -> bytes:
    reply: Any = coordinator_pb2.BarrierReply()
    if release.value is not None:
        reply = coordinator_pb2.AllReduceReply(value=release.value.tobytes())
    elif release.wish is not None:
        reply.wish.mode = release.wish.mode
        reply.wish.settings.update(release.wish.settings)
    return bytes(reply.SerializeToString())


def _table_status(table: Any) -> shard_pb2.TableStatus:
    count = table.count if isinstance(table, DenseTable) else len(table)
    return shard_pb2.TableStatus(
        name=table.spec.name,
        kind=table.spec.kind,
        count=count,
        bytes=table.bytes,
        step=table.step,
        device_bytes=table.device_bytes,
    )
