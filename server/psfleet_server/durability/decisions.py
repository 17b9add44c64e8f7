"""Between decisions of the coordinator and the message of their records (log.proto)."""

from typing import assert_never

from psfleet.errors import FrameError
from psfleet.wire.membership_messages import read_ranges, write_ranges
from psfleet.wire.v1.log_pb2 import Begun as BegunMessage
from psfleet.wire.v1.log_pb2 import DecisionRecord, View
from psfleet.wire.v1.log_pb2 import Leased as LeasedMessage
from psfleet.wire.v1.log_pb2 import Left as LeftMessage
from psfleet.wire.v1.log_pb2 import Met as MetMessage
from psfleet_server.coordinator.barriers import CollectiveCompleted
from psfleet_server.coordinator.coordinator_messages import (
    Decision,
    TermStarted,
    ViewDecided,
    WorkerLeft,
)
from psfleet_server.coordinator.data_dispatch import DatasetBegun, DatasetEnded, LeaseGranted
from psfleet_server.durability import coordinator_state as state

__all__ = ["read_decision", "write_decision"]


def write_decision(decision: Decision) -> DecisionRecord:
    """The message of a record."""
    match decision:
        case TermStarted(term):
            return DecisionRecord(started=term)
        case ViewDecided(members, supply):
            view = View(members=state.write_members(members), supply=state.write_supply(supply))
            return DecisionRecord(viewed=view)
        case CollectiveCompleted():
            return DecisionRecord(met=_write_met(decision))
        case WorkerLeft(worker, incarnation):
            return DecisionRecord(left=LeftMessage(worker=worker, incarnation=incarnation))
        case DatasetBegun(order, plan):
            begun = BegunMessage(order=state.write_order(order), plan=state.write_stored_plan(plan))
            return DecisionRecord(begun=begun)
        case LeaseGranted(incarnation, dataset, ranges, used):
            leased = LeasedMessage(
                incarnation=incarnation, dataset=dataset, ranges=write_ranges(ranges), used=used
            )
            return DecisionRecord(leased=leased)
        case DatasetEnded(dataset):
            return DecisionRecord(ended=dataset)
        case _:
            assert_never(decision)


def read_decision(message: DecisionRecord) -> Decision:
    """The decision that a message holds.

    Raises:
        FrameError: It holds none.
        UsageError: It holds one that cannot have been.
    """
    match message.WhichOneof("decision"):
        case "started":
            return TermStarted(message.started)
        case "viewed":
            view = message.viewed
            return ViewDecided(state.read_members(view.members), state.read_supply(view.supply))
        case "met":
            return _read_met(message.met)
        case "left":
            return WorkerLeft(message.left.worker, message.left.incarnation)
        case "begun":
            begun = message.begun
            return DatasetBegun(state.read_order(begun.order), state.read_stored_plan(begun))
        case "leased":
            leased = message.leased
            ranges = read_ranges(leased.ranges)
            return LeaseGranted(leased.incarnation, leased.dataset, ranges, leased.used)
        case "ended":
            return DatasetEnded(message.ended)
    raise FrameError("it holds no decision")


def _write_met(met: CollectiveCompleted) -> MetMessage:
    return MetMessage(
        number=met.number,
        value=None if met.value is None else state.write_tensor(met.value),
        wish=None if met.wish is None else state.write_wish(met.wish),
        switch=None if met.switch is None else state.write_switch(met.switch),
    )


def _read_met(message: MetMessage) -> CollectiveCompleted:
    return CollectiveCompleted(
        number=message.number,
        value=state.read_tensor(message.value) if message.HasField("value") else None,
        wish=state.read_wish(message.wish) if message.HasField("wish") else None,
        switch=state.read_switch(message.switch) if message.HasField("switch") else None,
    )
