"""Dataclasses and messages are converted by the names of their fields; what only one side has is refused."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from google.protobuf.message import Message

from psfleet.core.base.errors import FrameError
from psfleet.core.engine.shard.events import (
    CreateTable,
    Evict,
    Leave,
    MakeCut,
    Push,
    Record,
    RestorePart,
    Shrink,
    WriteState,
)
from psfleet.core.engine.shard.membership_view import InstallView
from psfleet.core.engine.shard.rounds import Rounds
from psfleet.core.net import server_state
from psfleet.core.net.membership_messages import INSTALL, PLAN_ENTRY
from psfleet.core.net.message_converter import Converter, check_shared
from psfleet.core.net.table_messages import CLOCK
from psfleet.core.net.v1 import log_pb2, membership_pb2, shard_pb2, state_pb2
from psfleet.core.net.worker_requests import JOIN, LEAVE, SHRINK
from psfleet_server.durability import records
from psfleet_server.durability.records import (
    COLLECTIVES,
    DISPATCH,
    MEMBERS,
    TORN_STEP,
    read_decision,
    write_decision,
)

CONVERTERS: list[Converter[Any, Any]] = [
    JOIN,
    LEAVE,
    SHRINK,
    INSTALL,
    PLAN_ENTRY,
    CLOCK,
    MEMBERS,
    COLLECTIVES,
    DISPATCH,
    TORN_STEP,
    *(converter for _, converter in records._BY_NAMES.values()),
]
DECISIONS = list(log_pb2.DecisionRecord.DESCRIPTOR.fields_by_name)


def filled(message: Message, skipped: set[str]) -> Any:
    """The message with a value of its own in each field."""
    _fill(message, skipped, itertools.count(1))
    return message


def _fill(message: Any, skipped: set[str], numbers: Iterator[int]) -> None:
    if isinstance(message, state_pb2.Tensor):
        message.dtype, message.data = "<u4", next(numbers).to_bytes(4, "little")
        message.shape.append(1)
        return
    for field in message.DESCRIPTOR.fields:
        held = getattr(message, field.name)
        if field.name in skipped | {"mode_settings"}:
            continue
        entry = field.message_type
        if field.enum_type is not None:
            setattr(message, field.name, shard_pb2.MODE_SSP)
        elif entry is not None and entry.GetOptions().map_entry:
            for _ in range(2):
                key: Any = next(numbers)
                key = (
                    f"{key:09}" if isinstance(_scalar(entry.fields_by_name["key"], 0), str) else key
                )
                if (value := entry.fields_by_name["value"]).message_type is None:
                    held[key] = _scalar(value, next(numbers))
                else:
                    _fill(held[key], skipped, numbers)
        elif entry is not None and hasattr(held, "add"):
            for _ in range(2):
                _fill(held.add(), skipped, numbers)
        elif entry is not None:
            held.SetInParent()
            _fill(held, skipped, numbers)
        elif hasattr(held, "append"):
            held.extend(_scalar(field, next(numbers)) for _ in range(2))
        else:
            setattr(message, field.name, _scalar(field, next(numbers)))


def _scalar(field: Any, number: int) -> Any:
    kinds = {field.CPPTYPE_BOOL: bool, field.CPPTYPE_DOUBLE: float, field.CPPTYPE_STRING: str}
    return kinds.get(field.cpp_type, int)(number)


def written(message: Message) -> bytes:
    """The bytes of a message, maps in order of their keys."""
    return message.SerializeToString(deterministic=True)


@pytest.mark.parametrize("converter", CONVERTERS, ids=lambda each: each.message.__name__)
def test_every_field_of_a_message_comes_back(converter: Converter[Any, Any]) -> None:
    """A message with a value in each field is read and written as the same bytes."""
    message = filled(converter.message(), {"boot"} if converter is INSTALL else set())
    assert written(message)
    assert written(converter.write(converter.read(message))) == written(message)


@pytest.mark.parametrize("decision", DECISIONS)
def test_every_field_of_a_decision_comes_back(decision: str) -> None:
    """The same for each kind of decision."""
    message = filled(log_pb2.DecisionRecord(), {*DECISIONS} - {decision})
    assert message.WhichOneof("decision") == decision
    assert written(write_decision(read_decision(message))) == written(message)


def test_every_field_of_a_shard_comes_back() -> None:
    """The same for the message that several dataclasses share; held pushes have tests of their own."""
    message = filled(state_pb2.ShardState(), {"held"})
    shard = server_state._read_shard(message, iter(()))
    assert written(server_state._write_shard(shard)[0]) == written(message)


def test_records_without_arrays_have_converters() -> None:
    """Records that hold arrays are written by hand, all others by a converter."""
    by_hand = {Push, CreateTable, WriteState, RestorePart, Evict}
    assert {*get_args(Record)} == {*records._BY_NAMES} | by_hand


def test_an_unset_field_is_none() -> None:
    """An optional attribute is told from its zero."""
    assert SHRINK.read(SHRINK.write(Shrink(1))) == Shrink(1)
    assert SHRINK.read(SHRINK.write(Shrink(1, 0.0, 0))) == Shrink(1, 0.0, 0)


def _class(**hints: Any) -> type:
    return dataclasses.make_dataclass("Sample", hints.items())


@pytest.mark.parametrize(
    ("hints", "sentence"),
    [
        ({"number": int, "term": int}, "Sample.term has no field in CutRecord"),
        ({}, r"Sample and CutRecord differ in \['number'\]"),
        ({"number": str}, "CutRecord.number cannot hold <class 'str'>"),
        ({"number": float}, "CutRecord.number cannot hold"),
        ({"number": bool}, "CutRecord.number cannot hold"),
        ({"number": int | None}, "CutRecord.number is optional on one side only"),
    ],
)
def test_what_one_side_has_alone_is_refused(hints: dict[str, Any], sentence: str) -> None:
    """A converter that does not fit is not made, so its module is not imported."""
    Converter(MakeCut, log_pb2.CutRecord)
    with pytest.raises(TypeError, match=sentence):
        Converter(_class(**hints), log_pb2.CutRecord)


def test_nested_messages_are_checked_too() -> None:
    """Also elements, entries, optional values and tuples of a message."""
    spans = list[tuple[int, str]]
    for hints, message, sentence in (
        ({"view": int, "seats": dict[int, MakeCut], "closed": int}, "InstallRequest", "SeatView"),
        ({"view": int, "seats": int, "closed": int}, "InstallRequest", "seats cannot hold"),
        ({"first": int, "seats": tuple[int, ...], "stream": spans}, "PlanEntry", "cannot hold"),
        ({"incarnation": int, "first": int, "last": int}, "IncarnationView", "one side only"),
    ):
        with pytest.raises(TypeError, match=sentence):
            Converter(_class(**hints), getattr(membership_pb2, message), others=("boot",))
    with pytest.raises(TypeError, match="boot"):
        Converter(InstallView, membership_pb2.InstallRequest)
    with pytest.raises(TypeError, match="last"):
        Converter(Leave, shard_pb2.LeaveRequest, omitted=("last",))


def test_a_shared_message_has_each_field_once() -> None:
    """Several dataclasses hold the fields of one message, without gap or overlap."""
    rounds = Converter(Rounds, state_pb2.ShardState, omitted=("held", "reached"), others=None)
    rest = {*state_pb2.ShardState.DESCRIPTOR.fields_by_name} - rounds.fields
    check_shared(state_pb2.ShardState, [rounds], rest)
    with pytest.raises(TypeError, match="held twice"):
        check_shared(state_pb2.ShardState, [rounds], rest | {"closed"})
    with pytest.raises(TypeError, match=r"differ in \['cut'\]"):
        check_shared(state_pb2.ShardState, [rounds], rest - {"cut"})


def test_half_a_pair_is_refused() -> None:
    """Ranges are pairs of positions."""
    with pytest.raises(FrameError, match="there are 3 of them"):
        PLAN_ENTRY.read(membership_pb2.PlanEntry(stream=[1, 2, 3]))
