"""Splits reads and gradients among the servers that hold a table, and joins the values from their replies.

A dense table is cut into one contiguous range per server. Each id of a sparse table belongs to one server of
the table's group. For a pull of ids [7, 2, 7, 9] from two servers:

    RoutingPlans.of     distinct ids of each server     server 0: [2]      server 1: [7, 9]
    SparseRead.ask      one read in each request        rows of 2          rows of 7 and 9
    SparseRead.join     one row per id of the batch     7, 2, 7, 9

A push works in the other direction: the gradients of the same id are summed first, so that each id is sent
once, and the sums are written directly into the request's memory. Everything runs in the thread that pulls or
pushes.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.memory import value_class
from psfleet.core.base.settings.kinds import Format
from psfleet.core.engine.gradient_checks import CheckedGradient, check_ids
from psfleet.core.engine.kernels.dedup import UniqueIds
from psfleet.core.engine.kernels.initial_values import address_of, copy_over
from psfleet.core.engine.kernels.number_formats import encode
from psfleet.core.engine.kernels.recent_batches import RecentBatches
from psfleet.core.engine.runtime_interface import Gradient, Read
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.engine.shard.table_placement import dense_range, servers_of, split_elements
from psfleet.core.net import segments
from psfleet.core.net.gradient_compressor import GradientCompressor
from psfleet.core.net.v1.frame_pb2 import Content, Segment
from psfleet.core.net.value_formats import FORMATS, CompressedValues
from psfleet_worker.connection.request import ServerRequest, Values
from psfleet_worker.connection.tensor_memory import LEND_FROM, LentArray

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


class RoutingPlans:
    """Cache of the servers and ranges of tables, and of the distinct ids of batches.

    A pull and the push after it mostly have the same ids, so the push finds the distinct ids ready. After a
    change of the number of servers, the owner makes a new object.

    Args:
        servers: Number of servers of the fleet.
    """

    def __init__(self, servers: int) -> None:
        self.servers = servers
        self._batches = RecentBatches()
        self._groups: dict[int, list[int]] = {}
        self._ranges: dict[int, list[tuple[int, int, int]]] = {}

    def group(self, spec: TableSpec) -> list[int]:
        """Return the servers that hold a table."""
        servers = self._groups.get(spec.key)
        if servers is None:
            servers = self._groups[spec.key] = servers_of(spec, self.servers)
        return servers

    def ranges(self, spec: TableSpec) -> list[tuple[int, int, int]]:
        """Return (server, first, end) for each server that holds a dense table, in flattened positions."""
        ranges = self._ranges.get(spec.key)
        if ranges is None:
            ranges = self._ranges[spec.key] = [
                (server, *dense_range(spec, server, self.servers)) for server in self.group(spec)
            ]
        return ranges

    def of(self, spec: TableSpec, ids: Ids) -> UniqueIds:
        """Return the distinct ids of a batch of ids [n], split by the servers that hold the table."""
        return self._batches.unique_ids(spec.key, ids, len(self.group(spec)))

    def newest(self) -> dict[int, Ids]:
        """Return the ids of each table's newest batch, by the table's key."""
        return self._batches.newest()


class DenseRead:
    """A pull of a dense table's whole array. Each server returns its range.

    With shared memory, all servers write into one array that is lent to the caller, so that joining copies
    nothing. Otherwise the ranges are copied from the replies.
    """

    def __init__(self, spec: TableSpec, read: Read, plans: RoutingPlans) -> None:
        self._spec = spec
        self._ranges = plans.ranges(spec)
        self._lent: LentArray | None = None

    def ask(self, requests: Sequence[ServerRequest]) -> list[bool]:
        """Add the read to the request of each server that has a part.

        Returns:
            For each server, True if it has a part.
        """
        # Compressed values cannot be lent, because the caller gets float32.
        if 4 * self._spec.size >= LEND_FROM and not requests[0].packs:
            self._lent = self._borrow(requests)
        mask = [False] * len(requests)
        for server, low, high in self._ranges:
            if high > low:
                requests[server].read_values(self._spec, low, high, self._lent)
                mask[server] = True
        return mask

    def _borrow(self, requests: Sequence[ServerRequest]) -> LentArray | None:
        """Return an array in shared memory to lend to the caller, or None if that is not possible.

        All servers of the table must share one memory, and it must have space.
        """
        parts = [requests[server] for server, low, high in self._ranges if high > low]
        memory = parts[0].held
        if memory is None or any(request.held is not memory for request in parts):
            return None
        return memory.lend(self._spec.size)

    def join(self, values: Sequence[Values | None]) -> Floats:
        """Return the array, float32 of the table's shape.

        Args:
            values: For each server the values of its range, or None if it has no part.
        """
        lent, self._lent = self._lent, None
        # If a call was repeated, its server may still write to the memory of the first attempt, which is then
        # lost.
        out = (
            np.empty(self._spec.size, np.float32) if lent is None or lent.held.lost else lent.array
        )
        for server, low, high in self._ranges:
            value, part = values[server], out[low:high]
            if isinstance(value, CompressedValues):
                value.unpack(part)
            # The server has written a value at the address of its part directly into the array, so it needs
            # no copy.
            elif value is not None and (lent is None or address_of(value) != address_of(part)):
                copy_over(part, value)
        return out.reshape(self._spec.shape)


class SparseRead:
    """A pull of rows by id. Each server returns the distinct rows that it owns.

    Raises:
        UsageError: The ids are not valid for the table.
    """

    def __init__(self, spec: TableSpec, read: Read, plans: RoutingPlans) -> None:
        ids = check_ids(spec, read.ids)
        self._spec = spec
        self._shape = ids.shape
        self._bags = read.bags
        self._plan = plans.of(spec, ids if ids.ndim == 1 else ids.reshape(-1))
        self._group = plans.group(spec)

    def ask(self, requests: Sequence[ServerRequest]) -> list[bool]:
        """Add the read to the request of each server that has a part.

        Returns:
            For each server, True if it has a part.
        """
        mask = [False] * len(requests)
        for server, server_ids in zip(self._group, self._plan.unique, strict=True):
            if len(server_ids):
                requests[server].read_rows(self._spec, server_ids)
                mask[server] = True
        return mask

    def join(self, values: Sequence[Values | None]) -> Floats:
        """Return one row per id of the read [*ids.shape, dim], or one per bag [bags, dim].

        Args:
            values: For each server the rows of its distinct ids [n, dim], or None if it has no part.
        """
        parts = []
        for server in self._group:
            value = values[server]
            if value is None:
                value = np.empty((0, self._spec.dim), np.float32)
            parts.append(value.unpack() if isinstance(value, CompressedValues) else value)
        if self._bags is not None:
            return self._plan.pool(parts, self._bags)
        return self._plan.expand(parts).reshape(*self._shape, self._spec.dim)


SPLIT_READS: dict[str, type[DenseRead] | type[SparseRead]] = {
    "dense": DenseRead,
    "sparse": SparseRead,
}
"""Class of the read for each kind of table."""


@value_class
class _GradientPart:
    """Gradient of a table, checked by psfleet.core.engine.gradient_checks, and the format to send it in.

    Attributes:
        spec: The table.
        gradient: The gradient as the caller passed it, with its learning rate, precision and bags.
        values: float32 [n, push_width] of rows, [n] of elements, or the whole flattened array.
        ids: int64 [n] of rows, or positions of elements, or None if `values` is the whole array.
        form: Format in which the values are sent.
    """

    spec: TableSpec
    gradient: Gradient
    values: Floats
    ids: Ids | None
    form: Format

    def segment(self, content: Content, count: int) -> Segment:
        """Build the segment (description in the message) of the part for one server."""
        return Segment(
            table=self.spec.key,
            content=content,
            count=count,
            learning_rate=self.gradient.learning_rate,
            precision=segments.PRECISIONS[self.form],
        )


def add_gradients(
    requests: Sequence[ServerRequest],
    gradients: Sequence[CheckedGradient],
    plans: RoutingPlans,
    compressor: GradientCompressor,
    look: Callable[[Iterable[tuple[str, Floats, Ids | None]]], None],
) -> None:
    """Add gradients to the requests of the servers that hold their tables.

    A server gets a segment of each table that it holds, even an empty one, so that all servers of a table
    count the same steps for it. Rows of float32 are summed directly into the requests. Other gradients are
    written after the check, because the check may skip the step.

    Args:
        requests: One per server. On an error the caller closes them.
        gradients: The checked gradients of one push.
        plans: Cached routing of ids and ranges to the present servers.
        compressor: Formats of gradients, and compression errors kept for later gradients.
        look: Checks (table name, values, ids) of all gradients for infinities and NaN. Sparse rows are
            checked as sums, because there are fewer sums than rows.

    Raises:
        UsageError: A gradient cannot be sent in its format. The compressor is unchanged.
    """
    rows: list[_GradientPart] = []
    whole: list[_GradientPart] = []  # gradients of a whole dense table
    views, compressed = [], []
    sums: list[tuple[str, Floats, Ids | None]] = []
    for spec, gradient, values, ids in gradients:
        form = compressor.form_of(spec, gradient)
        part = _GradientPart(spec, gradient, values, ids, form)
        in_place = form == gradient.precision == "float32"
        if in_place and ids is not None and spec.kind == "sparse":
            _sum(requests, part, ids, plans, sums)
        else:
            (whole if ids is None else rows).append(part)
            views.append((spec.name, values, None if gradient.bags is not None else ids))
        if FORMATS[form].is_finite:
            compressed.append(part)
    look(views + sums)
    for part in compressed:
        compressor.check(part.spec, part.values)
    # Rows first: compression may still refuse their sums (finite gradients can have an infinite sum). After a
    # dense gradient, the compressor would already have changed the errors that it keeps.
    for part in (*rows, *whole):
        if part.form == "float32":
            _add(requests, part, plans)
        elif part.ids is None:
            _pack_values(requests, part, plans, compressor)
        else:
            _pack_rows(requests, part, part.ids, plans, compressor)


def _pack_values(
    requests: Sequence[ServerRequest],
    part: _GradientPart,
    plans: RoutingPlans,
    compressor: GradientCompressor,
) -> None:
    """Compress each server's range of a dense gradient into its request."""
    for server, low, high in plans.ranges(part.spec):
        request, shape = requests[server], (high - low,)
        target = request.reserve(
            part.segment(segments.VALUES, high - low), CompressedValues.size_of(part.form, shape)
        )
        compressed = CompressedValues.over(target, part.form, shape)
        compressor.part(part.spec, request.number, low, part.values[low:high], compressed)


