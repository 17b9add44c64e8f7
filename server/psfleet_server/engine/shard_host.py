"""Run one shard: serialise events under a lock and perform the instructions that it returns."""

import contextlib
import os
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from psfleet.core.base.errors import DeadlineExceeded, LimitExceeded, ProtocolError, PsfleetError
from psfleet.core.base.faults import CrashFaults
from psfleet.core.base.memory import resident
from psfleet.core.base.settings.declared_settings import ServerLimits
from psfleet.core.engine.interface import Read
from psfleet.core.engine.shard.events import (
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
from psfleet.core.engine.shard.membership_view import InstallView, PrepareView, ViewReport
from psfleet.core.engine.shard.shard import Shard
from psfleet.core.net.membership_messages import write_mode
from psfleet.core.net.v1 import frame_pb2, shard_pb2
from psfleet.core.net.v1.follower_pb2 import ChangesRequest
from psfleet.core.net.v1.frame_pb2 import OUTCOME_APPLIED, OUTCOME_HELD, OUTCOME_UNSPECIFIED, Header
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.coordinator.coordinator_messages import Outcome
from psfleet_server.coordinator.data_dispatch import DataDispatch
from psfleet_server.coordinator.request_files import ModeRequestFile, ScaleRequestFile
from psfleet_server.durability.log_shipping import LogShipping
from psfleet_server.durability.records import TORN_STEP, server_state
from psfleet_server.durability.recovery import Journal
from psfleet_server.durability.snapshot_writer import SnapshotWriter
from psfleet_server.engine.coordinator_replies import release
from psfleet_server.engine.follower_requests import Followers, SendChanges
from psfleet_server.engine.server_measurements import (
    CallBytes,
    CallLatencies,
    WorkerReports,
    log_view,
    table_status,
)
from psfleet_server.rpc.attached_memory import AttachedMemory
from psfleet_server.rpc.call_layout import PullResponse, lay_out
from psfleet_server.rpc.replies import (
    Deadlines,
    DeferredReply,
    explain,
    explain_refusals,
    explained,
)

if TYPE_CHECKING:
    from psfleet.core.base.observability.spans import Tracing

Reply = Instruction | SendChanges

OUTCOMES = {"applied": OUTCOME_APPLIED, "held": OUTCOME_HELD}


class ShardHost:
    """One shard, on server 0 the coordinator, and what waits for them.

    `lock` is held for each event. Tables are read outside it, so that pulls run beside pushes.

    Attributes:
        journal: Keeps what changes in the log; None: nothing is kept.
        feed: Brings what changes to the standby, if there is one.
        parts: Writer of this server's snapshot parts.
        latencies, bytes: Of the calls of the training.
        tracing: Makes the spans of pushes; None: they are not traced.
        worker_reports: On server 0, what workers have sent of theirs.
        tensor_endpoint: Port or path at which the methods of tensors are answered too.
        boot: Number of this process's start.
        followers: Requests of followers.
        mode_requests: Requests for another mode, from outside the job's scripts.
        scale_file, scale: Requests for another number of servers, and what carries them out.
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
        self.journal: Journal | None = None
        self.feed = LogShipping(CrashFaults.wanted())
        self.parts = SnapshotWriter(CrashFaults.wanted())
        self.tracing: Tracing | None = None
        self.latencies = CallLatencies()
        self.bytes = CallBytes()
        self.worker_reports = WorkerReports()
        self.boot = int.from_bytes(os.urandom(8), "little") | 1  # 0 is no process
        self.followers = Followers(shard, self.boot, lambda sha256: self.parts.files.get(sha256, 0))
        self.mode_requests = ModeRequestFile(None)
        self.scale_file = ScaleRequestFile(None)
        self.scale: Callable[[], None] = lambda: None
        self.poke: Callable[[], None] = lambda: None
        self.aim: Callable[[str], None] = lambda endpoint: None
        self.find: Callable[[Sequence[str]], None] = lambda endpoints: None
        self.members_changed: Callable[[], None] = lambda: None
        self._deadlines = deadlines

    @contextlib.contextmanager
    def mutating(self) -> Iterator[None]:
        """The lock; after it, what has changed meanwhile is durable and may be answered.

        With a standby that is: the standby has it too, so the reply holds whichever process survives.
        """
        with self.lock:
            yield
            log = None if self.journal is None else self.journal.log
            end = 0 if log is None else log.end
            feed, fed = self.feed, self.feed.end  # a move puts another one in its place
        if log is not None:
            log.reach("applied")
            log.settle(end)
            log.reach("settled")
        feed.settle(fed)

    def _changes(self) -> contextlib.AbstractContextManager[object]:
        """`mutating`, or the lock alone where that is all."""
        return self.lock if self.journal is None and not self.feed.enabled else self.mutating()

    def _handle(self, event: Event, call: Call) -> list[Reply]:
        """Let the shard take an event; what it wants kept is read as it is now.

        The traceback of an error holds frames, and with them the event and the memory that a worker
        shares in which its tensors lie. A frame that held the error too would keep all that until the
        garbage collector comes, so errors travel without.
        """
        cutting = self.shard.cuts.under_way
        try:
            instructions = self.shard.handle(event, call)
        except Exception as error:
            explain(error, self.shard.recent)
            raise
        if cutting is not None and self.shard.cuts.is_lost(cutting.number):
            self.parts.forget(cutting.number)
        replies: list[Reply] = []
        for instruction in instructions:
            if isinstance(instruction, WriteSnapshot):
                frozen = instruction.frozen
                self.parts.begin(frozen, server_state(frozen.state, self.coordinator))
                continue
            if isinstance(instruction, SendError):
                instruction.error.__traceback__ = None
                explain(instruction.error, self.shard.recent)
            replies.append(instruction)
        return replies + self.followers.due()

    def ask(self, event: Event) -> SendOutcome:
        """Take an event that is answered at once."""
        mine = self._ask(event)
        assert isinstance(mine, SendOutcome)
        return mine

    def _ask(self, event: Event) -> Reply:
        call = object()
        with self._changes():
            instructions = self._handle(event, call)
        mine = instructions[0]
        if len(instructions) > 1:
            [mine] = [i for i in instructions if i.call is call]
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
        outcome = self._ask(event)
        assert isinstance(outcome, SendReport)
        self.feed.settle(self.feed.confirm())
        return outcome.report

    def install(self, event: InstallView) -> None:
        """Continue with the new view; end the process if the view has no members."""
        before = {**self.shard.workers.incarnations}
        self.ask(event)
        log_view(before, event)
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
        if self.journal is not None:
            self.journal.log.reach(point)

    def submit(self, event: Event, reply: DeferredReply) -> None:
        """Take an event whose reply may have to wait."""
        if len(self._deadlines.live) >= self.limits.waiting_calls:
            self._check_waiting_calls()
        with self._changes():
            instructions = self._handle(event, reply)
        self._perform(instructions)
        if not reply.done:
            self._defer(reply)

    def _defer(self, reply: DeferredReply) -> None:
        """Let a reply wait for what other workers do."""
        reply.waited = self.latencies.waited
        reply.park(self._deadlines, lambda: self._expire(reply))

    def exchange(self, push: Push, pull: Pull, reply: DeferredReply) -> None:
        """Take a push, then the pull that came with it, whose reply may have to wait.

        Raises:
            ProtocolError: The mode has rounds, and the pull does not commit the push, or there are servers
                that may not hold it.
        """
        rounds = self.shard.consistency.declared.has_rounds
        # All that could be wrong with the pull, before the push is applied.
        if rounds and (self.shard.servers > 1 or pull.commit != push.sequence):
            raise ProtocolError(
                f"in mode {self.shard.mode!r} a pull cannot travel with the push before it unless one "
                "server has all and it commits that push; push first, then pull"
            )
        if pull.commit and not rounds:
            raise ProtocolError(
                f"the pull of an exchange commits round {pull.commit}; only sync mode has rounds"
            )
        if len(self._deadlines.live) >= self.limits.waiting_calls:
            self._check_waiting_calls()
        with self._changes():
            outcome, *instructions = self._handle(push, reply)
            if isinstance(outcome, SendOutcome):
                assert outcome.outcome is not None
                reply.outcome = OUTCOMES[outcome.outcome]
                instructions += self._handle(pull, reply)
            else:
                instructions.append(outcome)
        reply.measure(self.latencies.push)
        self._perform(instructions)
        if not reply.done:
            self._defer(reply)

    def _values(self, serve: SendValues, reply: DeferredReply) -> bytes:
        """The message with the current values of the reads, or with word that they are in place."""
        tables, view, response = self.shard.tables, self.shard.workers.view, reply.response
        if response is None:
            header = Header(outcome=reply.outcome, view=view)
            response = lay_out(header, serve.reads, tables.shape_of)
        tables.read_into(serve.reads, response.values)
        return self._finish(response, reply.outcome, view)

    def _finish(self, response: PullResponse, outcome: frame_pb2.Outcome, view: int) -> bytes:
        message = response.finish(outcome, view)
        self.bytes.values += response.size
        self.bytes.saved += response.saved
        if self.feed.enabled:
            self.settle_read()
        return message

    def read(self, reads: Sequence[Read]) -> bytes:
        """Answer a pull of a process without a seat, in sync mode with values of one round.

        It waits for no worker, and nothing remembers it.
        """
        has_rounds = self.shard.consistency.declared.has_rounds
        with self.mutating() if has_rounds else contextlib.nullcontext():
            tables = self.shard.tables
            header = Header(
                round=self.shard.rounds.closed if has_rounds else 0,
                steps=[tables[read.table].step for read in reads],
                view=self.shard.workers.view,
                servers=tables.servers,
            )
            response = lay_out(header, reads, tables.shape_of)
            tables.read_into(reads, response.values)
        return self._finish(response, OUTCOME_UNSPECIFIED, header.view)

    def follow(self, request: ChangesRequest, reply: DeferredReply) -> None:
        """Answer a follower, when the round is closed that it waits for or its time is over."""
        self._check_waiting_calls()
        with self.mutating():
            instructions = self.followers.ask(request, reply)
        self._perform(instructions)
        if not reply.done:
            seconds = request.milliseconds / 1e3
            reply.park(self._deadlines, lambda: self._lapse(reply), seconds)

    def _lapse(self, reply: DeferredReply) -> None:
        with self.mutating():
            instructions = self.followers.expire(reply)
        self._perform(instructions)

    def settle_read(self) -> None:
        """Return when what was read may be sent: it may be newer than what the call waited for."""
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
            self._check_waiting_calls(registers=registers)
        with self.mutating(), explained(coordinator.recent):
            outcomes = step(coordinator)
            explain_refusals(outcomes, coordinator.recent)
            busy, scales = coordinator.is_busy, coordinator.scaling.moving is not None
        release(outcomes, coordinator.scaling.endpoints)
        if busy:
            self.poke()
        if scales:
            self.scale()
        if reply is not None and not reply.done:
            reply.park(self._deadlines, lambda: self._expire_collective(coordinator, reply))

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
        """Defer a reply that another thread completes; `expired`: the error at its deadline."""
        if not reply.done:
            reply.park(self._deadlines, lambda: reply.fail(DeadlineExceeded(expired)))

    def _check_waiting_calls(self, *, registers: bool = False) -> None:
        registering = 0 if self.coordinator is None else self.coordinator.registering
        waiting = registering if registers else len(self._deadlines.live) - registering
        if waiting >= self.limits.waiting_calls:
            raise LimitExceeded(
                f"{waiting} calls wait at server {self.shard.index}, its limit is "
                f"{self.limits.waiting_calls}; raise waiting_calls in PSFLEET_LIMITS"
            )

    @property
    def waiting_calls(self) -> int:
        """Number of waiting calls."""
        return len(self._deadlines.live)

    def status(self) -> shard_pb2.StatusReply:
        """Counts for displays."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        with self.lock:
            shard, counters = self.shard, self.shard.counters
            dispatch = DataDispatch() if self.coordinator is None else self.coordinator.dispatch
            return shard_pb2.StatusReply(
                server=shard.index,
                servers=shard.servers,
                tables=[table_status(t) for t in shard.tables.values()],
                pushes=counters.pushes,
                repeats=counters.repeats,
                bytes_in=self.bytes.received,
                bytes_out=self.bytes.values,
                samples=counters.samples,
                losses=counters.losses,
                round=shard.rounds.closed,
                progress=shard.progress(),
                cpu_seconds=usage.ru_utime + usage.ru_stime,
                resident_bytes=resident(),
                workers=len(set(shard.workers.incarnations) - shard.rounds.left),
                pid=os.getpid(),
                staleness=shard.staleness.counts,
                leading_steps=shard.consistency.gate.leading_steps,
                mode=write_mode(shard.mode) if shard.mode else None,
                torn=map(TORN_STEP.write, dispatch.torn),
                samples_left=dispatch.samples_left(shard.rounds.closed),
                memory_used=shard.tables.budget.used,
            )

    def _expire(self, reply: DeferredReply) -> None:
        with self.lock:
            instructions = self._handle(Expire(), reply)
        self._perform(instructions)

    def _expire_collective(self, coordinator: Coordinator, reply: DeferredReply) -> None:
        with self.lock:
            outcomes = coordinator.expire(reply)
        release(outcomes, ())

    def _perform(self, instructions: Sequence[Reply]) -> None:
        for instruction in instructions:
            reply = instruction.call
            assert isinstance(reply, DeferredReply)
            match instruction:
                case SendValues():
                    try:
                        reply.complete(self._values(instruction, reply))
                    except PsfleetError as error:
                        reply.fail(error)
                case SendError():
                    reply.fail(instruction.error)
                case SendChanges():
                    reply.complete(instruction.changes)
                case SendOutcome() | SendReport():
                    raise AssertionError(f"{instruction} answers a call that waits for values")
