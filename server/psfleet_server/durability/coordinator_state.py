"""Between the coordinator's members, meetings and data and their messages (state.proto)."""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from psfleet.data.assignment import RoundPlan
from psfleet.errors import FrameError
from psfleet.shard.shard_state import ShardState
from psfleet.wire.body import dtype_of
from psfleet.wire.membership_messages import (
    read_lives,
    read_plan,
    read_ranges,
    write_lives,
    write_plan,
    write_ranges,
)
from psfleet.wire.mode_messages import mode_fields, read_mode_fields
from psfleet.wire.server_state import ServerState, read_positions, write_positions
from psfleet.wire.v1 import log_pb2, shard_pb2, state_pb2
from psfleet_server.coordinator.barriers import Array, CollectiveState, ModeRequest, ModeSwitch
from psfleet_server.coordinator.coordinator import Coordinator
from psfleet_server.coordinator.data_dispatch import (
    DataDispatch,
    DatasetRequest,
    DispatchedDataset,
    Leases,
    TornStep,
)
from psfleet_server.coordinator.membership import Membership, Seat

__all__ = [
    "become",
    "read_members",
    "read_order",
    "read_stored_plan",
    "read_supply",
    "read_switch",
    "read_tensor",
    "read_wish",
    "server_state",
    "write_coordinator",
    "write_members",
    "write_order",
    "write_stored_plan",
    "write_supply",
    "write_switch",
    "write_tensor",
    "write_wish",
]


def write_coordinator(coordinator: Coordinator) -> state_pb2.CoordinatorState:
    """All that a coordinator has decided."""
    return state_pb2.CoordinatorState(
        term=coordinator.term,
        members=write_members(coordinator.members),
        meetings=_write_meetings(coordinator.meetings),
        supply=write_supply(coordinator.supply),
    )


def server_state(shard: ShardState, coordinator: Coordinator | None) -> ServerState:
    """What a server is beside its tables; on server 0 with the decisions of the coordinator."""
    decided = None if coordinator is None else write_coordinator(coordinator)
    return ServerState(shard, decided)


def become(coordinator: Coordinator, message: state_pb2.CoordinatorState) -> None:
    """Take over the decisions of an earlier coordinator.

    Raises:
        PsfleetError: The message holds what cannot have been; nothing was changed.
    """
    members, supply = read_members(message.members), read_supply(message.supply)
    coordinator.meetings = _read_meetings(message.meetings)
    coordinator.term, coordinator.members, coordinator.supply = message.term, members, supply


# -- members -----------------------------------------------------------------------------------


def write_members(members: Membership) -> state_pb2.Members:
    """The message of a roster."""
    return state_pb2.Members(
        seats=[
            state_pb2.Seat(
                worker=worker,
                boot=seat.boot,
                earlier=sorted(seat.earlier),
                lives=write_lives(seat.lives),
                left=seat.left,
                rests=seat.rests,
                progress=seat.progress,
            )
            for worker, seat in members.seats.items()
        ],
        lives=members.lives,
        view=members.view,
        closed=members.closed,
        sync=members.sync,
    )


def read_members(message: state_pb2.Members) -> Membership:
    """The roster that a message holds."""
    seats = {
        seat.worker: Seat(
            boot=seat.boot,
            earlier=set(seat.earlier),
            lives=list(read_lives(seat.lives)),
            left=seat.left,
            rests=seat.rests,
            progress=seat.progress,
        )
        for seat in message.seats
    }
    return Membership(seats, message.lives, message.view, message.closed, message.sync)


# -- meetings ----------------------------------------------------------------------------------


def _write_meetings(meetings: CollectiveState) -> state_pb2.Meetings:
    return state_pb2.Meetings(
        met=meetings.met,
        results=[
            state_pb2.Result(number=number, value=write_tensor(value))
            for number, value in meetings.results.items()
        ],
        told=[
            state_pb2.Told(number=number, wish=write_wish(wish))
            for number, wish in meetings.told.items()
        ],
        switch=None if meetings.switch is None else write_switch(meetings.switch),
    )


def _read_meetings(message: state_pb2.Meetings) -> CollectiveState:
    return CollectiveState(
        met=message.met,
        results={result.number: read_tensor(result.value) for result in message.results},
        told={told.number: read_wish(told.wish) for told in message.told},
        switch=read_switch(message.switch) if message.HasField("switch") else None,
    )


def write_tensor(array: Array) -> state_pb2.Tensor:
    """The message of a small array."""
    return state_pb2.Tensor(dtype=array.dtype.str, shape=array.shape, data=array.tobytes())


def read_tensor(message: state_pb2.Tensor) -> Array:
    """The array that a message holds.

    Raises:
        FrameError: Its bytes are not of its shape.
    """
    try:
        found: NDArray[np.generic] = np.frombuffer(message.data, dtype_of(message.dtype))
        return found.reshape(tuple(message.shape)).copy()
    except ValueError:
        raise FrameError(
            f"an array of {message.dtype} and shape {list(message.shape)} has "
            f"{len(message.data)} bytes"
        ) from None