def _pack_rows(
    requests: Sequence[ServerRequest],
    part: _GradientPart,
    ids: Ids,
    plans: RoutingPlans,
    compressor: GradientCompressor,
) -> None:
    """Sum the rows of each id, and write ids and compressed sums one after the other into each request."""
    plan = plans.of(part.spec, ids)
    holders = _holders(requests, part, plans)
    sums = plan.merge(part.values, part.gradient.bags)
    for request, server_ids, rows in zip(holders, plan.unique, sums, strict=True):
        target = request.reserve(
            part.segment(segments.ID_ROWS, len(server_ids)),
            server_ids.nbytes + CompressedValues.size_of(part.form, rows.shape),
        )
        target[: server_ids.nbytes].view(np.int64)[:] = server_ids
        compressed = CompressedValues.over(target[server_ids.nbytes :], part.form, rows.shape)
        compressor.rows(part.spec, request.number, server_ids, rows, compressed)


def _sum(
    requests: Sequence[ServerRequest],
    part: _GradientPart,
    ids: Ids,
    plans: RoutingPlans,
    sums: list[tuple[str, Floats, Ids | None]],
) -> None:
    """Sum the rows of each id into the requests' memory.

    Appends (table name, sums, ids) of each server to `sums`, for the check. If the check skips the step, the
    caller discards these requests.
    """
    spec, plan = part.spec, plans.of(part.spec, ids)
    rows_by_server = []
    for server, server_ids in zip(plans.group(spec), plan.unique, strict=True):
        rows = requests[server].rows(spec, server_ids, part.gradient.learning_rate)
        rows_by_server.append(rows)
        sums.append((spec.name, rows, server_ids))
    plan.merge_into(part.values, rows_by_server, part.gradient.bags)


