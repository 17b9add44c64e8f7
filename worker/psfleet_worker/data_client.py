"""The data that the fleet hands out, as one worker takes it step by step.

In sync mode every worker works out its part of each round from the plan; in the others the first stage of a
worker takes leases and tells its other stages. A change between both may fall within a dataset: what is
not used of it is then dealt anew, and every worker goes on in the new way.
"""

import itertools
import time
from collections.abc import Generator, Iterator
from typing import Protocol

import numpy as np

from psfleet.data.assignment import Plan, Range, length, part
from psfleet.errors import UsageError
from psfleet.stages.links import here, links
from psfleet.wire.membership_messages import read_plan, read_ranges
from psfleet.wire.v1 import membership_pb2
from psfleet_worker.connection.connection import Connection
from psfleet_worker.connection.server_client import wait_all

__all__ = ["Shares", "Trainer"]

_PAUSE = 0.05  # seconds between questions while others still have leases
_SKIP = ((-1, -1),)  # told to other stages in place of samples: a step without any

Ranges = tuple[Range, ...]
Steps = Generator[Ranges, None, bool]
"""Of one way to deal; at its end whether the mode has changed and another one is to go on."""


class Trainer(Protocol):
    """What data dispatch needs of the runtime that pushes."""

    def skip(self) -> None:
        """A step without gradients."""

    def flush(self) -> None:
        """Wait until every push is applied."""


