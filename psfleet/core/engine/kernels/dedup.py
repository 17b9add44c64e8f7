"""Deduplication of a batch's ids, and the sums of gradients by distinct id.

A batch of sparse ids repeats many of them. `dedup` finds the distinct ids and sorts them by server;
`UniqueIds` then expands the servers' rows to the batch and merges the batch's gradients, also for bags of
rows. The work is done by compiled kernels (sources/dedup.py, row_sums.py, bag_rows.py) that release the GIL.
Any thread may call; each has its own scratch memory, which grows to the largest batch and stays.
"""

import itertools
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ShapeError
from psfleet.core.engine.kernels.bags import RowBags
from psfleet.core.engine.kernels.generate import static_kernels, width_kernels
from psfleet.core.engine.kernels.id_routing import routes
from psfleet.core.engine.kernels.initial_values import address_of

_FILTER = 4  # filter bits for each entry of the index: one of 40 distinct ids has to be looked up
_BLOCK = 256  # as in sources/dedup.py
_REPEATS = 2  # average occurrences of an id that make summing row by row faster
_FEW = 64  # a set of this many ids or fewer is faster than the call of a kernel
_ZERO = np.zeros((), np.float32)
_PLACES = np.arange(_FEW, dtype=np.uint32)
_PLACES.flags.writeable = False
_scratch = threading.local()

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


class UniqueIds:
    """The distinct ids of one batch.

    Attributes:
        unique: One int64 array per group (server): its distinct ids in first-seen order.
        inverse: uint32 [n]: for each id of the batch, group << shift | position in `unique[group]`.
        shift: Number of bits of a position in `inverse`.
        is_plain: True if there is one group and the batch repeats no id.
    """

    __slots__ = ("inverse", "is_plain", "shift", "unique")

    def __init__(
        self, unique: list[Ids], inverse: NDArray[np.uint32], shift: int, is_plain: bool = False
    ) -> None:
        self.unique = unique
        self.inverse = inverse
        self.shift = shift
        self.is_plain = is_plain

    def expand(self, rows: Sequence[Floats]) -> Floats:
        """Return one row for each id of the batch, float32 [n, dim].

        Args:
            rows: Rows of each group's distinct ids, float32 [distinct ids, dim].
        """
        dim, rows = rows[0].shape[1], self._checked(rows)
        if self.is_plain:
            return rows[0].copy()
        count = len(self.inverse)
        out = np.empty((count, dim), np.float32)
        width_kernels("row_sums", dim, "expand", "merge").expand(
            address_of(self.inverse), count, self.shift, _addresses(rows), address_of(out)
        )
        return out

    def _checked(self, rows: Sequence[Floats]) -> list[Floats]:
        """Return the groups' rows as contiguous arrays; refuse any number of rows but one per distinct id."""
        dim = rows[0].shape[1]
        for mine, theirs in zip(self.unique, rows, strict=True):
            if theirs.shape != (len(mine), dim):
                raise ShapeError(f"rows have shape {theirs.shape}, they must be {(len(mine), dim)}")
        return [_plain(array) for array in rows]

    def pool(self, rows: Sequence[Floats], bags: Sequence[RowBags]) -> Floats:
        """Expand the rows and pool them by bag in one pass: float32 [all bags, dim].

        The bits are those of `expand` and then `RowBags.pool`.

        Args:
            rows: Rows as for `expand`.
            bags: Bags of the batch's ids in parts; the ids of the first part come first in the batch.
        """
        if _are_rows(bags):
            return self.expand(rows)
        dim, rows = rows[0].shape[1], self._checked(rows)
        out = np.empty((sum(map(len, bags)), dim), np.float32)
        starts, kernels = _addresses(rows), width_kernels("bag_rows", dim)
        for codes, part, target in self._parts(bags, out):
            if part.are_rows:
                place = self.shift, starts, address_of(target)
                width_kernels("row_sums", dim, "expand", "merge").expand(
                    address_of(codes), len(codes), *place
                )
            else:
                kernels.pool(
                    *(address_of(codes), len(codes), self.shift, starts),
                    *(*part.arguments, address_of(target)),
                )
        return out

    def _parts(
        self, bags: Sequence[RowBags], values: Floats
    ) -> Iterator[tuple[NDArray[np.uint32], RowBags, Floats]]:
        """Yield for each part of the bags its codes, the part, and its slice of `values` [all bags, dim]."""
        count = sum(part.rows for part in bags)
        if count != len(self.inverse):
            raise ShapeError(f"bags of {count} ids in all got {len(self.inverse)} ids")
        row = bag = 0
        for part in bags:
            yield self.inverse[row : row + part.rows], part, values[bag : bag + len(part)]
            row, bag = row + part.rows, bag + len(part)

    def merge(self, gradients: Floats, bags: Sequence[RowBags] | None = None) -> list[Floats]:
        """Sum the gradients of each distinct id; return one float32 [distinct ids, dim] for each group.

        Gradients are added in the order of the batch, so the bits are the same for any number of groups.

        Args:
            gradients: Gradients of the rows, float32 [n, dim], or those of the bags, float32 [all bags, dim].
            bags: Bags as for `pool`, or None for gradients of rows.
        """
        count = len(self.inverse) if bags is None else sum(map(len, bags))
        if gradients.ndim != 2 or len(gradients) != count:
            raise ShapeError(f"gradients have shape {gradients.shape}, they must be ({count}, dim)")
        sums = [np.empty((len(mine), gradients.shape[1]), np.float32) for mine in self.unique]
        self.merge_into(gradients, sums, bags)
        return sums

    def merge_into(
        self, gradients: Floats, sums: Sequence[Floats], bags: Sequence[RowBags] | None = None
    ) -> None:
        """Merge as `merge` does, and write the sums to arrays of the caller."""
        if self.is_plain and bags is None and gradients.shape == sums[0].shape:
            np.add(gradients, _ZERO, sums[0])  # the bits of a sum: -0 becomes 0
            return
        gradients, target = _plain(gradients), _not_begun(sums)
        if bags is None or _are_rows(bags):
            _add(self.inverse, self.shift, gradients, target)
            return
        for codes, part, values in self._parts(bags, gradients):
            if part.are_rows:
                _add(codes, self.shift, values, target)
            else:
                self._add_bags(codes, part, values, target)

    def _add_bags(
        self, codes: NDArray[np.uint32], part: RowBags, values: Floats, target: int
    ) -> None:
        """Add the gradients of bags to the sums of their rows, whose address is a result of `_not_begun`."""
        kernels = width_kernels("bag_rows", values.shape[1])
        ends, bags, weights, scales = part.arguments
        batch = address_of(codes), len(codes), self.shift, address_of(values), ends, bags
        ids = sum(map(len, self.unique))
        if weights or len(codes) < _REPEATS * ids:
            kernels.merge(*batch, weights, scales, target)
            return
        counts = map(len, self.unique)
        offsets = np.array([*itertools.accumulate(counts, initial=0), 0], np.int64)
        work = np.empty(ids + 2 + len(codes), np.uint32)
        kernels.merge_by_row(
            *(*batch, scales, target, len(self.unique), address_of(offsets), address_of(work))
        )