def _holders(
    requests: Sequence[ServerRequest], part: _GradientPart, plans: RoutingPlans
) -> list[ServerRequest]:
    """Return the requests of the servers that hold the table."""
    return [requests[server] for server in plans.group(part.spec)]


def _add(requests: Sequence[ServerRequest], part: _GradientPart, plans: RoutingPlans) -> None:
    """Add a gradient that the compressor leaves unchanged: float32, or 16 bits chosen by amp."""
    if part.gradient.precision == "float32" and part.ids is None:
        for server, low, high in plans.ranges(part.spec):
            requests[server].values(part.spec, part.values[low:high], part.gradient.learning_rate)
        return
    for request, short in zip(_holders(requests, part, plans), _short(part, plans), strict=True):
        request.packed(*short)


def _short(part: _GradientPart, plans: RoutingPlans) -> Iterator[tuple[Any, ...]]:
    """Yield the segment and its arrays for each server that holds the table.

    Used for gradients that amp sends in 16 bits, and for elements of dense arrays that dgc selects.
    """
    gradient = part.gradient
    for content, where, server_values in _server_parts(part, plans):
        segment = part.segment(content, len(server_values))
        if gradient.precision == "float32":
            yield (segment, *where, server_values)
            continue
        segment.precision, segment.scale = segments.PRECISIONS[gradient.precision], gradient.scale
        yield (segment, *where, encode(server_values, gradient.precision, gradient.scale))


def _server_parts(
    part: _GradientPart, plans: RoutingPlans
) -> Iterator[tuple[Content, tuple[NDArray[Any], ...], Floats]]:
    """Yield (content, ids or positions, values) for each server that holds the table.

    Positions of elements are uint32, relative to the beginning of the server's range.
    """
    spec, values, ids = part.spec, part.values, part.ids
    ranges = [part[1:] for part in plans.ranges(spec)] if spec.kind == "dense" else []
    if ids is None:
        yield from ((segments.VALUES, (), values[low:high]) for low, high in ranges)
    elif spec.kind == "sparse":
        plan = plans.of(spec, ids)
        for server_ids, rows in zip(
            plan.unique, plan.merge(values, part.gradient.bags), strict=True
        ):
            yield segments.ID_ROWS, (server_ids,), rows
    else:
        for (low, _), where in zip(ranges, split_elements(ids, ranges), strict=True):
            yield segments.ELEMENTS, ((ids[where] - low).astype(np.uint32),), values[where]
