"""One worker's stream of pushes, and the pulls between them.

Sync mode: a push is held by every server; the next pull or flush commits it and waits for the round to
close. Every other mode: pushes leave in order, a few at a time; a pull comes after the pushes before it,
and takes the last one with it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import PsfleetError
from psfleet.platform.interrupts import deferred
from psfleet.runtime.finiteness import Watch
from psfleet.runtime.interface import Awaited, Gradient, Pulled, Read
from psfleet.runtime.validation import check_gradients
from psfleet.schema.table import TableSpec
from psfleet.strategy import Wire
from psfleet.wire.compression import Packer
from psfleet_worker.connection.connection import Connection
from psfleet_worker.connection.request import Parcel
from psfleet_worker.connection.server_client import Call
from psfleet_worker.sharding.pull_routing import DenseRead, Plans, SparseRead, deal_read
from psfleet_worker.sharding.push_routing import add_gradients
from psfleet_worker.stream.pulls import PullTicket
from psfleet_worker.stream.pushes import Pushes, PushTicket
from psfleet_worker.stream.snapshot_marks import Marks

__all__ = ["Stream"]

Floats = NDArray[np.float32]

_WINDOW = 4  # async mode: pushes under way at most
_LINGERS = 4 << 20  # bytes to a server; a larger push is not worth a copy for a call less


class Stream:
    """An error of a push is raised by its ticket and by every later call: no push is skipped.

    Args:
        fleet: This worker's connection.
        spec_of: The definition of a table.
        wire: In which form gradients and values travel.
        marks: Where snapshots cut this stream.

    Attributes:
        watch: Looks for values that are not finite.
    """

    def __init__(
        self, fleet: Connection, spec_of: Callable[[int], TableSpec], wire: Wire, marks: Marks
    ) -> None:
        self._fleet = fleet
        self._spec_of = spec_of
        self._wire = wire
        self._marks = marks
        self.watch = Watch(fleet.worker)
        self._plans = Plans(len(fleet.clients))
        self._packer = Packer(fleet.worker, wire.gradients)
        self._pushes = Pushes(fleet.clients)
        self._open = 0  # sync mode: the round that is pushed and not committed
        self._ahead: PullTicket | None = None  # a pull that may be under way
        self._overtaken = False  # and a push has been made after it
        self._arrived: PullTicket | None = None  # the one before it, which may not be joined

    def begin(self) -> None:
        """The connection's life has begun."""
        self._packer.feeds = self._fleet.mode != "sync"
        if self._fleet.mode == "sync":  # of a life that follows another, the round before its first
            self._open = self._fleet.sequence

    @deferred()
    def pull(self, reads: Sequence[Read]) -> list[Floats]:
        """See Runtime.pull. One call to each server that has a part in it."""
        return self._pull(reads, None)

    @property
    def reads_ahead(self) -> bool:
        """See ReadsAhead. In modes whose pulls wait for other workers nothing overtakes anything."""
        return self._fleet.mode == "async"

    @deferred()
    def pull_ahead(self, reads: Sequence[Read]) -> Awaited:
        """See ReadsAhead.pull_ahead."""
        if not self.reads_ahead:
            return Pulled(self.pull(reads))
        dealt = self._deal(reads)  # while the servers are at the one before
        self._answered()
        self._ahead, self._overtaken = self._ask(dealt, None), False
        return self._ahead

    def _answered(self) -> None:
        """Wait until prefetched pull responses have arrived; they are joined when they are used.

        At most one stays like this: the places of all others in memory are free to be dealt again.
        """
        ahead, arrived, self._ahead, self._arrived = self._ahead, self._arrived, None, None
        if arrived is not None:
            arrived.wait()
        if ahead is not None:
            ahead.arrive()
            self._fleet.view = max(self._fleet.view, ahead.view)
            self._arrived = ahead

    def _arrive(self) -> None:
        """Let all that was read ahead be here, and joined."""
        self._fleet.clients[0].check_process()
        for _ in range(2):
            self._answered()

    def _pull(self, reads: Sequence[Read], timeout: float | None) -> list[Floats]:
        self._arrive()
        if self._fleet.mode == "sync":  # a pull commits what every server holds
            self._pushes.settle()
        ticket = self._ask(self._deal(reads), timeout)
        joined = ticket.wait()
        self._fleet.view = max(self._fleet.view, ticket.view)
        self._open = 0
        self._pushes.settle()
        return joined

    def _deal(self, reads: Sequence[Read]) -> list[DenseRead | SparseRead]:
        return [deal_read(self._spec_of(read.table), read, self._plans) for read in reads]

    def _ask(self, dealt: Sequence[DenseRead | SparseRead], timeout: float | None) -> PullTicket:
        with self._pushes.lock:
            ticket = self._pushes.take()
            for lane in self._fleet.lanes if ticket else ():
                lane.held()  # the push was laid out while a server was at work: look for memory now
            progress = self._fleet.progress.text() if self._open else ""
            parcels = (
                ticket.parcels if ticket else self._parcels(commit=self._open, progress=progress)
            )
            asked = [deal.ask(parcels) for deal in dealt]
            calls = {
                server: self._call(server, parcel, ticket is not None, timeout)
                for server, parcel in enumerate(parcels)
                if parcel.reads or ticket or self._open
            }
            if ticket:
                self._pushes.sent(ticket, list(calls.values()))
        return PullTicket(calls, parcels, dealt, asked, self._spec_of)

    def _parcels(self, **fields: Any) -> list[Parcel]:
        """An empty parcel for each server, with a header of these fields."""
        fields.setdefault("clock", self._fleet.clock)
        correction = self._fleet.correction
        fields["staleness_damping"] = correction.damping
        fields["delay_compensation"] = correction.compensation
        form = self._wire.values
        return [
            Parcel(self._fleet.header(**fields), lane.held(), form) for lane in self._fleet.lanes
        ]

    def _call(self, server: int, parcel: Parcel, pushes: bool, timeout: float | None) -> Call:
        method = "Shard/Pull"
        if pushes:
            method = "Shard/Exchange" if parcel.reads else "Shard/Push"
        return self._fleet.clients[server].start(
            method, parcel.request(), cargo=parcel, seconds=self._seconds(timeout)
        )

    @deferred()
    def push(
        self,
        gradients: Sequence[Gradient],
        samples: int,
        loss: float | None,
        position: tuple[int, int],
    ) -> PushTicket:
        """See Runtime.push.

        position: How far the worker is with its data: leases used up, and samples of the next one.
        """
        if self._open:
            self.flush()
        if self._overtaken:
            self._arrive()
        self._overtaken = self._ahead is not None
        self._pushes.settle(_WINDOW - 1)
        sequence, clock = self._fleet.sequence + 1, self._fleet.clock + 1
        parcels = self._laden(
            gradients,
            sequence=sequence,
            clock=clock,
            samples=samples,
            loss=loss,
            leases=position[0],
            lease_samples=position[1],
            progress=self._said_with_push(),
        )
        cut = self._marks.begin(sequence)
        for parcel in parcels:
            parcel.say(**cut)
        ticket = self._pushes.add(parcels, linger=self._may_linger(parcels), behind=self._ahead)
        self._fleet.sequence, self._fleet.clock = sequence, clock
        self._fleet.progress.made()
        self._open = sequence if self._fleet.mode == "sync" else 0
        return ticket

    def _said_with_push(self) -> str:
        """How far the script is; sync mode says it with the commit. Merged pushes are no steps."""
        progress, mode = self._fleet.progress, self._fleet.mode
        return "" if mode == "sync" else progress.text(1, repeats=mode != "half-async")

    def _laden(self, gradients: Sequence[Gradient], **fields: Any) -> list[Parcel]:
        """A parcel for each server with its part of the gradients."""
        specs = [self._spec_of(gradient.table) for gradient in gradients]
        checked = check_gradients(specs, gradients)
        look = functools.partial(self.watch.look, fields["sequence"], fields["loss"])
        parcels = self._parcels(**fields)
        try:
            add_gradients(parcels, specs, checked, gradients, self._plans, self._packer, look)
        except PsfleetError:
            for parcel in parcels:
                parcel.close()
            raise
        return parcels

    def _may_linger(self, parcels: Sequence[Parcel]) -> bool:
        """Whether a push may wait a moment for the next pull."""
        return self._fleet.mode != "sync" and all(
            not parcel.is_inline or parcel.bytes <= _LINGERS for parcel in parcels
        )

    @deferred()
    def flush(self, timeout: float | None = None) -> None:
        """See Runtime.flush."""
        self._arrive()
        self._pushes.send()
        self._pushes.settle(timeout=timeout)
        if self._open:
            self._pull([], timeout)

    def change_mode(self) -> None:
        """The fleet goes on in another mode, with nothing under way."""
        self.forget()
        self._packer.feeds = self._fleet.mode != "sync"

    def forget(self) -> None:
        """Tables are set: what earlier gradients have left over does not count any more."""
        self._packer.forget()

    def close(self) -> None:
        """Stop. What has not left is dropped. Safe to call twice."""
        self._pushes.close()

    def _seconds(self, timeout: float | None) -> float:
        return self._fleet.patience.wait if timeout is None else timeout