def dedup(ids: Ids, groups: int) -> UniqueIds:
    """Find the distinct ids of a batch and sort them by server.

    Args:
        ids: int64 [n], contiguous, at any alignment.
        groups: Number of servers; `routes` decides which server has an id.

    Raises:
        ShapeError: The batch has so many ids that a code of 32 bits cannot name server and position.
    """
    # The index has at least two entries for each id, so that chains stay short.
    n, shift = len(ids), 32 - max(1, (groups - 1).bit_length())
    if n >= 1 << shift:
        raise ShapeError(
            f"a batch of {n} ids is too long for {groups} servers; the limit is {(1 << shift) - 1}"
        )
    if groups == 1 and n <= _FEW and len(set(ids.tolist())) == n:
        return UniqueIds([ids.copy()], _PLACES[:n], shift, is_plain=True)
    ids = _plain(ids)
    mask = (1 << max(8, (2 * n - 1).bit_length())) - 1
    index, unique, codes, hashes = _scratch_for(n, mask)
    counts = np.zeros(groups, np.int64)
    inverse = np.empty(n, np.uint32)
    route_codes = _route_codes(groups, shift)  # other threads may replace what the cache holds
    kernels = static_kernels("dedup")
    count = kernels.dedup(
        address_of(ids),
        n,
        index,
        mask,
        hashes,
        unique,
        codes,
        address_of(route_codes),
        address_of(counts),
        address_of(inverse),
    )
    if groups == 1:
        return UniqueIds([_scratch.buffers[1][:count].copy()], inverse, shift)
    ends = [0, *itertools.accumulate(counts.tolist())]
    out, offsets = np.empty(count, np.int64), np.array(ends, np.int64)
    kernels.split(unique, codes, count, shift, address_of(offsets), address_of(out))
    # np.split takes 10 us, and a step of many features has as many tables.
    return UniqueIds([out[a:b] for a, b in itertools.pairwise(ends)], inverse, shift)


