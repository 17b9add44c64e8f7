"""The data that the fleet hands out, as one worker takes it step by step."""

import itertools
import time
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from psfleet.dealing import Plan, Range, length, part
from psfleet.errors import ConfigError, UsageError
from psfleet.pipeline.links import here, links
from psfleet.wire.membership import read_plan, read_ranges
from psfleet.wire.v1 import membership_pb2
from psfleet_worker.client import wait_all
from psfleet_worker.connection import Connection

__all__ = ["Shares", "Trainer"]

_PAUSE = 0.05  # seconds between questions while others still have leases


class Trainer(Protocol):
    """What shares need of whoever pushes."""

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
        self.coming: tuple[Range, ...] = ()
        self._fleet = fleet
        self._count = 0
        self._leases = 0
        self._used = 0

    def steps(
        self, trainer: Trainer, size: int, batch: int, epochs: int, seed: int, merged: int
    ) -> Iterator[tuple[Range, ...]]:
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
        if self._fleet.mode == "sync":
            order.batch = batch * merged
            return self._in_rounds(trainer, order, merged)
        if here().processes == 1:
            return self._leased(trainer, order)
        if self._fleet.mode == "ssp":
            raise ConfigError(
                "fleet.dataset does not go with stages in ssp mode: stages would wait for each other's "
                "data; use sync or async mode, or fleet.shard"
            )
        return self._told() if here().process else self._telling(self._leased(trainer, order))

    def _ask(self, order: membership_pb2.DealRequest) -> membership_pb2.DealReply:
        call = self._fleet.clients[0].start("Coordinator/Deal", order.SerializeToString())
        return membership_pb2.DealReply.FromString(wait_all([call])[0])

    # -- sync ----------------------------------------------------------------------------------

    def _in_rounds(
        self, trainer: Trainer, order: membership_pb2.DealRequest, merged: int
    ) -> Iterator[tuple[Range, ...]]:
        fleet = self._fleet
        trainer.flush()  # what is planned for the next round is final from here on
        plan, known = self._plan(order)
        if not plan.entries:  # it was leased, in another mode, and is over
            return
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
                return
            # All stages of a worker use what its first one has.
            yield from _parts(plan.share(fleet.worker - here().process, number), merged)
            self._check_mode("sync")
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

    def _check_mode(self, mode: str) -> None:
        if (self._fleet.mode == "sync") != (mode == "sync"):
            raise UsageError(
                f"the mode has become {self._fleet.mode!r} within a dataset; change it between two"
            )

    # -- other modes ---------------------------------------------------------------------------

    def _telling(self, steps: Iterator[tuple[Range, ...]]) -> Iterator[tuple[Range, ...]]:
        """The steps of the first stage; each is told to the others, and at last that there is no more."""
        ways = links()
        tags = (f"dataset/{self._count}/{number}" for number in itertools.count())
        for ranges in itertools.chain(steps, [()]):
            told, tag = np.array(ranges, np.int64), next(tags)
            for process in range(1, here().processes):
                ways.send(process, tag, [told])
            if ranges:
                yield ranges

    def _told(self) -> Iterator[tuple[Range, ...]]:
        """The same in another stage of that worker."""
        ways = links()
        for number in itertools.count():
            [told] = ways.receive(0, f"dataset/{self._count}/{number}")
            if not told.size:
                return
            yield tuple((low, high) for low, high in told.tolist())
            self._check_mode("async")

    @property
    def _exact(self) -> bool:
        """Merged pushes leave later than their steps; then only what is flushed is said to be used."""
        return self._fleet.mode != "half-async"

    def _leased(
        self, trainer: Trainer, order: membership_pb2.DealRequest
    ) -> Iterator[tuple[Range, ...]]:
        while (lease := self._lease(trainer, order)) is not None:
            total, batch = length(lease), order.batch
            for low in range(0, total, batch):
                high = min(low + batch, total)
                if self._exact:
                    self.position = (self._leases, high)
                self.coming = part(lease, high, min(high + batch, total))
                yield part(lease, low, high)
                self._check_mode("async")
            self._leases += 1

    def _lease(
        self, trainer: Trainer, order: membership_pb2.DealRequest
    ) -> tuple[Range, ...] | None:
        """The next lease; None: everything is used."""
        order.lease = self._leases
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
            if self._fleet.mode == "ssp":
                trainer.skip()  # who has no data does not hold back the others
            self._settle(trainer)

    def _settle(self, trainer: Trainer) -> None:
        trainer.flush()
        self._used = self._leases
        self.position = (self._leases, 0)


def _parts(share: tuple[Range, ...], count: int) -> Iterator[tuple[Range, ...]]:
    """The share in `count` nearly equal parts; empty ones are left out."""
    total = length(share)
    for index in range(count):
        low, high = total * index // count, total * (index + 1) // count
        if low < high:
            yield part(share, low, high)
