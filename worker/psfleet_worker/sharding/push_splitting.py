"""What of a push goes to which server, and in which form."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.float16 import encode
from psfleet.platform.value_class import value_class
from psfleet.runtime.interface import Format, Gradient
from psfleet.runtime.validation import Checked
from psfleet.schema.table import TableSpec
from psfleet.shard.dense_partition import deal_elements
from psfleet.wire import segments
from psfleet.wire.compression import CompressedValues, GradientCompressor
from psfleet.wire.v1.frame_pb2 import Content, Segment
from psfleet_worker.connection.request import ServerRequest
from psfleet_worker.sharding.pull_splitting import RoutingPlans

__all__ = ["add_gradients"]

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


@value_class
class _GradientPart:
    """One table's gradient, as psfleet.runtime.validation.check_gradients gives it."""

    spec: TableSpec
    gradient: Gradient
    values: Floats
    ids: Ids | None
    form: Format

    @property
    def is_summed_in_place(self) -> bool:
        """Whether its rows are summed where they leave, in float32."""
        return (
            self.ids is not None
            and self.spec.kind == "sparse"
            and self.form == self.gradient.precision == "float32"
        )

    @property
    def row_ids(self) -> Ids | None:
        """The id of each row of the values, if each belongs to one."""
        return None if self.gradient.bags is not None else self.ids

    def segment(self, content: Content, count: int) -> Segment:
        """What says how the part for one server is to be read."""
        return Segment(
            table=self.spec.key,
            content=content,
            count=count,
            learning_rate=self.gradient.learning_rate,
            precision=segments.PRECISIONS[self.form],
        )


def add_gradients(
    parcels: Sequence[ServerRequest],
    checked: Sequence[Checked],
    plans: RoutingPlans,
    packer: GradientCompressor,
    look: Callable[[Iterable[tuple[str, Floats, Ids | None]]], None],
) -> None:
    """Add the gradients' parts for the servers that hold their tables, empty ones too.

    All of these count the same steps.

    Args:
        parcels: One per server.
        checked: The gradients.
        plans: How ids are dealt.
        packer: Knows the form in which gradients travel.
        look: Gets names of tables, values and ids, to see whether they are finite; rows when they are
            summed, for there are fewer then.

    Raises:
        UsageError: One cannot travel in that form; the packer is as before.
    """
    others, looked, packed = [], [], []
    summed: list[tuple[str, Floats, Ids | None]] = []
    for spec, gradient, values, ids in checked:
        part = _GradientPart(spec, gradient, values, ids, packer.form_of(spec, gradient))
        if part.is_summed_in_place:
            summed += [(part.spec.name, rows, ids) for rows, ids in _sum(parcels, part, plans)]
        else:
            others.append(part)
            looked.append((part.spec.name, part.values, part.row_ids))
        if part.form == "int8":
            packed.append(part)
    look(looked + summed)
    for part in packed:
        packer.check(part.spec, part.values)
    # Rows first: their sums can still be refused, and dense gradients leave something in the packer.
    others.sort(key=_is_whole)
    for part in others:
        if part.form == "float32":
            _add(parcels, part, plans)
        elif part.ids is None:
            _pack_values(parcels, part, plans, packer)
        else:
            _pack_rows(parcels, part, part.ids, plans, packer)


def _is_whole(part: _GradientPart) -> bool:
    """Whether it has a value for every place of a dense table."""
    return part.ids is None


def _pack_values(
    parcels: Sequence[ServerRequest],
    part: _GradientPart,
    plans: RoutingPlans,
    packer: GradientCompressor,
) -> None:
    for server, low, high in plans.ranges(part.spec):
        parcel, shape = parcels[server], (high - low,)
        room = parcel.reserve(
            part.segment(segments.VALUES, high - low), CompressedValues.size_of(part.form, shape)
        )
        packed = CompressedValues.over(room, part.form, shape)
        packer.part(part.spec, parcel.number, low, part.values[low:high], packed)


def _pack_rows(
    parcels: Sequence[ServerRequest],
    part: _GradientPart,
    ids: Ids,
    plans: RoutingPlans,
    packer: GradientCompressor,
) -> None:
    plan = plans.of(part.spec, ids)
    holders = _holders(parcels, part, plans)
    merged = plan.merge(part.values, part.gradient.bags)
    for parcel, mine, rows in zip(holders, plan.unique, merged, strict=True):
        room = parcel.reserve(
            part.segment(segments.ID_ROWS, len(mine)),
            mine.nbytes + CompressedValues.size_of(part.form, rows.shape),
        )
        room[: mine.nbytes].view(np.int64)[:] = mine
        packed = CompressedValues.over(room[mine.nbytes :], part.form, rows.shape)
        packer.rows(part.spec, parcel.number, mine, rows, packed)


def _sum(
    parcels: Sequence[ServerRequest], part: _GradientPart, plans: RoutingPlans
) -> list[tuple[Floats, Ids]]:
    """Sum the rows of each id where they leave; for each server the sums and their ids."""
    assert part.ids is not None
    plan = plans.of(part.spec, part.ids)
    sums = [
        parcel.rows(part.spec, mine, part.gradient.learning_rate)
        for parcel, mine in zip(_holders(parcels, part, plans), plan.unique, strict=True)
    ]
    plan.merge_into(part.values, sums, part.gradient.bags)
    return list(zip(sums, plan.unique, strict=True))


def _holders(
    parcels: Sequence[ServerRequest], part: _GradientPart, plans: RoutingPlans
) -> list[ServerRequest]:
    """The parcels of the servers that hold the table."""
    return [parcels[server] for server in plans.group(part.spec)]


def _add(parcels: Sequence[ServerRequest], part: _GradientPart, plans: RoutingPlans) -> None:
    if part.gradient.precision == "float32" and part.ids is None:
        for server, low, high in plans.ranges(part.spec):
            parcels[server].values(part.spec, part.values[low:high], part.gradient.learning_rate)
        return
    for parcel, short in zip(_holders(parcels, part, plans), _short(part, plans), strict=True):
        parcel.packed(*short)


def _short(part: _GradientPart, plans: RoutingPlans) -> Iterator[tuple[Any, ...]]:
    """Of each server that holds the table the segment and its arrays.

    For what amp sends in 16 bits, or dgc by elements.
    """
    gradient = part.gradient
    for content, where, mine in _shares(part, plans):
        segment = part.segment(content, len(mine))
        if gradient.precision == "float32":
            yield (segment, *where, mine)
            continue
        segment.precision, segment.scale = segments.PRECISIONS[gradient.precision], gradient.scale
        yield (segment, *where, encode(mine, gradient.precision, gradient.scale))


def _shares(
    part: _GradientPart, plans: RoutingPlans
) -> Iterator[tuple[Content, tuple[NDArray[Any], ...], Floats]]:
    """Of each of these servers the content, what says where its values belong, and the values."""
    spec, values, ids = part.spec, part.values, part.ids
    ranges = [part[1:] for part in plans.ranges(spec)] if spec.kind == "dense" else []
    if ids is None:
        yield from ((segments.VALUES, (), values[low:high]) for low, high in ranges)
    elif spec.kind == "sparse":
        plan = plans.of(spec, ids)
        for mine, rows in zip(plan.unique, plan.merge(values, part.gradient.bags), strict=True):
            yield segments.ID_ROWS, (mine,), rows
    else:
        for (low, _), where in zip(ranges, deal_elements(ids, ranges), strict=True):
            yield segments.ELEMENTS, ((ids[where] - low).astype(np.uint32),), values[where]