def first_repeat(ids: Ids) -> int | None:
    """Return the position of the first id that occurs earlier in the batch, or None."""
    n = len(ids)
    if n <= _FEW and len(set(ids.tolist())) == n:
        return None
    ids = _plain(ids)
    mask = (1 << max(8, (2 * n - 1).bit_length())) - 1
    index, bits, places, hashes = _scratch_for(n, mask)
    low = _FILTER * (mask + 1) - 1
    place = static_kernels("dedup").repeated(
        address_of(ids), n, hashes, bits, low, places, index, mask
    )
    return None if place < 0 else int(place)


def ascending(parts: Sequence[Ids]) -> Ids:
    """Return the distinct ids of these arrays in ascending order.

    np.unique hashes them and takes ten times as long.
    """
    ids = np.sort(np.concatenate([*parts, np.zeros(0, np.int64)]))
    distinct: Ids = ids[np.diff(ids, prepend=ids[:1] - 1) != 0]
    return distinct


def merge_pushes(parts: Sequence[tuple[Ids, Floats]], scale: float) -> tuple[Ids, Floats]:
    """Merge several pushes into one: the union of their ids, and the sums of their rows in list order.

    Args:
        parts: Ids, int64 [n], and rows, float32 [n, dim], of each push.
        scale: Factor on the sums, applied in float32.
    """
    union = dedup(np.concatenate([ids for ids, _ in parts]), 1)
    sums = np.empty((len(union.unique[0]), parts[0][1].shape[1]), np.float32)
    start, target = 0, _not_begun([sums])
    for ids, rows in parts:
        _add(union.inverse[start : start + len(ids)], union.shift, _plain(rows), target)
        start += len(ids)
    if scale != 1:
        sums *= np.float32(scale)
    return union.unique[0], sums


def _are_rows(bags: Sequence[RowBags]) -> bool:
    """Return whether each bag is exactly one row, so that gradients of bags are gradients of rows."""
    return len(bags) == 1 and bags[0].are_rows


def _add(inverse: NDArray[np.uint32], shift: int, rows: Floats, target: int) -> None:
    """Add rows to sums, whose address is a result of `_not_begun`."""
    width_kernels("row_sums", rows.shape[1], "expand", "merge").merge(
        address_of(inverse), len(inverse), shift, address_of(rows), target
    )


@cache
def _route_codes(groups: int, shift: int) -> NDArray[np.uint32]:
    """Return the group of each virtual shard, then the upper bits of each group's codes."""
    table = routes(groups)
    return np.concatenate([table, table << np.uint32(shift)])


def _addresses(arrays: Sequence[Floats]) -> int:
    """Return the address of a list of the arrays' addresses.

    The list is valid until this thread calls `_addresses` or `_not_begun` again.
    """
    words, address = _words(len(arrays))
    for i, array in enumerate(arrays):
        words[i] = address_of(array)
    return address


def _not_begun(sums: Sequence[Floats]) -> int:
    """Return the address of a list of (address, 0) for each array: sums of which no row has been begun.

    The kernels count begun rows there. The list is valid as long as that of `_addresses`.
    """
    words, address = _words(2 * len(sums))
    for i, array in enumerate(sums):
        words[2 * i], words[2 * i + 1] = address_of(array), 0
    return address


def _words(count: int) -> tuple[memoryview, int]:
    """Return scratch memory of this thread for `count` int64, and its address."""
    buffer: tuple[memoryview, int] | None = getattr(_scratch, "words", None)
    if buffer is None or len(buffer[0]) < count:
        words = np.empty(max(count, _FEW), np.int64)
        buffer = _scratch.words = words.data, address_of(words)
    return buffer


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array itself if it is contiguous, else a contiguous copy."""
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def _scratch_for(n: int, mask: int) -> list[int]:
    """Return the addresses of this thread's scratch: index, unique ids, codes, hashes of a block.

    n: ids of the batch. mask: entries of the index less one. The buffers grow and are kept.
    """
    buffers = getattr(_scratch, "buffers", None)
    if buffers is None or len(buffers[0]) <= mask or len(buffers[1]) < n:
        buffers = [
            np.empty(mask + 1, np.uint32),
            np.empty(mask + 1, np.int64),
            np.empty(mask + 1, np.uint32),
            np.empty(_BLOCK, np.uint64),
        ]
        _scratch.buffers, _scratch.addresses = buffers, [address_of(array) for array in buffers]
    addresses: list[int] = _scratch.addresses
    return addresses
