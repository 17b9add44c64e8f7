"""Pushes and pulls of one worker: splits arrays among servers, sends the calls and joins the replies.

The protocol and the arrays are kept apart. `Stream` (psfleet_worker.session.worker_session) is a pure state
machine that decides when a push may be sent and what a pull must wait for; it never sees an array. Each
public method here starts one of its programs, and `Transfers.run` executes the instructions that it yields. A
push in async mode, for example:

    push(gradients) -> stream.push() yields AwaitPushes   -> wait until fewer than WINDOW are under way
                                     yields LayOutPush    -> one request per server, filled with gradients
                                     yields SendPush      -> PushQueue.add, which returns the ticket

One thread calls `pull`, `pull_ahead`, `push` and `flush`. The thread of `PushQueue` only sends requests that
are laid out. Snapshot marks run in another thread (`fleet.lock` guards the state machines). An interrupt
(Ctrl-C) is delayed while a call is half laid out (`deferred`).
"""

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import PsfleetError
from psfleet.core.base.threads import deferred
from psfleet.core.engine.gradient_checks import check_gradients
from psfleet.core.engine.gradients import without_values
from psfleet.core.engine.non_finite_check import NonFiniteCheck, SkippedGradients
from psfleet.core.engine.runtime_interface import CompletedPull, Gradient, PendingPull, Read
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.net.gradient_compressor import GradientCompressor
from psfleet.core.net.v1.frame_pb2 import Header
from psfleet.core.runtime.strategy import WireSettings
from psfleet_worker.connection.connection import FleetConnection
from psfleet_worker.connection.request import ServerRequest
from psfleet_worker.session.instructions import (
    AwaitPushes,
    AwaitReads,
    LayOutPush,
    Program,
    SendPull,
    SendPush,
)
from psfleet_worker.tensors.push_queue import FleetPull, FleetPush, PushQueue
from psfleet_worker.tensors.splitting import (
    SPLIT_READS,
    DenseRead,
    RoutingPlans,
    SparseRead,
    add_gradients,
)
from psfleet_worker.worker_metrics import HotIds

if TYPE_CHECKING:
    from psfleet_worker.tensors.push_trace import PushTrace

Floats = NDArray[np.float32]
SplitReads = Sequence[DenseRead | SparseRead]
Lay = Callable[[LayOutPush], Sequence[ServerRequest]]

# Bytes to one server above which a push without shared memory does not wait for a pull. To wait, it has to
# copy the caller's dense gradients, and copying more than this costs more than the saved call.
_LINGERS = 4 << 20


