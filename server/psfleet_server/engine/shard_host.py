"""Runs one shard inside a server process: takes its lock, passes events to it, and performs its instructions.

`Shard` and `Coordinator` are pure state machines without threads, clocks or files. `ShardHost` is everything
around them. The service methods call it from any thread. It decides the order of events, waits for the log
and the standby, completes the replies of waiting calls, and reads values from the tables. Open this file to
see under which lock something happens, or when a change is durable.

Every call takes the same path:

    lock the shard -> the state machine processes the event, the journal logs it -> unlock
    -> wait until log and standby have it -> complete replies: this call's, and those of calls it unblocked

The wait is outside the lock, so that other calls can change the shard meanwhile and share one sync of the
disk. No reply may be sent before the wait: a client that has seen the reply relies on the change, even if
this process dies in the next moment.
"""

import contextlib
import os
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from psfleet.core.base import crash_points
from psfleet.core.base.errors import DeadlineExceeded, LimitExceeded, ProtocolError
from psfleet.core.base.memory import resident
from psfleet.core.base.settings.declared_settings import ServerLimits
from psfleet.core.engine.runtime_interface import Read
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
from psfleet_server.durability.journal import Journal
from psfleet_server.durability.log_shipping import LogShipping
from psfleet_server.durability.records import server_state
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
    as_psfleet_error,
    explain,
    explain_refusals,
    explained,
)

if TYPE_CHECKING:
    from psfleet.core.base.observability.tracing import Tracing

Reply = Instruction | SendChanges

OUTCOMES = {"applied": OUTCOME_APPLIED, "held": OUTCOME_HELD}


