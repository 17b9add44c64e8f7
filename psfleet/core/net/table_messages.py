"""Converts definitions of tables, evictions and table clocks to messages and back, and lays out replies.

The second half is for the changes of tables that followers receive. Such a reply can have many megabytes of
weights, which protobuf would copy four times. So `lay_out_changes` and `lay_out_rows` write the small
fields of the reply and leave gaps for the weights. The tables then write the weights into the gaps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ConfigError, FrameError
from psfleet.core.base.json_documents import exact, natural
from psfleet.core.engine.eviction_records import EvictedIds
from psfleet.core.engine.rules import make_rule, reference_of
from psfleet.core.engine.schema.entry import make_entry
from psfleet.core.engine.schema.table import (
    DecaySpec,
    InitializerSpec,
    TableSpec,
    arguments,
    later_values,
)
from psfleet.core.engine.tables.row_data import TableClock
from psfleet.core.net.body import parse
from psfleet.core.net.frame import reserve_behind
from psfleet.core.net.protobuf_fields import begun
from psfleet.core.net.v1 import follower_pb2, shard_pb2
from psfleet.core.net.v1.follower_pb2 import RowsReply

MAX_DENSE = 2**40  # values of one dense table; a larger definition is surely damaged


Ids = NDArray[np.int64]
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
NO_IDS = np.zeros(0, np.int64)
_NO_WEIGHTS = np.zeros(0, np.float32)
# Numbers of fields in follower.proto: of ChangesReply here, of TableChanges and RowsReply below.
_TABLES = 4


def write_spec(spec: TableSpec) -> shard_pb2.TableSpec:
    """Return the message with the definition of a table."""
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
    """Return the table definition in a message.

    Raises:
        UsageError: A value is not allowed in a definition.
    """
    kind: Any = message.kind  # checked by TableSpec
    initializer: Any = message.initializer  # checked by Initializer
    present_fields = {field.name: value for field, value in message.ListFields()}
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
        **arguments(TableSpec, present_fields),
    )
    if spec.size > MAX_DENSE:
        raise ConfigError(f"table {spec.name!r} has {spec.size} values, the limit is {MAX_DENSE}")
    return spec


def write_evictions(evictions: EvictedIds) -> shard_pb2.EvictionsReply:
    """Return the message with the evicted ids of one server."""
    [following] = evictions.position
    return shard_pb2.EvictionsReply(
        ids=evictions.ids.astype("<i8").tobytes(),
        steps=evictions.steps.astype("<i8").tobytes(),
        causes=evictions.causes.tobytes(),
        next=following,
        missed=evictions.missed,
    )


def read_evictions(message: shard_pb2.EvictionsReply) -> EvictedIds:
    """Return the evicted ids in a message.

    Raises:
        FrameError: The arrays have different lengths.
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


def clock_to_json(clock: TableClock) -> dict[str, Any]:
    """Return a table's clock, its counts of updates and shrinks, as a JSON object."""
    return {"step": clock.step, "shrinks": clock.shrinks, "ticks": clock.ticks}


def read_clock(document: Any) -> TableClock:
    """Return the clock of a table, its counts of updates and shrinks, that `clock_to_json` wrote.

    Raises:
        ValueError: The object is not a valid clock.
    """
    step, shrinks, ticks = exact(document, "clock", step=int, shrinks=list, ticks=list)
    for number in (step, *shrinks, *(at for _, at in ticks), *(int(t) for t, _ in ticks)):
        natural(number, "a number of its clock")
    if sorted(shrinks) != shrinks or sorted(ticks) != ticks:
        raise ValueError(f"clock {step!r}, {shrinks!r}, {ticks!r}")
    return TableClock(step, tuple(shrinks), tuple((float(t), at) for t, at in ticks))


_IDS, _WEIGHTS, _REMOVED = 3, 4, 5
_PAGE_IDS, _PAGE_WEIGHTS = 1, 2


@dataclass(frozen=True)
class ChangedTable:
    """Changes of one table on one server, as a follower receives them.

    Attributes:
        ids: Ids of the changed rows, int64 [n]. Empty for a dense table.
        weights: float32 [n, dim]. For a dense table, the server's whole slice, flat.
        removed: Ids of removed rows, int64 [m].
        whole: True if `ids` are all rows of the table. The follower then drops all other rows.
    """

    spec: TableSpec
    ids: Ids
    weights: Floats
    removed: Ids = field(default_factory=NO_IDS.copy)
    whole: bool = False


@dataclass(frozen=True)
class TableToSend:
    """Changes of one table that a server is about to send. The weights are written later, into a gap.

    Attributes:
        ids: Ids of the changed rows, int64 [n]. Empty for a dense table.
        count: Number of weights, for the size of the gap.
        removed: Ids of removed rows, int64 [m].
        whole: True if `ids` are all rows of the table.
    """

    spec: TableSpec
    ids: Ids
    count: int
    removed: Ids = field(default_factory=NO_IDS.copy)
    whole: bool = False

    def parts(self) -> list[bytes | Ids | int]:
        """Return the table's message as parts for `_lay_out`, with a gap for the weights."""
        # The definition is sent only with a whole table. A follower that gets changes has it already.
        head = follower_pb2.TableChanges(table=self.spec.key, whole=self.whole)
        if self.whole:
            head.spec.CopyFrom(write_spec(self.spec))
        content = [
            head.SerializeToString(),
            *_array_field(_IDS, self.ids),
            *_array_field(_WEIGHTS, 4 * self.count),
            *_array_field(_REMOVED, self.removed),
        ]
        return [begun(_TABLES, sum(map(_size, content))), *content]