class Shares:
    """Datasets of one life of a worker.

    Attributes:
        position: What the next push tells servers: leases used up, and samples of the next one.
        coming: Positions of the step after the present one, if the worker has them already.
    """

    def __init__(self, fleet: Connection) -> None:
        self.position: tuple[int, int] | None = None
        self.coming: Ranges = ()
        self._fleet = fleet
        self._count = 0
        self._leases = 0
        self._used = 0
        self._handed = 0
        self._tags = itertools.count()

    @property
    def reached(self) -> tuple[int, int]:
        """Leases used up, and samples of the next one that are handed out; all are pushed."""
        return self._leases, self._handed

    def steps(
        self, trainer: Trainer, size: int, batch: int, epochs: int, seed: int, merged: int
    ) -> Iterator[Ranges]:
        """The positions of each step's samples; see Runtime.shares."""
        self._count += 1
        order = membership_pb2.DealRequest(
            worker=self._fleet.worker,
            incarnation=self._fleet.incarnation,
            dataset=self._count,
            size=size,
            batch=batch,
            epochs=epochs,
            seed=seed,
            group=here().processes,
        )
        self._tags = itertools.count()
        return self._alternating(trainer, order, merged)

    def _alternating(
        self, trainer: Trainer, order: membership_pb2.DealRequest, merged: int
    ) -> Iterator[Ranges]:
        batch, goes_on = order.batch, True
        while goes_on:
            self.coming = ()
            order.batch = batch * merged if self._is_sync else batch
            goes_on = yield from self._one_way(trainer, order, merged)

    def _one_way(self, trainer: Trainer, order: membership_pb2.DealRequest, merged: int) -> Steps:
        if self._is_sync:
            return self._in_rounds(trainer, order, merged)
        if here().process:
            return self._told(trainer)
        return self._leased(trainer, order)

    @property
    def _is_sync(self) -> bool:
        return self._fleet.mode == "sync"

    def _ask(self, order: membership_pb2.DealRequest) -> membership_pb2.DealReply:
        call = self._fleet.clients[0].start("Coordinator/Deal", order.SerializeToString())
        return membership_pb2.DealReply.FromString(wait_all([call])[0])

    # -- sync ----------------------------------------------------------------------------------

    def _in_rounds(self, trainer: Trainer, order: membership_pb2.DealRequest, merged: int) -> Steps:
        fleet, turns = self._fleet, self._fleet.turns
        trainer.flush()  # what is planned for the next round is final from here on
        plan, known = self._plan(order)
        if not plan.entries:  # it was leased, in another mode, and is over
            return False
        begin = plan.entries[0].first
        if fleet.sequence + 1 != begin and fleet.first <= begin:
            raise UsageError(
                f"dataset {order.dataset} begins in round {begin} for others, here in round "
                f"{fleet.sequence + 1}; all workers must make the same steps between datasets"
            )
        while True:
            number = fleet.sequence + 1
            if fleet.view > known:
                plan, known = self._plan(order)
            if number > plan.last():
                trainer.flush()
                if fleet.view > known:
                    continue
                return False
            fleet.progress.catch_up()  # what is planned from here on has not been pushed
            # All stages of a worker use what its first one has.
            for ranges in _parts(plan.share(fleet.worker - here().process, number), merged):
                yield ranges
                if fleet.turns != turns:
                    return True
            if self._made(number) == 0:
                trainer.skip()

    def _plan(self, order: membership_pb2.DealRequest) -> tuple[Plan, int]:
        order.round = self._fleet.sequence + 1
        reply = self._ask(order)
        return read_plan(order.size, order.batch, reply.plan), reply.view

    def _made(self, number: int) -> int:
        """Pushes since round `number` was next; a round gets one of every worker."""
        made = self._fleet.sequence + 1 - number
        if made > 1:
            raise UsageError(
                f"{made} pushes in one step of fleet.dataset; in sync mode make one for each batch, "
                "or use fleet.shard"
            )
        return made

    # -- other modes ---------------------------------------------------------------------------

    def _tell(self, ranges: Ranges) -> None:
        """Tell the other stages of this worker what the next step has; nothing: there is no more."""
        if here().processes == 1:
            return
        told, tag = np.array(ranges, np.int64), f"dataset/{self._count}/{next(self._tags)}"
        for process in range(1, here().processes):
            links().send(process, tag, [told])

    def _told(self, trainer: Trainer) -> Steps:
        """What the first stage of this worker tells."""
        turns = self._fleet.turns
        while self._fleet.turns == turns:
            [told] = links().receive(0, f"dataset/{self._count}/{next(self._tags)}")
            ranges = tuple((low, high) for low, high in told.tolist())
            if not ranges:
                return False
            if ranges == _SKIP:
                trainer.skip()
            else:
                yield ranges
        return True

    @property
    def _exact(self) -> bool:
        """Merged pushes leave later than their steps; then only what is flushed is said to be used."""
        return self._fleet.mode != "half-async"

    def _leased(self, trainer: Trainer, order: membership_pb2.DealRequest) -> Steps:
        turns = self._fleet.turns
        while (lease := self._lease(trainer, order)) is not None:
            self._fleet.progress.catch_up()  # nothing is leased twice
            total, batch = length(lease), order.batch
            for low in range(0, total, batch):
                high = min(low + batch, total)
                self._handed = high
                if self._exact:
                    self.position = (self._leases, high)
                self.coming = part(lease, high, min(high + batch, total))
                ranges = part(lease, low, high)
                self._tell(ranges)
                yield ranges
                if self._fleet.turns != turns:
                    break
            self._leases, self._handed = self._leases + 1, 0
            if self._fleet.turns != turns:  # what is left of the lease is dealt anew
                self._used, self.position = self._leases, (self._leases, 0)
                return True
        self._tell(())
        return False

    def _lease(self, trainer: Trainer, order: membership_pb2.DealRequest) -> Ranges | None:
        """The next lease; None: everything is used."""
        order.round, order.lease = 0, self._leases
        while True:
            if not self._exact:
                self._settle(trainer)
            order.used = self._used
            reply = self._ask(order)
            if reply.ended or reply.plan:  # what was dealt in rounds, in another mode, is over
                return None
            if reply.lease:
                return read_ranges(reply.lease)
            if self._used == self._leases:
                time.sleep(_PAUSE)
            if self._fleet.mode == "ssp":  # who has no data does not hold back the others
                self._tell(_SKIP)
                trainer.skip()
            self._settle(trainer)

    def _settle(self, trainer: Trainer) -> None:
        trainer.flush()
        self._used = self._leases
        self.position = (self._leases, 0)


def _parts(share: Ranges, count: int) -> Iterator[Ranges]:
    """The share in `count` nearly equal parts; empty ones are left out."""
    total = length(share)
    for index in range(count):
        low, high = total * index // count, total * (index + 1) // count
        if low < high:
            yield part(share, low, high)
