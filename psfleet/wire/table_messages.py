"""Between the definitions of psfleet and their protobuf messages."""

from typing import Any

import numpy as np

from psfleet.errors import ConfigError, FrameError
from psfleet.formats import exact
from psfleet.rules import make_rule, reference_of
from psfleet.runtime.evictions import EvictedIds
from psfleet.schema.entry import make_entry
from psfleet.schema.table import DecaySpec, InitializerSpec, TableSpec, arguments, later_values
from psfleet.tables.row_data import TableClock
from psfleet.wire.message_converter import Converter
from psfleet.wire.v1 import log_pb2, shard_pb2

MAX_DENSE = 2**40  # values of one dense table; a definition beyond it is damage, not ambition


def write_spec(spec: TableSpec) -> shard_pb2.TableSpec:
    """Return the message that defines a table."""
    return shard_pb2.TableSpec(
        name=spec.name,
        kind=spec.kind,
        shape=spec.shape,
        rule=reference_of(spec.rule),
        hyperparameters=spec.rule.hyperparameters(),
        l1=spec.decay.l1,
        l2=spec.decay.l2,
        initializer=spec.initializer.kind,
        low=spec.initializer.low,
        high=spec.initializer.high,
        seed=spec.seed,
        every_row=spec.every_row,
        entry=spec.entry.kind if spec.entry else "",
        entry_values=spec.entry.values() if spec.entry else {},
        **{field.name: value for field, value in later_values(spec).items()},
    )


def read_spec(message: shard_pb2.TableSpec) -> TableSpec:
    """Return the table that a message defines.

    Raises:
        UsageError: A value is outside what a definition allows; the text names it.
    """
    kind: Any = message.kind  # checked by TableSpec
    initializer: Any = message.initializer  # checked by Initializer
    there = {field.name: value for field, value in message.ListFields()}
    spec = TableSpec(
        name=message.name,
        kind=kind,
        shape=tuple(message.shape),
        rule=make_rule(message.rule, dict(message.hyperparameters)),
        decay=DecaySpec(message.l1, message.l2),
        initializer=InitializerSpec(initializer, message.low, message.high),
        seed=message.seed,
        every_row=message.every_row,
        entry=make_entry(message.entry, dict(message.entry_values)),
        **arguments(TableSpec, there),
    )
    if spec.size > MAX_DENSE:
        raise ConfigError(f"table {spec.name!r} has {spec.size} values, the limit is {MAX_DENSE}")
    return spec


def write_evictions(evictions: EvictedIds) -> shard_pb2.EvictionsReply:
    """Return the message of one server's evictions."""
    [following] = evictions.position
    return shard_pb2.EvictionsReply(
        ids=evictions.ids.astype("<i8").tobytes(),
        steps=evictions.steps.astype("<i8").tobytes(),
        causes=evictions.causes.tobytes(),
        next=following,
        missed=evictions.missed,
    )


def read_evictions(message: shard_pb2.EvictionsReply) -> EvictedIds:
    """Return the evictions of a message.

    Raises:
        FrameError: Its arrays are of different lengths.
    """
    count = len(message.causes)
    if len(message.ids) != 8 * count or len(message.steps) != 8 * count:
        raise FrameError(
            f"{count} evictions come with {len(message.ids)} bytes of ids and {len(message.steps)} of steps"
        )
    ids, steps = (
        np.frombuffer(part, "<i8").astype(np.int64) for part in (message.ids, message.steps)
    )
    causes = np.frombuffer(message.causes, np.uint8)
    return EvictedIds(ids, steps, causes, (message.next,), message.missed)


_MOST = 2**62


def clock_to_json(clock: TableClock) -> dict[str, Any]:
    """Return the clock in a document."""
    return {"step": clock.step, "shrinks": clock.shrinks, "ticks": clock.ticks}


def read_clock(document: Any) -> TableClock:
    """Return the clock that a document holds.

    Raises:
        ValueError: It is none.
    """
    step, shrinks, ticks = exact(document, "clock", step=int, shrinks=list, ticks=list)
    numbers = [step, *shrinks, *(int(at) for _, at in ticks), *(int(t) for t, _ in ticks)]
    if not all(isinstance(number, int) and 0 <= number <= _MOST for number in numbers):
        raise ValueError(f"clock {step!r}, {shrinks!r}, {ticks!r}")
    return TableClock(step, tuple(shrinks), tuple((float(t), int(at)) for t, at in ticks))


CLOCK = Converter(TableClock, log_pb2.TableClock)