def lay_out_changes(
    head: follower_pb2.ChangesReply, tables: Sequence[TableToSend]
) -> tuple[bytes, list[Floats], Bytes]:
    """Return a reply with gaps: one for the weights of each table, and one for the head.

        changes of table 0: ids | gap | removed ids || changes of table 1 ... || gap for the head

    The head comes last because its content is known only after the weights are copied. A protobuf message
    allows fields in any order. The caller must fill all gaps before it sends the message.

    Returns:
        The message, the gap for the weights of each table, and the gap for the head.
    """
    parts = [part for table in tables for part in table.parts()]
    message, (*rooms, last) = _lay_out([*parts, head.ByteSize()])
    weights = iter(block.view(np.float32) for block in rooms)
    return message, [next(weights) if change.count else _NO_WEIGHTS for change in tables], last


def lay_out_rows(ids: Ids, dim: int, following: int) -> tuple[bytes, list[Floats]]:
    """Return a message with a page of rows, and its gap for the weights. There is no gap if `ids` is empty.

    Args:
        ids: Ids of the rows, int64 [n].
        dim: Weights of each row.
        following: Segment (class of ids by hash) that the follower should request next, or 0 if there are no
            more rows.
    """
    fields = *_array_field(_PAGE_IDS, ids), *_array_field(_PAGE_WEIGHTS, 4 * dim * len(ids))
    message, rooms = _lay_out([RowsReply(next=following).SerializeToString(), *fields])
    return message, [block.view(np.float32) for block in rooms]


def _array_field(number: int, content: Ids | int) -> list[bytes | Ids | int]:
    """Return the parts of a field that has an array or a gap of `content` bytes; none for 0 bytes."""
    size = _size(content)
    return [begun(number, size), content] if size else []


def _size(part: bytes | Ids | int) -> int:
    if isinstance(part, int):
        return part
    return len(part) if isinstance(part, bytes) else part.nbytes


def _lay_out(parts: Sequence[bytes | Ids | int]) -> tuple[bytes, list[Bytes]]:
    """Join the parts to a message. A part that is an integer is a gap of that many bytes.

    Returns:
        The message, and a writable view of each gap.
    """
    message, whole = reserve_behind(b"", sum(map(_size, parts)))
    rooms, at = [], 0
    for part in parts:
        block = whole[at : (at := at + _size(part))]
        if isinstance(part, int):
            rooms.append(block)
        elif isinstance(part, bytes):
            block[:] = np.frombuffer(part, np.uint8)
        else:
            block[:] = part.astype("<i8", copy=False).view(np.uint8)
    return message, rooms


def read_changes(
    message: follower_pb2.ChangesReply, specs: dict[int, TableSpec]
) -> list[ChangedTable]:
    """Return the changes of all tables in a reply.

    Args:
        specs: Known definitions by table key. Adds the definitions that come with the reply.

    Raises:
        FrameError: A definition is missing, or arrays have the wrong length.
    """
    changes = []
    for table_changes in message.tables:
        if table_changes.whole:
            specs[table_changes.table] = read_spec(table_changes.spec)
        if table_changes.table not in specs:
            raise FrameError(
                f"changes of table {table_changes.table:#x} come without its definition"
            )
        spec = specs[table_changes.table]
        ids, weights = read_rows(table_changes, spec)
        removals = _array(table_changes.removed, np.int64)
        changes.append(ChangedTable(spec, ids, weights, removals, table_changes.whole))
    return changes


def read_rows(
    message: "follower_pb2.TableChanges | RowsReply", spec: TableSpec
) -> tuple[Ids, Floats]:
    """Return the ids and weights of rows in a message. Weights are [n, dim], or flat for a dense table.

    Raises:
        FrameError: The number of weights does not fit the number of ids.
    """
    ids, weights = _array(message.ids, np.int64), _array(message.weights, np.float32)
    if spec.kind == "dense":
        return ids, weights
    if len(weights) != len(ids) * spec.dim:
        raise FrameError(
            f"{len(ids)} rows of table {spec.name!r} come with {len(weights)} weights; a row has {spec.dim}"
        )
    return ids, weights.reshape(-1, spec.dim)


def read_reply(message: bytes) -> follower_pb2.ChangesReply:
    """Parse the reply to a follower's request for changes."""
    return parse(follower_pb2.ChangesReply, message)


def _array(content: bytes, dtype: "type[np.int64 | np.float32]") -> NDArray[Any]:
    size = np.dtype(dtype).itemsize
    if len(content) % size:
        raise FrameError(f"{len(content)} bytes are no whole number of {np.dtype(dtype).name}")
    return np.frombuffer(content, np.dtype(dtype).newbyteorder("<")).astype(dtype, copy=False)
