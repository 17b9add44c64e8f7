"""Repeated ids of a batch: numbered once, dealt to servers, their gradients summed; and the last batches.

A push mostly brings the ids of the pull before.
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

_FILTER = 4  # bits for each place of the index: of distinct ids one in 40 has to be looked up
_BLOCK = 256  # as in sources/dedup.py
_REPEATS = 2  # of an id on the average, from which on it pays to sum one row after the other
_FEW = 64  # ids of which a set is made faster than a kernel is called
_ZERO = np.zeros((), np.float32)
_PLACES = np.arange(_FEW, dtype=np.uint32)
_PLACES.flags.writeable = False
_scratch = threading.local()

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


class UniqueIds:
    """The distinct ids of one batch.

    Attributes:
        unique: One int64 array per group: its distinct ids in first-seen order.
        inverse: uint32 [n]: for each id of the batch, group << shift | place in `unique[group]`.
        shift: See `inverse`.
        is_plain: There is one group, and the batch names no id twice.
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
        """One row per id of the batch: float32 [n, dim] from the groups' rows float32 [c, dim]."""
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
        """The groups' rows, each side by side; refuses others than one for each distinct id."""
        dim = rows[0].shape[1]
        for mine, theirs in zip(self.unique, rows, strict=True):
            if theirs.shape != (len(mine), dim):
                raise ShapeError(f"rows have shape {theirs.shape}, they must be {(len(mine), dim)}")
        return [_plain(array) for array in rows]

    def pool(self, rows: Sequence[Floats], bags: Sequence[RowBags]) -> Floats:
        """`expand` and then `RowBags.pool` of its parts: float32 [all bags, dim], the same bits.

        Args:
            rows: Rows as for `expand`.
            bags: Bags of the batch's ids, those of the first part first.
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
        """Yield the ids' codes of each part of the bags, and its values among those of all bags."""
        count = sum(part.rows for part in bags)
        if count != len(self.inverse):
            raise ShapeError(f"bags of {count} ids in all got {len(self.inverse)} ids")
        row = bag = 0
        for part in bags:
            yield self.inverse[row : row + part.rows], part, values[bag : bag + len(part)]
            row, bag = row + part.rows, bag + len(part)

    def merge(self, gradients: Floats, bags: Sequence[RowBags] | None = None) -> list[Floats]:
        """Per group, float32 [c, dim]: the sum of each id's gradients, added in order of occurrence.

        The sums are the same bits for any number of groups.

        Args:
            gradients: float32 [n, dim]; with bags [all bags, dim], which `RowBags.spread` would spread first.
            bags: Bags as for `pool`.
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
        """Merge as `merge` does, with the sums written to arrays of the caller."""
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
        """Add the gradients of bags to the sums of their rows; `target`: of `_not_begun`."""
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
    """The distinct ids of a batch, dealt to `groups` servers.

    Args:
        ids: int64 [n], contiguous; any alignment.
        groups: Number of servers; `routes` has each server's share.
    """
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
    """The place of the first id that has come before it in the batch, or None."""
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
    """The distinct ids of these arrays in order. np.unique, which hashes them, takes ten times as long."""
    ids = np.sort(np.concatenate([*parts, np.zeros(0, np.int64)]))
    distinct: Ids = ids[np.diff(ids, prepend=ids[:1] - 1) != 0]
    return distinct


def merge_pushes(parts: Sequence[tuple[Ids, Floats]], scale: float) -> tuple[Ids, Floats]:
    """One push in place of several: the union of their ids, their rows summed in list order.

    Args:
        parts: (ids int64 [n], rows float32 [n, dim]) of each push.
        scale: A factor on the sums, float32.
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
    """Return whether they stand for nothing but rows."""
    return len(bags) == 1 and bags[0].are_rows


def _add(inverse: NDArray[np.uint32], shift: int, rows: Floats, target: int) -> None:
    """Add rows to sums; `target`: of `_not_begun`."""
    width_kernels("row_sums", rows.shape[1], "expand", "merge").merge(
        address_of(inverse), len(inverse), shift, address_of(rows), target
    )


@cache
def _route_codes(groups: int, shift: int) -> NDArray[np.uint32]:
    """Return the group of each virtual shard, then the upper bits of each group's codes."""
    table = routes(groups)
    return np.concatenate([table, table << np.uint32(shift)])


def _addresses(arrays: Sequence[Floats]) -> int:
    """Return the address of the arrays' addresses, valid until this thread calls again."""
    words, address = _words(len(arrays))
    for i, array in enumerate(arrays):
        words[i] = address_of(array)
    return address


def _not_begun(sums: Sequence[Floats]) -> int:
    """Return the address of these sums, with no row of them begun. Valid as for `_addresses`."""
    words, address = _words(2 * len(sums))
    for i, array in enumerate(sums):
        words[2 * i], words[2 * i + 1] = address_of(array), 0
    return address


def _words(count: int) -> tuple[memoryview, int]:
    """So many int64 of this thread, and their address."""
    buffer: tuple[memoryview, int] | None = getattr(_scratch, "words", None)
    if buffer is None or len(buffer[0]) < count:
        words = np.empty(max(count, _FEW), np.int64)
        buffer = _scratch.words = words.data, address_of(words)
    return buffer


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """The array itself if its elements lie side by side, else a copy that does."""
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def _scratch_for(n: int, mask: int) -> list[int]:
    """Addresses of this thread's buffers: index, unique, codes, hashes. They grow and stay."""
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