class Transfers:
    """Pushes and pulls of one worker.

    A push that fails raises from its handle and from every later call, because no push may be skipped. A push
    that a server refuses (for example because its memory is full) raises once; later pushes continue.

    Args:
        fleet: Connection to all servers, with the worker's session and stream.
        spec_of: Returns a table's definition for its key.
        wire: Formats in which gradients and values are sent.
        begin_trace: Begins the spans of a push, or None if pushes are not traced.

    Attributes:
        watch: Checks losses and gradients for infinities and NaN, and decides which steps to skip.
    """

    def __init__(
        self,
        fleet: FleetConnection,
        spec_of: Callable[[int], TableSpec],
        wire: WireSettings,
        begin_trace: "Callable[[], PushTrace] | None" = None,
    ) -> None:
        self._fleet = fleet
        self._stream = fleet.stream
        self._session = fleet.session
        self._spec_of = spec_of
        self._form = wire.values  # format of pulled values
        self.watch = fleet.metrics.watch = NonFiniteCheck(fleet.worker)
        self._plans = RoutingPlans(len(fleet.clients))
        self._compressor = fleet.metrics.compressor = GradientCompressor(
            fleet.worker, wire.gradients
        )
        fleet.metrics.hot = HotIds(fleet.worker, self._newest)
        self._pushes = PushQueue(fleet.clients, fleet.lane_memory)
        self._ahead: FleetPull | None = None  # newest prefetched pull, perhaps under way
        self._arrived: FleetPull | None = None  # the one before, perhaps not joined
        # The push between LayOutPush and SendPush: its requests, the servers it goes to, its trace.
        self._requests: Sequence[ServerRequest] = ()
        self._goes_to: list[bool] = []
        self._begin_trace = begin_trace
        self._trace: PushTrace | None = None
        fleet.on_move.append(self._reroute)

    def _reroute(self) -> None:
        self._plans = RoutingPlans(len(self._fleet.clients))

    def _newest(self) -> dict[str, NDArray[np.int64]]:
        return {self._spec_of(key).name: ids for key, ids in self._plans.newest().items()}

    def begin(self) -> None:
        """Adopt the session's consistency mode. Call it when the process joins and after each mode switch."""
        # In modes with rounds a push must be bit-identical when it is repeated, so it must not depend on
        # errors that this process has kept.
        self._compressor.feeds = not self._session.declared.has_rounds

    @deferred()
    def pull(self, reads: Sequence[Read]) -> list[Floats]:
        """Pull values, one array per read. Makes one call to each server that has a part in the pull."""
        split_reads = self._split_reads(reads)
        ticket: FleetPull = self.run(self._stream.pull(), split_reads=split_reads)
        assert ticket.joined is not None
        return ticket.joined

    @deferred()
    def pull_ahead(self, reads: Sequence[Read]) -> PendingPull:
        """Start a pull without waiting for it.

        If pulls wait for other workers in the present mode, the returned pull is already complete.
        """
        if not self._stream.reads_ahead:
            return CompletedPull(self.pull(reads))
        # Before `run`, which may wait for the previous prefetch: the ids are routed while servers work on it.
        split_reads = self._split_reads(reads)
        ticket: FleetPull = self.run(self._stream.pull_ahead(), split_reads=split_reads)
        return ticket

    @deferred()
    def push(
        self,
        gradients: Sequence[Gradient],
        samples: int,
        loss: float | None,
        position: tuple[int, int],
    ) -> FleetPush:
        """Push the gradients of one step. Returns a handle before the servers have replied.

        Args:
            gradients: Gradients of the step, at most one per table.
            samples: Number of samples of the step.
            loss: Loss of the step, or None if it has none.
            position: Position of the worker in its data as a pair: the number of leases (ranges of samples
                from server 0) that are used up, and the number of samples used of the next lease.
        """
        fields = {
            "samples": samples,
            "loss": loss,
            "leases": position[0],
            "lease_samples": position[1],
        }
        lay = functools.partial(self._lay_out, gradients, fields)
        trace = self._trace = None if self._begin_trace is None else self._begin_trace()
        try:
            ticket: FleetPush = self.run(self._stream.push(), lay=lay)
        except BaseException as error:
            if trace is not None:
                trace.fail(error)
            raise
        self._fleet.times.pushed(samples, loss)
        return ticket

    @deferred()
    def flush(self, timeout: float | None = None) -> None:
        """Wait until all pushes are applied."""
        self.run(self._stream.flush(), timeout=timeout)

    def forget(self) -> None:
        """Drop the compression errors that were kept for later gradients, because tables were overwritten."""
        self._compressor.forget()

    def close(self) -> None:
        """Stop the queue. A push that is not sent is dropped. Safe to call twice."""
        self._pushes.close()

    def run(
        self,
        program: Program[Any],
        *,
        split_reads: SplitReads = (),
        lay: Lay | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Execute the instructions that a program yields, and return the program's result.

        Args:
            program: Program (a generator of instructions) of the stream of pushes and pulls, or of a state
                machine that uses the stream.
            split_reads: The caller's reads, for a program that pulls.
            lay: Lays out the caller's gradients, for a program that pushes.
            timeout: Time limit of each wait for other workers in seconds, or None for the usual limit.

        Raises:
            UsageError: This process is a fork of the process that has connected. Nothing was sent.
        """
        fleet, times = self._fleet, self._fleet.times
        outcome: Any = None
        # Compared here, because each push and pull comes by: the check would take two more function calls.
        if os.getpid() != fleet.process:
            fleet.clients[0].check_process()
        while True:
            try:
                # The thread that marks snapshots advances programs of the same session. Only the state
                # machine runs under the lock, never a call, so that this thread does not have to wait for
                # servers.
                with fleet.lock:
                    instruction = program.send(outcome)
            except StopIteration as end:
                return end.value
            began, kind = time.perf_counter_ns(), "wait"
            try:
                match instruction:
                    case SendPull():
                        kind = "pull"
                        outcome = self._read(
                            instruction, split_reads if instruction.own else (), timeout
                        )
                    case AwaitPushes():
                        if instruction.leaves:
                            self._pushes.send()
                        self._pushes.settle(instruction.under_way, timeout)
                        outcome = None
                    case LayOutPush():
                        kind = "push"
                        assert lay is not None
                        outcome = self._goes_to = self._receivers(lay(instruction))
                    case SendPush():
                        kind = "push"
                        outcome = self._send(instruction)
                    case AwaitReads():
                        kind = "pull"
                        outcome = self._land(instruction.joined)
                    case _:
                        outcome = fleet.perform(instruction, timeout)
            finally:
                setattr(times, kind, getattr(times, kind) + time.perf_counter_ns() - began)

    def _receivers(self, requests: Sequence[ServerRequest]) -> list[bool]:
        """Keep the requests of a push, and return for each server whether the push is sent there.

        A server without a part of the push is left out, except server 0, which counts every push. In modes
        whose pulls wait for other workers, all servers get every push, because each server decides what a
        pull waits for.
        """
        self._requests, waits = requests, self._session.declared.pulls_wait
        goes_to: list[bool] = []
        for request in requests:
            goes_to.append(waits or not goes_to or not request.is_empty)
        return goes_to

    def _land(self, joined: bool) -> int:
        """Wait for the replies of prefetched pulls. Returns the newest view (membership) number, or 0.

        A reply stays in shared memory until its pull is joined. At most the newest reply stays there, so that
        prefetching needs the memory of two steps at most.

        Args:
            joined: True to join the newest pull too, so that no reply is left in shared memory.
        """
        # Forgotten first: an error of a prefetched pull is raised here once, and later calls continue. The
        # pull's handle raises it again.
        ahead, before, self._ahead, self._arrived = self._ahead, self._arrived, None, None
        if before is not None:
            before.join()
        if ahead is None:
            return 0
        ahead.arrive()
        if joined:
            ahead.join()
        else:
            self._arrived = ahead
        return ahead.view

    def _split_reads(self, reads: Sequence[Read]) -> list[DenseRead | SparseRead]:
        split_reads: list[DenseRead | SparseRead] = []
        for read in reads:
            spec = self._spec_of(read.table)
            split_reads.append(SPLIT_READS[spec.kind](spec, read, self._plans))
        return split_reads

    def _read(self, read: SendPull, split_reads: SplitReads, timeout: float | None) -> FleetPull:
        """Send a pull, together with the waiting push if there is one.

        Copies the values into arrays, unless the pull is prefetched.
        """
        fleet, pushes = self._fleet, self._pushes
        seconds = fleet.patience.wait if timeout is None else timeout
        # Under the lock, so that the queue's thread cannot send another push between `take` and `sent`.
        with pushes.lock:
            ticket = pushes.take()
            progress = self._session.progress.text() if read.commit else ""
            if ticket is None:
                requests = self._empty(
                    clock=self._session.clock, commit=read.commit, progress=progress
                )
            else:
                requests = ticket.requests
                # With rounds a push waits only if there is one server, so no other request needs the commit.
                if read.commit:
                    requests[0].say(commit=read.commit, progress=progress)
                # New shared memory is offered only to a server without open calls. If there were open calls
                # when the push was laid out, the push found no memory: try again for the next step.
                for lane in fleet.lanes:
                    lane.held()
            masks = []
            for part in split_reads:
                masks.append(part.ask(requests))
            servers = []
            for server, request in enumerate(requests):
                carries = ticket is not None and ticket.goes_to[server]
                if request.reads or read.commit or carries:
                    method = "Shard/Pull"
                    if carries:
                        is_exchange = request.reads or read.commit
                        method = "Shard/Exchange" if is_exchange else "Shard/Push"
                    fleet.clients[server].send(request, method, seconds, ahead=read.ahead)
                    servers.append(server)
            if ticket is not None:
                pushes.sent(ticket)
        pull = FleetPull(requests, servers, split_reads, masks, self._spec_of, pushes.settle)
        if read.ahead:
            self._ahead = pull
        else:
            pull.join()
        return pull

    def _empty(self, **fields: Any) -> Sequence[ServerRequest]:
        """Return an empty request for each server, with a header of these fields."""
        fleet, requests = self._fleet, []
        for lane in fleet.lanes:
            header = Header(worker=fleet.worker, incarnation=fleet.session.incarnation, **fields)
            requests.append(ServerRequest(header, lane.held(), self._form))
        return requests

    def _skipped(self, gradient: Gradient) -> Gradient:
        """Return the part of a gradient that a skipped step still pushes: finite counts, but no values."""
        counts = self._spec_of(gradient.table).rule.counts
        is_kept = counts and bool(np.isfinite(gradient.values).all())
        return gradient if is_kept else without_values(gradient)

    def _lay_out(
        self, gradients: Sequence[Gradient], fields: dict[str, Any], load: LayOutPush
    ) -> Sequence[ServerRequest]:
        """Return a request for each server with its part of the gradients.

        If the check of the gradients skips the step, the push has no values. It is still sent: every push
        must have the next number, and other workers may wait for it.
        """
        parts = check_gradients(self._spec_of, gradients)
        # A push of deltas sums several steps. Their losses were checked in these steps.
        session = self._session
        mode, is_step = session.declared, not session.declared.adds_deltas
        loss = fields["loss"] if is_step else None
        check = functools.partial(self.watch.check_push, load.sequence, loss, is_step=is_step)
        # The script's position is sent with the change that makes it valid: in modes with rounds that is the
        # commit (see `_read`), otherwise the push itself.
        progress = ""
        # A restarted process may merge its steps into other pushes than these, so it does not repeat them.
        if not mode.has_rounds:
            progress = session.progress.text(1, repeats=not mode.merges_pushes)
        requests = self._empty(
            sequence=load.sequence, clock=load.clock, progress=progress, **fields
        )
        try:
            add_gradients(requests, parts, self._plans, self._compressor, check)
        except (PsfleetError, SkippedGradients) as error:
            for request in requests:  # their shared memory is free again, as they were not sent
                request.close()
            if isinstance(error, PsfleetError):
                raise
            # No loss, because the check would refuse it again. No samples, because the step trains on none.
            nothing = {**fields, "samples": 0, "loss": None}
            return self._lay_out([*map(self._skipped, gradients)], nothing, load)
        if self._trace is not None:
            self._trace.describe(load.sequence, fields["samples"])
        return requests

    def _send(self, send: SendPush) -> FleetPush:
        """Complete the headers of the push that is laid out, and hand it to the queue."""
        requests, self._requests = self._requests, ()
        lingers, goes_to = send.lingers, self._goes_to
        for server, request in enumerate(requests):
            # Rule R19: otherwise a push that was lost would look like one that was not sent to this server.
            if send.before[server] != send.sequence - 1:
                request.say(skipped=send.skipped(server))
            if send.cut[0]:
                request.say(cut=send.cut[0], cut_after=send.cut[1])
            if request.is_inline and request.bytes > _LINGERS:  # see _LINGERS
                lingers = False
            # Requests to other servers may later carry reads of a pull, which are not part of this trace.
            if goes_to[server]:
                request.trace = self._trace
        # Only server 0 learns this, for the case that the worker dies between two servers (see `Stream`).
        if not all(goes_to):
            requests[0].say_addressed(send.addressed)
        if self._trace is not None:
            self._trace.calls = sum(goes_to)
        behind = self._ahead if send.behind else None
        return self._pushes.add(
            requests, goes_to, linger=lingers, is_held=send.is_held, behind=behind
        )