class ShardHost:
    """Host of one shard, of the coordinator on server 0, and of the calls that wait for either.

    `lock` guards the shard and the coordinator; it is held for each event. Each table has its own lock and is
    read without `lock`, so that pulls run in parallel with pushes.

    Args:
        shard: State machine of this server's part of the tables.
        coordinator: State machine of the fleet, or None on all servers but server 0.
        deadlines: Thread that expires waiting calls.
        limits: Limits on calls, tables and memory, or None for the defaults.

    Attributes:
        ended: Event that is set once every worker has left.
        lanes: Shared memories of the workers on this host.
        journal: Writes changes to the log, or None if this job has no log.
        feed: Sends the log's records to the standby, if there is one.
        parts: Writes this server's files of snapshots.
        latencies: Durations of pushes, pulls and other calls of workers.
        bytes: Traffic of these calls and of their replies.
        tracing: Records spans of pushes, or None if they are not traced.
        worker_reports: Metrics and NaN reports of workers (server 0 only).
        boot: Random number that identifies this process. A change of the number shows that a server was
            restarted.
        followers: Waiting requests of followers (processes that keep a copy of the weights).
        mode_requests: Requests of `psfleet mode` for another mode.
        scale_file: Requests for another number of servers.
        scale: Called when a change of the number of servers can continue.
        poke: Called when the coordinator may have a message for the servers.
        aim: Called with the endpoint of the coordinator.
        find: Called with the endpoints of all servers, as a worker knows them.
        members_changed: Called when a worker may have left, or when a process sends its first heartbeat.
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
        self.journal: Journal | None = None
        self.feed = LogShipping()
        self.tracing: Tracing | None = None
        self.latencies = CallLatencies()
        self.bytes = CallBytes()
        self.parts = SnapshotWriter(lambda: self.bytes.received)
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
        """Hold the lock for a `with` block, then wait until the block's changes are durable.

        After the block, replies that depend on its changes may be sent. Durable means in the log and, if
        there is a standby, on the standby too, so that a reply stays true whichever of the two processes
        survives.
        """
        with self.lock:
            yield
            # Read the end positions under the lock: they include all changes of the block. A move of rows
            # replaces log and feed, so the wait below must use the objects that received these changes.
            log = None if self.journal is None else self.journal.log
            end = 0 if log is None else log.end
            feed, fed = self.feed, self.feed.end
        if log is not None:
            crash_points.reach("applied")
            log.settle(end)
            crash_points.reach("settled")
        feed.settle(fed)

    def _changes(self) -> contextlib.AbstractContextManager[object]:
        """Return `mutating()`, or only the lock if there is neither a log nor a standby to wait for."""
        return self.lock if self.journal is None and not self.feed.enabled else self.mutating()

    def _handle(self, event: Event, call: Call) -> list[Reply]:
        """Let the shard process an event, and return its replies. The caller holds the lock.

        If the shard requests a snapshot, it begins here, still under the lock, so that the snapshot gets the
        coordinator's state of the same moment.

        Errors lose their traceback. A traceback references frames, which reference the event and so a
        worker's shared memory. If one of those frames also referenced the error, the cycle would keep that
        memory mapped until the garbage collector runs.
        """
        cutting = self.shard.cuts.under_way
        try:
            instructions = self.shard.handle(event, call)
        except Exception as error:
            explain(error, self.shard.recent)
            refusal = SendError(call, as_psfleet_error(error))
            instructions = [refusal, *self.shard.refuse_if_torn()]
        if cutting is not None and self.shard.cuts.is_lost(cutting.number):
            self.parts.forget(cutting.number, self.shard.cuts.failure)
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
        """Process an event that has its outcome at once, such as a push, and return the outcome.

        Raises:
            PsfleetError: The shard refuses the event.
        """
        instruction = self._ask(event)
        assert isinstance(instruction, SendOutcome)
        return instruction

    def _ask(self, event: Event) -> Reply:
        # A unique marker distinguishes this event's reply from the replies of waiting calls that the event
        # unblocks.
        call = object()
        with self._changes():
            instructions = self._handle(event, call)
        instruction = instructions[0]
        if len(instructions) > 1:
            [instruction] = [i for i in instructions if i.call is call]
            self._perform([i for i in instructions if i.call is not call])
        if not isinstance(instruction, SendError):
            return instruction
        error = instruction.error
        del instruction, instructions  # no cycle of error, traceback and frame: see _handle
        try:
            raise error
        finally:
            del error

    def freeze(self, event: PrepareView) -> ViewReport:
        """Stop closing rounds for a new view (membership), and report which pushes this server has so far.

        A snapshot under way is given up. If a standby has taken over, this process ends before it reports.
        """
        outcome = self._ask(event)
        assert isinstance(outcome, SendReport)
        # The coordinator decides the new view from this report, so the report must not come from a server
        # that was replaced. The standby confirms that it still follows. If it has taken over instead, this
        # process ends here.
        self.feed.settle(self.feed.confirm())
        return outcome.report

    def install(self, event: InstallView) -> None:
        """Continue with the new view (numbered membership), or end the process if the view has no members."""
        before = {**self.shard.workers.incarnations}
        self.ask(event)
        log_view(before, event)
        self.end_if_over()

    def end_if_over(self) -> None:
        """Note that a worker may have left. Once every worker has left, the process ends."""
        self.members_changed()
        with self.lock:
            over = self.shard.rounds.is_over()
        if over:
            self.ended.set()

    def submit(self, event: Event, reply: DeferredReply) -> None:
        """Process an event whose reply may have to wait, such as a pull.

        Raises:
            LimitExceeded: Too many calls wait already.
        """
        # The cheap part of the check, in every call. `_check_waiting_calls` then excludes registrations from
        # the count.
        if len(self._deadlines.live) >= self.limits.waiting_calls:
            self._check_waiting_calls()
        with self._changes():
            instructions = self._handle(event, reply)
        self._perform(instructions)
        if not reply.done:
            self._defer(reply)

    def _defer(self, reply: DeferredReply) -> None:
        """Let a reply wait for other workers, at most until the call's deadline."""
        reply.waited = self.latencies.waited
        reply.park(self._deadlines, lambda: self._expire(reply))

    def exchange(self, push: Push, pull: Pull, reply: DeferredReply) -> None:
        """Process a push, and then the pull that came in the same message. The pull's reply may have to wait.

        In a mode with rounds this is allowed with a single server only. A pull commits the round (allows
        the servers to close it). With several servers, the worker must know before that all servers have
        its push.

        Raises:
            LimitExceeded: Too many calls wait already.
            ProtocolError: The mode has rounds, and either there are several servers or the pull does not
                commit this push. Or the mode has no rounds, but the pull commits one.
        """
        rounds = self.shard.consistency.declared.has_rounds
        # Check everything that can be invalid about the pull before the push takes effect: an error must mean
        # that nothing has changed.
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
        reply.measure(self.latencies.push)  # the push ends here; the rest of the time is the pull's
        self._perform(instructions)
        if not reply.done:
            self._defer(reply)

    def _values(self, serve: SendValues, reply: DeferredReply) -> bytes:
        """Read the tables for a pull and return the message to send.

        The message contains the values, or says that they are in shared memory. Values are read without the
        lock, so they may be newer than the push or round that the pull waited for.
        """
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
        """Return the reply to a pull of a process that is not a worker, such as a reader.

        The pull does not wait for workers, and the shard does not record the process. In sync mode all values
        belong to the same round, because the lock keeps rounds from closing while the tables are read.
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
        """Reply to a follower's request for changes when its round has closed or its time is over."""
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
        """Wait until the standby has everything that values just read may contain.

        Reads take no lock and may see a push that the standby does not have yet. If this process died then,
        the standby would take over with older values than a client has seen.
        """
        self.feed.settle(self.feed.end)

    def meet(
        self,
        step: Callable[[Coordinator], Sequence[Outcome]],
        reply: DeferredReply | None = None,
        *,
        registers: bool = False,
    ) -> None:
        """Let the coordinator take a step, and defer `reply` unless the step completes it.

        Args:
            step: Calls one method of the coordinator and returns the outcomes.
            reply: Reply of the call that takes the step, or None if the call does not wait.
            registers: True for the registration of a worker. Registrations have a separate waiting limit, so
                that workers waiting for a new member cannot block it from joining.

        Raises:
            LimitExceeded: Too many calls wait already.
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
        """Repeat decisions of the coordinator that had to wait because the disk of the log was full.

        Raises:
            NoRoom: The disk is still full.
        """
        if self.shard.waits_for_room:
            self.ask(RetryRoom())
        if self.coordinator is not None and self.coordinator.waits_for_room:
            self.meet(lambda c: c.retry())

    def park(self, reply: DeferredReply, expired: str) -> None:
        """Defer a reply that another thread will complete.

        At the call's deadline it fails with the text `expired`.
        """
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
        """Number of calls whose replies are deferred."""
        return len(self._deadlines.live)

    def status(self) -> shard_pb2.StatusReply:
        """Return this server's counters, its tables and the progress of training, for status displays."""
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
                torn=[
                    shard_pb2.TornStep(
                        worker=step.worker, incarnation=step.incarnation, sequences=step.sequences
                    )
                    for step in dispatch.torn
                ],
                samples_left=dispatch.samples_left(shard.rounds.closed),
                memory_used=shard.tables.budget.used,
            )

    # The two methods below run in the thread of `Deadlines`. They change nothing durable, so they take only
    # the lock.

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
            # An error must not leave this reply, or those after it, without an end: their calls may be those
            # of other workers.
            try:
                match instruction:
                    case SendValues():
                        reply.complete(self._values(instruction, reply))
                    case SendError():
                        reply.fail(instruction.error)
                    case SendChanges():
                        reply.complete(instruction.changes)
                    case SendOutcome() | SendReport():
                        raise AssertionError(f"{instruction} answers a call that waits for values")
            except Exception as error:
                reply.fail(as_psfleet_error(error))
