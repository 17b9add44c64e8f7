"""What of a pull or push goes to which server, and back."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.kernels.dedup import Dedup, dedup
from psfleet.kernels.halves import encode
from psfleet.kernels.initial import address_of
from psfleet.routing import check_ids
from psfleet.runtime import Gradient, Read
from psfleet.shard.layout import deal_elements, dense_ranges
from psfleet.tables.spec import TableSpec
from psfleet.wire import segments
from psfleet.wire.v1.frame_pb2 import Content, Segment
from psfleet_worker.lane import LEND_FROM, Lent
from psfleet_worker.parcel import Parcel

__all__ = ["DenseRead", "Plans", "SparseRead", "add_gradient", "deal_read"]

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

_KEPT = 2  # batches of a table: the one that is trained and the one that is read ahead


_SAMPLE = 997  # a look at every so many ids tells most batches apart


class Plans:
    """How tables and batches of ids are dealt. A push mostly brings the ids of the pull before."""

    def __init__(self, servers: int) -> None:
        self.servers = servers
        self._made: dict[int, deque[tuple[Ids, Dedup]]] = {}
        self._recent: deque[tuple[Ids, Dedup]] = deque(maxlen=_KEPT)  # of any table
        self._ranges: dict[int, list[tuple[int, int]]] = {}

    def ranges(self, spec: TableSpec) -> list[tuple[int, int]]:
        """Which part of a dense table each server holds."""
        known = self._ranges.get(spec.key)
        if known is None:
            known = self._ranges[spec.key] = dense_ranges(spec, self.servers)
        return known

    def of(self, table: int, ids: Ids) -> Dedup:
        """The distinct ids [n] of a batch, dealt to the servers."""
        own = self._made.setdefault(table, deque(maxlen=_KEPT))  # the last one first
        found = _among(own, ids)
        if found is None:
            # Tables of one model are often looked up with the same ids, one after the other.
            found = _among(self._recent, ids)
            if found is None:
                found = ids.copy(), dedup(ids, self.servers)  # the caller may change its array
                self._recent.appendleft(found)
            own.appendleft(found)
        return found[1]


def _among(made: Iterable[tuple[Ids, Dedup]], ids: Ids) -> tuple[Ids, Dedup] | None:
    """The plan that was made for these very ids."""
    for known, plan in made:
        if (
            len(known) == len(ids)
            and (known[::_SAMPLE] == ids[::_SAMPLE]).all()
            and (known == ids).all()
        ):
            return known, plan
    return None


class DenseRead:
    """A pull of a whole array: each server gives its range, if it can where the array will be."""

    def __init__(self, spec: TableSpec, plans: Plans) -> None:
        self._spec = spec
        self._ranges = plans.ranges(spec)
        self._lent: Lent | None = None

    def ask(self, parcels: Sequence[Parcel]) -> list[bool]:
        """Add the read to the parcel of each server that has a part; which ones have."""
        if 4 * self._spec.size >= LEND_FROM:
            self._lent = self._borrow(parcels)
        for parcel, (low, high) in zip(parcels, self._ranges, strict=True):
            if high > low:
                parcel.read_values(self._spec, low, high, self._lent)
        return [high > low for low, high in self._ranges]

    def _borrow(self, parcels: Sequence[Parcel]) -> Lent | None:
        """The whole array, if all servers that have a part share the memory that it is in."""
        parts = [
            parcel for parcel, (low, high) in zip(parcels, self._ranges, strict=True) if high > low
        ]
        held = parts[0].held
        if held is None or any(parcel.held is not held for parcel in parts):
            return None
        return held.lend(self._spec.size)

    def join(self, values: Sequence[Floats | None]) -> Floats:
        """The array, from what each server gave."""
        lent, self._lent = self._lent, None
        # In memory that is lost, a server that was asked twice may still be writing.
        out = (
            np.empty(self._spec.size, np.float32) if lent is None or lent.held.lost else lent.array
        )
        for (low, high), value in zip(self._ranges, values, strict=True):
            if value is not None and address_of(value) != address_of(out[low:high]):
                out[low:high] = value
        return out.reshape(self._spec.shape)


class SparseRead:
    """A pull of rows: each server gives the distinct rows that it owns."""

    def __init__(self, spec: TableSpec, read: Read, plans: Plans) -> None:
        ids = check_ids(spec, read.ids)
        self._spec = spec
        self._shape = ids.shape
        self._plan = plans.of(spec.key, ids.reshape(-1))

    def ask(self, parcels: Sequence[Parcel]) -> list[bool]:
        """Add the read to the parcel of each server that has a part; which ones have."""
        for parcel, mine in zip(parcels, self._plan.unique, strict=True):
            if len(mine):
                parcel.read_rows(self._spec, mine)
        return [len(mine) > 0 for mine in self._plan.unique]

    def join(self, values: Sequence[Floats | None]) -> Floats:
        """One row per id that was asked for, from what each server gave."""
        nothing = np.empty((0, self._spec.dim), np.float32)
        rows = self._plan.expand([nothing if value is None else value for value in values])
        return rows.reshape(*self._shape, self._spec.dim)


def deal_read(spec: TableSpec, read: Read, plans: Plans) -> DenseRead | SparseRead:
    """A read, dealt to the servers."""
    if spec.kind == "dense":
        return DenseRead(spec, plans)
    return SparseRead(spec, read, plans)


def add_gradient(
    parcels: Sequence[Parcel],
    spec: TableSpec,
    values: Floats,
    ids: Ids | None,
    gradient: Gradient,
    plans: Plans,
) -> None:
    """Add a gradient's part for every server, empty ones too: all servers count the same steps.

    Args:
        values, ids: As psfleet.routing.check_gradient gives them.
    """
    if gradient.precision != "float32" or (ids is not None and spec.kind == "dense"):
        for parcel, part in zip(parcels, _short(spec, values, ids, gradient, plans), strict=True):
            parcel.packed(*part)
    elif ids is None:
        for parcel, (low, high) in zip(parcels, plans.ranges(spec), strict=True):
            parcel.values(spec, values[low:high], gradient.learning_rate)
    else:
        plan = plans.of(spec.key, ids)
        plan.merge_into(
            values,
            [
                parcel.rows(spec, mine, gradient.learning_rate)
                for parcel, mine in zip(parcels, plan.unique, strict=True)
            ],
        )


def _short(
    spec: TableSpec, values: Floats, ids: Ids | None, gradient: Gradient, plans: Plans
) -> Iterator[tuple[Any, ...]]:
    """Of each server the segment and its arrays, for what is sent in 16 bits or by elements."""
    for content, where, mine in _parts(spec, values, ids, plans):
        segment = Segment(
            table=spec.key, content=content, count=len(mine), learning_rate=gradient.learning_rate
        )
        if gradient.precision == "float32":
            yield (segment, *where, mine)
            continue
        segment.precision, segment.scale = segments.PRECISIONS[gradient.precision], gradient.scale
        yield (segment, *where, encode(mine, gradient.precision, gradient.scale))


def _parts(
    spec: TableSpec, values: Floats, ids: Ids | None, plans: Plans
) -> Iterator[tuple[Content, tuple[NDArray[Any], ...], Floats]]:
    """Of each server the content, what says where its values belong, and the values."""
    ranges = plans.ranges(spec) if spec.kind == "dense" else []
    if ids is None:
        yield from ((segments.VALUES, (), values[low:high]) for low, high in ranges)
    elif spec.kind == "sparse":
        plan = plans.of(spec.key, ids)
        for mine, rows in zip(plan.unique, plan.merge(values), strict=True):
            yield segments.ID_ROWS, (mine,), rows
    else:
        for (low, _), part in zip(ranges, deal_elements(ids, ranges), strict=True):
            yield segments.ELEMENTS, ((ids[part] - low).astype(np.uint32),), values[part]
