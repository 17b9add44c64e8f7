"""The steps of the fleet's datasets on this worker: asks for data, and tells the worker's other stages."""

import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from psfleet.data.assignment import Range
from psfleet.stages.links import here, links
from psfleet.wire.membership_messages import read_plan, read_ranges
from psfleet.wire.v1 import membership_pb2
from psfleet_worker.connection.call import wait_all
from psfleet_worker.connection.connection import FleetConnection
from psfleet_worker.session.data_shares import WorkerData
from psfleet_worker.session.instructions import (
    DataReply,
    FlushPushes,
    HearStages,
    Instruction,
    Program,
    RequestData,
    SkipStep,
    TellStages,
    TrainStep,
)

__all__ = ["DataClient", "Pusher"]

Ranges = tuple[Range, ...]


class Pusher(Protocol):
    """What data dispatch needs of the runtime that pushes."""

    def skip(self) -> None:
        """A step without gradients."""

    def flush(self) -> None:
        """Wait until every push is applied."""


class DataClient:
    """One dataset.

    Args:
        fleet: The worker's connection.
        trainer: Who pushes.
        number: Of the dataset in this life, from 1.
        size: Samples of an epoch.
        epochs: How many epochs.
        seed: Of the order of samples.
    """

    def __init__(
        self,
        fleet: FleetConnection,
        trainer: Pusher,
        number: int,
        size: int,
        epochs: int,
        seed: int,
    ) -> None:
        self._fleet = fleet
        self._trainer = trainer
        self._order = membership_pb2.DealRequest(
            worker=fleet.worker,
            incarnation=fleet.session.incarnation,
            dataset=number,
            size=size,
            epochs=epochs,
            seed=seed,
            group=here().processes,
        )
        self._tags = itertools.count()

    def steps(self, shares: WorkerData, batch: int, merged: int) -> Iterator[Ranges]:
        """The positions of each step's samples; see Runtime.shares."""
        place = here()
        return self._run(shares.steps(batch, merged, place.process, place.processes))

    def _run(self, program: Program[None]) -> Iterator[Ranges]:
        outcome: Any = None
        while True:
            try:
                wanted = program.send(outcome)
            except StopIteration:
                return
            if isinstance(wanted, TrainStep):
                outcome = yield wanted.ranges
            else:
                outcome = self._perform(wanted)

    def _perform(self, wanted: Instruction) -> Any:
        match wanted:
            case RequestData():
                return self._deal(wanted)
            case FlushPushes():
                return self._trainer.flush()
            case SkipStep():
                return self._trainer.skip()
            case TellStages(ranges):
                return self._tell(ranges)
            case HearStages():
                [told] = links().receive(0, self._tag())
                return tuple((low, high) for low, high in told.tolist())
            case _:
                return self._fleet.perform(wanted)

    def _deal(self, deal: RequestData) -> DataReply:
        order = self._order
        order.batch, order.round = deal.batch, deal.round
        order.lease, order.used = deal.lease, deal.used
        call = self._fleet.clients[0].start("Coordinator/Deal", order.SerializeToString())
        reply = membership_pb2.DealReply.FromString(wait_all([call])[0])
        if deal.round:
            return DataReply(read_plan(order.size, order.batch, reply.plan), reply.view)
        if reply.ended or reply.plan:  # what was dealt in rounds, in another mode, is over
            return DataReply((), reply.view)
        return DataReply(read_ranges(reply.lease) or None, reply.view)

    def _tell(self, ranges: Ranges) -> None:
        told, tag = np.array(ranges, np.int64), self._tag()
        for process in range(1, here().processes):
            links().send(process, tag, [told])

    def _tag(self) -> str:
        return f"dataset/{self._order.dataset}/{next(self._tags)}"