def write_wish(wish: ModeRequest) -> state_pb2.Wish:
    """The message of a wish."""
    return state_pb2.Wish(number=wish.number, mode=wish.mode, settings=dict(wish.settings))


def read_wish(message: state_pb2.Wish) -> ModeRequest:
    """The wish that a message holds."""
    return ModeRequest(message.number, message.mode, tuple(sorted(message.settings.items())))


def write_switch(switch: ModeSwitch) -> state_pb2.Switch:
    """The message of a change of the mode."""
    return state_pb2.Switch(
        number=switch.number,
        **mode_fields(switch.mode),
        rounds=switch.rounds,
        positions=write_positions(switch.positions),
    )


def read_switch(message: state_pb2.Switch) -> ModeSwitch:
    """The change of the mode that a message holds."""
    return ModeSwitch(
        number=message.number,
        mode=read_mode_fields(message),
        rounds=dict(sorted(message.rounds.items())),
        positions=read_positions(message.positions),
    )


# -- data --------------------------------------------------------------------------------------


def write_supply(supply: DataDispatch) -> state_pb2.Supply:
    """The message of all datasets."""
    return state_pb2.Supply(
        datasets=[
            state_pb2.Dataset(
                order=write_order(dataset.order),
                plan=write_stored_plan(dataset.plan),
                pool=write_ranges(dataset.pool),
                ended=dataset.ended,
                resumed=dataset.resumed,
            )
            for dataset in supply.datasets
        ],
        leases=[_write_leases(life, leases) for life, leases in supply.leases.items()],
        torn=[
            shard_pb2.TornStep(
                worker=torn.worker, incarnation=torn.incarnation, last=torn.sequences
            )
            for torn in supply.torn
        ],
    )


def read_supply(message: state_pb2.Supply) -> DataDispatch:
    """The datasets that a message holds.

    Raises:
        UsageError: One of them cannot be.
    """
    return DataDispatch(
        datasets=[
            DispatchedDataset(
                order=read_order(dataset.order),
                plan=read_stored_plan(dataset),
                pool=list(read_ranges(dataset.pool)),
                ended=dataset.ended,
                resumed=dataset.resumed,
            )
            for dataset in message.datasets
        ],
        leases={leases.incarnation: _read_leases(leases) for leases in message.leases},
        torn=[
            TornStep(torn.worker, torn.incarnation, dict(sorted(torn.last.items())))
            for torn in message.torn
        ],
    )


def _write_leases(incarnation: int, leases: Leases) -> state_pb2.Leases:
    return state_pb2.Leases(
        incarnation=incarnation,
        forgotten=leases.forgotten,
        kept=[
            state_pb2.Lease(dataset=dataset, ranges=write_ranges(ranges))
            for dataset, ranges in leases.kept
        ],
        confirmed=leases.confirmed,
    )


def _read_leases(message: state_pb2.Leases) -> Leases:
    return Leases(
        forgotten=message.forgotten,
        kept=[(lease.dataset, read_ranges(lease.ranges)) for lease in message.kept],
        confirmed=message.confirmed,
    )


def write_order(order: DatasetRequest) -> state_pb2.Order:
    """The message of what a worker wanted of a dataset."""
    return state_pb2.Order(
        number=order.number,
        size=order.size,
        batch=order.batch,
        epochs=order.epochs,
        seed=order.seed,
        round=order.round,
        lease=order.lease,
        used=order.used,
        known=order.known,
        group=order.group,
    )


def read_order(message: state_pb2.Order) -> DatasetRequest:
    """What a worker wanted of a dataset.

    Raises:
        UsageError: It cannot be.
    """
    return DatasetRequest(
        number=message.number,
        size=message.size,
        batch=message.batch,
        epochs=message.epochs,
        seed=message.seed,
        round=message.round,
        lease=message.lease,
        used=message.used,
        known=message.known,
        group=message.group,
    )


def write_stored_plan(plan: RoundPlan | None) -> state_pb2.Plan | None:
    """The message of a plan, with what workers need not know of it."""
    if plan is None:
        return None
    return state_pb2.Plan(
        size=plan.size,
        batch=plan.batch,
        entries=write_plan(plan),
        withdrawn=write_ranges(sorted(plan.withdrawn)),
    )


def read_stored_plan(holder: state_pb2.Dataset | log_pb2.Begun) -> RoundPlan | None:
    """The plan of a dataset; None: it is leased."""
    if not holder.HasField("plan"):
        return None
    said = holder.plan
    withdrawn = frozenset(read_ranges(said.withdrawn))
    return dataclasses.replace(read_plan(said.size, said.batch, said.entries), withdrawn=withdrawn)
