"""The arrays of one worker's pushes and pulls: lays them out and sends them as its stream decides."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import PsfleetError
from psfleet.platform.interrupts import deferred
from psfleet.runtime.completed import CompletedPull
from psfleet.runtime.finiteness import NonFiniteCheck, SkippedGradients, without_values
from psfleet.runtime.interface import Gradient, PendingPull, Read
from psfleet.runtime.validation import check_gradients
from psfleet.schema.table import TableSpec
from psfleet.strategy import WireSettings
from psfleet.wire.compression import GradientCompressor
from psfleet_worker.connection.call import Call
from psfleet_worker.connection.connection import FleetConnection
from psfleet_worker.connection.request import ServerRequest
from psfleet_worker.observability.hot_ids import HotIds
from psfleet_worker.session.instructions import (
    AwaitPushes,
    AwaitReads,
    Instruction,
    LayOutPush,
    Program,
    SendPull,
    SendPush,
)
from psfleet_worker.sharding.pull_splitting import DenseRead, RoutingPlans, SparseRead, deal_read
from psfleet_worker.sharding.push_splitting import add_gradients
from psfleet_worker.stream.pulls import FleetPull
from psfleet_worker.stream.pushes import FleetPush, PushQueue

__all__ = ["Transfers"]

Floats = NDArray[np.float32]
Dealt = Sequence[DenseRead | SparseRead]
Lay = Callable[[LayOutPush], list[ServerRequest]]

_LINGERS = 4 << 20  # bytes to a server; a larger push is not worth a copy for a call less


class Transfers:
    """An error of a push is raised by its ticket and by every later call: no push is skipped.

    Args:
        fleet: This worker's connection.
        spec_of: The definition of a table.
        wire: In which form gradients and values travel.

    Attributes:
        watch: Looks for values that are not finite.
        make_request: Makes the request to one server.
    """

    make_request: type[ServerRequest] = ServerRequest

    def __init__(
        self, fleet: FleetConnection, spec_of: Callable[[int], TableSpec], wire: WireSettings
    ) -> None:
        self._fleet = fleet
        self._stream = fleet.stream
        self._session = fleet.session
        self._spec_of = spec_of
        self._wire = wire
        self.watch = fleet.metrics.watch = NonFiniteCheck(fleet.worker)
        self._plans = RoutingPlans(len(fleet.clients))
        self._packer = fleet.metrics.packer = GradientCompressor(fleet.worker, wire.gradients)
        fleet.metrics.hot = HotIds(fleet.worker, self._newest)
        self._pushes = PushQueue(fleet.clients, fleet.lane_memory)
        self._ahead: FleetPull | None = None  # a pull that may be under way
        self._arrived: FleetPull | None = None  # the one before it, which may not be joined
        self._parcels: list[ServerRequest] = []  # of the push that is laid out

    def _newest(self) -> dict[str, NDArray[np.int64]]:
        return {self._spec_of(key).name: ids for key, ids in self._plans.newest().items()}

    def begin(self) -> None:
        """The connection's life has begun, or goes on in another mode."""
        self._packer.feeds = not self._session.declared.has_rounds

    # -- what a script asks for ------------------------------------------------------------------

    @deferred()
    def pull(self, reads: Sequence[Read]) -> list[Floats]:
        """See Runtime.pull. One call to each server that has a part in it."""
        self._fleet.clients[0].check_process()
        ticket: FleetPull = self.run(self._stream.pull(), dealt=self._deal(reads))
        return ticket.join()

    @deferred()
    def pull_ahead(self, reads: Sequence[Read]) -> PendingPull:
        """See Runtime.pull_ahead."""
        if not self._stream.reads_ahead:
            return CompletedPull(self.pull(reads))
        dealt = self._deal(reads)  # while the servers are at the one before
        ticket: FleetPull = self.run(self._stream.pull_ahead(), dealt=dealt)
        return ticket

    @deferred()
    def push(
        self,
        gradients: Sequence[Gradient],
        samples: int,
        loss: float | None,
        position: tuple[int, int],
    ) -> FleetPush:
        """See Runtime.push.

        position: How far the worker is with its data: leases used up, and samples of the next one.
        """
        said = {
            "samples": samples,
            "loss": loss,
            "leases": position[0],
            "lease_samples": position[1],
        }
        lay = functools.partial(self._laden, gradients, said)
        ticket: FleetPush = self.run(self._stream.push(), lay=lay)
        self._fleet.times.pushed(samples, loss)
        return ticket

    @deferred()
    def flush(self, timeout: float | None = None) -> None:
        """See Runtime.flush."""
        self.run(self._stream.flush(), timeout=timeout)

    def forget(self) -> None:
        """Tables are set: what earlier gradients have left over does not count any more."""
        self._packer.forget()

    def close(self) -> None:
        """Stop. What has not left is dropped. Safe to call twice."""
        self._pushes.close()

    # -- what the stream asks for ----------------------------------------------------------------

    def run(
        self,
        program: Program[Any],
        *,
        dealt: Dealt = (),
        lay: Lay | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Do what a program asks for, which may flush the stream.

        Args:
            program: Of the stream, or of one of the machines on top of it.
            dealt: What the caller reads.
            lay: Lays out the caller's gradients.
            timeout: Of each wait for other workers, in seconds.
        """

        times = self._fleet.times

        def perform(wanted: Instruction, timeout: float | None) -> Any:
            began, kind = time.perf_counter_ns(), "wait"
            try:
                match wanted:
                    case AwaitPushes():
                        if wanted.leaves:
                            self._pushes.send()
                        return self._pushes.settle(wanted.under_way, timeout)
                    case SendPull():
                        kind = "pull"
                        return self._read(wanted, dealt if wanted.own else (), timeout)
                    case LayOutPush():
                        kind = "push"
                        assert lay is not None
                        self._parcels = lay(wanted)
                        return [self._is_sent(parcel) for parcel in self._parcels]
                    case SendPush():
                        kind = "push"
                        return self._send(wanted)
                    case AwaitReads():
                        kind = "pull"
                        return self._land(wanted.joined)
                    case _:
                        return self._fleet.perform(wanted, timeout)
            finally:
                setattr(times, kind, getattr(times, kind) + time.perf_counter_ns() - began)

        return self._fleet.run(program, perform, timeout)

    def _is_sent(self, parcel: ServerRequest) -> bool:
        """Whether a push goes to a server: all do where pulls wait for other workers, and all to server 0."""
        waits = self._session.declared.pulls_wait
        return waits or parcel is self._parcels[0] or not parcel.is_empty

    def _land(self, joined: bool) -> int:
        """Let the answers of what was read ahead be here; whoever waits for them may join them later.

        At most one stays like this: the places of all others in memory are free to be dealt again.
        """
        self._fleet.clients[0].check_process()
        ahead, arrived, self._ahead, self._arrived = self._ahead, self._arrived, None, None
        if arrived is not None:
            arrived.join()
        if ahead is None:
            return 0
        ahead.arrive()
        if joined:
            ahead.join()
        else:
            self._arrived = ahead
        return ahead.view

    def _read(self, read: SendPull, dealt: Dealt, timeout: float | None) -> FleetPull:
        ticket = self._ask(dealt, read.commit, read.ahead, timeout)
        if read.ahead:
            self._ahead = ticket
        else:
            ticket.join()
        return ticket

    def _deal(self, reads: Sequence[Read]) -> list[DenseRead | SparseRead]:
        return [deal_read(self._spec_of(read.table), read, self._plans) for read in reads]

    def _ask(self, dealt: Dealt, commit: int, ahead: bool, timeout: float | None) -> FleetPull:
        with self._pushes.lock:
            ticket = self._pushes.take()
            for lane in self._fleet.lanes if ticket else ():
                lane.held()  # the push was laid out while a server was at work: look for memory now
            progress = self._session.progress.text() if commit else ""
            parcels = (
                ticket.parcels
                if ticket
                else self._empty(clock=self._session.clock, commit=commit, progress=progress)
            )
            asked = [deal.ask(parcels) for deal in dealt]
            calls = {
                server: self._call(server, parcel, ticket, ahead, timeout)
                for server, parcel in enumerate(parcels)
                if parcel.reads or commit or (ticket and ticket.goes_to[server])
            }
            if ticket:
                self._pushes.sent(
                    ticket, [call for server, call in calls.items() if ticket.goes_to[server]]
                )
        return FleetPull(calls, parcels, dealt, asked, self._spec_of)

    def _empty(self, **fields: Any) -> list[ServerRequest]:
        """An empty parcel for each server, with a header of these fields."""
        fleet, form = self._fleet, self._wire.values
        correction = fleet.correction
        if correction.damping or correction.compensation:
            fields["staleness_damping"] = correction.damping
            fields["delay_compensation"] = correction.compensation
        return [
            self.make_request(fleet.header(**fields), lane.held(), form) for lane in fleet.lanes
        ]

    def _call(
        self,
        server: int,
        parcel: ServerRequest,
        push: FleetPush | None,
        ahead: bool,
        timeout: float | None,
    ) -> Call:
        method = "Shard/Pull"
        if push is not None and push.goes_to[server]:
            method = "Shard/Exchange" if parcel.reads else "Shard/Push"
        seconds = self._fleet.patience.wait if timeout is None else timeout
        return self._fleet.clients[server].start(
            method,
            parcel.request(),
            cargo=parcel,
            seconds=seconds,
            small=parcel.is_small and not ahead,
        )

    def _laden(
        self, gradients: Sequence[Gradient], said: dict[str, Any], load: LayOutPush
    ) -> list[ServerRequest]:
        """A parcel for each server with its part of the gradients."""
        try:
            return self._laid_out(gradients, said, load)
        except SkippedGradients:
            nothing = {**said, "samples": 0, "loss": None}
            return self._laid_out([*map(self._skipped, gradients)], nothing, load)

    def _skipped(self, gradient: Gradient) -> Gradient:
        """What counts the step counts although its gradients do not."""
        counts = self._spec_of(gradient.table).rule.counts
        return gradient if counts else without_values(gradient)

    def _laid_out(
        self, gradients: Sequence[Gradient], said: dict[str, Any], load: LayOutPush
    ) -> list[ServerRequest]:
        checked = check_gradients(self._spec_of, gradients)
        # A push of deltas sums several steps, whose losses were looked at when they were made.
        loss = None if self._session.declared.adds_deltas else said["loss"]
        look = functools.partial(self.watch.look, load.sequence, loss)
        parcels = self._empty(
            sequence=load.sequence, clock=load.clock, progress=self._said_with_push(), **said
        )
        try:
            add_gradients(parcels, checked, self._plans, self._packer, look)
        except (PsfleetError, SkippedGradients):
            for parcel in parcels:
                parcel.close()
            raise
        return parcels

    def _said_with_push(self) -> str:
        """How far the script is; a round's commit says it for a held push. Merged pushes are no steps."""
        progress, mode = self._session.progress, self._session.declared
        return "" if mode.has_rounds else progress.text(1, repeats=not mode.merges_pushes)

    def _send(self, send: SendPush) -> FleetPush:
        parcels, self._parcels = self._parcels, []
        lingers, goes_to = send.lingers, []
        for server, parcel in enumerate(parcels):
            if skipped := send.skipped(server):
                parcel.say(skipped=skipped)
            if send.cut[0]:
                parcel.say(cut=send.cut[0], cut_after=send.cut[1])
            if parcel.is_inline and parcel.bytes > _LINGERS:
                lingers = False
            goes_to.append(send.goes_to(server))
        if send.skips:
            parcels[0].say_addressed(send.addressed)
        behind = self._ahead if send.behind else None
        return self._pushes.add(parcels, goes_to, linger=lingers, behind=behind)
