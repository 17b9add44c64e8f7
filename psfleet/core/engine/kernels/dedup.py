"""Finds the distinct ids of a batch, and sums gradients by distinct id.

A batch of sparse ids repeats many ids. A worker sends each distinct id once, to the server that has its row:

    ids         7    3    7    9        batch of a worker; say server 1 has id 3, and server 0 has ids 7 and 9
    unique      [7, 9], [3]             distinct ids of server 0, of server 1, as they first occur
    inverse     0.0  1.0  0.0  0.1      code of each id of the batch: server.position in its `unique`

`dedup` computes these. `UniqueIds.expand` then turns the servers' rows into the rows of the batch (pull), and
`UniqueIds.merge` adds up the gradients of each distinct id (push). `pool` and `merge` can also sum over bags
(the ids of one feature in one sample), so that the rows of a batch need not be written in between.

Compiled kernels do the work (sources/dedup.py, row_sums.py, bag_rows.py) and release the GIL. Any thread may
call: each thread has its own scratch memory, which grows to the thread's largest batch and is kept until the
thread ends.
"""

import itertools
import threading
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ShapeError
from psfleet.core.engine.kernels.bags import RowBags, joined_bags
from psfleet.core.engine.kernels.generate import static_kernels, width_kernels
from psfleet.core.engine.kernels.id_routing import routes
from psfleet.core.engine.kernels.initial_values import address_of
from psfleet.core.engine.schema.table import TableSpec

# Bits of the filter of `first_repeat` for each entry of the hash table. With 4, one of 40 distinct ids hits a
# bit that another id has set, and has to be looked up.
_FILTER = 4
_BLOCK = 256  # BLOCK of sources/dedup.py: ids that its kernels hash and prefetch at a time
# From this many occurrences of an id on average, sorting the bags by row is faster than `merge`
# (benchmarks/README.md).
_REPEATS = 2
_SUMS_BYTES = (
    256 << 10
)  # of the block of sums that `BagSums` makes at a time: it stays in a core's own cache
_LINE = 64  # bytes of a cache line
_FEW = 64  # a Python set of up to this many ids is faster than the call of a kernel
_ZERO = np.zeros((), np.float32)
_LARGEST = float(np.finfo(np.float32).max) / 2  # half of it, because sums of squares are rounded
_PLACES = np.arange(_FEW, dtype=np.uint32)  # codes of a short batch that repeats no id
_PLACES.flags.writeable = False
_scratch = threading.local()

# Kernels of row_sums.py that batches use. Both are always loaded together, because a module with `merge`
# alone would be compiled and cached in addition.
_ROW_SUMS = "expand", "merge"

Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


class UniqueIds:
    """Distinct ids of one batch of n ids, sorted by group. A group is the ids of one server.

    Example:
        >>> batch = dedup(np.array([7, 3, 7]), 1)
        >>> batch.unique, batch.inverse
        ([array([7, 3])], array([0, 1, 0], dtype=uint32))
        >>> batch.merge(np.array([[1.0], [2.0], [4.0]], np.float32))
        [array([[5.],
               [2.]], dtype=float32)]

    Attributes:
        unique: Distinct ids of each group in the order of first occurrence, a list of int64 arrays.
        inverse: Code of each id of the batch, uint32 [n]: group << shift | position in `unique[group]`.
        shift: Number of bits of a position in `inverse`.
        is_plain: True if the rows of the distinct ids are the rows of the batch, because there is one group
            and no repeated id. May be False for such a batch if it is long.
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
        """Copy the rows of the distinct ids to one row for each id of the batch, float32 [n, dim].

        Args:
            rows: For each group (server), the rows of its distinct ids, float32 [distinct ids, dim].
        """
        dim, rows = rows[0].shape[1], self._checked(rows)
        # A copy, because rows of a pull lie in shared memory or in a message, which are used again.
        if self.is_plain:
            return rows[0].copy()
        count = len(self.inverse)
        out = np.empty((count, dim), np.float32)
        width_kernels("row_sums", dim, *_ROW_SUMS).expand(
            address_of(self.inverse), count, self.shift, _addresses(rows), address_of(out)
        )
        return out

    def _checked(self, rows: Sequence[Floats]) -> list[Floats]:
        """Return contiguous arrays of the rows; raise ShapeError unless each distinct id has one row."""
        dim = rows[0].shape[1]
        for distinct_ids, group_rows in zip(self.unique, rows, strict=True):
            if group_rows.shape != (len(distinct_ids), dim):
                raise ShapeError(
                    f"rows have shape {group_rows.shape}, they must be {(len(distinct_ids), dim)}"
                )
        return [_plain(array) for array in rows]

    def pool(self, rows: Sequence[Floats], bags: Sequence[RowBags]) -> Floats:
        """Expand the rows to the batch and pool them by bag, in one pass: float32 [all bags, dim].

        The result is bit-identical to that of `expand` followed by `RowBags.pool`, without the array in
        between.

        Args:
            rows: For each group (server), the rows of its distinct ids, as for `expand`.
            bags: Bags of the batch's ids, one `RowBags` for each feature of the table. The ids of the first
                feature come first in the batch.
        """
        if _are_rows(bags):
            return self.expand(rows)
        dim, rows = rows[0].shape[1], self._checked(rows)
        return self._pooled(dim, self.shift, _addresses(rows), bags)

    def pool_at(self, addresses: Ids, dim: int, bags: Sequence[RowBags]) -> Floats:
        """Pool rows as `pool` does, of one group (server), reading each row where it lies.

        Args:
            addresses: Address of the row of each distinct id, float32 [dim].
            dim: Number of values of a row.
            bags: As for `pool`.
        """
        # A code is the position of an id here, as there is one group. With a shift of 0, kernels take each
        # position for a group, whose rows begin at an address of its own.
        return self._pooled(dim, 0, address_of(addresses), bags)

    def _pooled(self, dim: int, shift: int, starts: int, bags: Sequence[RowBags]) -> Floats:
        """Pool the rows of codes. `starts`: address of an array with the address of each group's rows."""
        out = np.empty((sum(map(len, bags)), dim), np.float32)
        kernels = width_kernels("bag_rows", dim)
        for codes, part, target in self._parts(bags, out):
            if part.are_rows:
                destination = shift, starts, address_of(target)
                width_kernels("row_sums", dim, *_ROW_SUMS).expand(
                    address_of(codes), len(codes), *destination
                )
            else:
                kernels.pool(
                    *(address_of(codes), len(codes), shift, starts),
                    *(*part.arguments, address_of(target)),
                )
        return out

    def _parts(
        self, bags: Sequence[RowBags], values: Floats
    ) -> Iterator[tuple[NDArray[np.uint32], RowBags, Floats]]:
        """Yield each feature's codes, bags and slice of `values`, float32 [all bags, dim]."""
        self._check_bags(bags)
        row = bag = 0
        for part in bags:
            yield self.inverse[row : row + part.rows], part, values[bag : bag + len(part)]
            row, bag = row + part.rows, bag + len(part)

    def _check_bags(self, bags: Sequence[RowBags]) -> None:
        """Raise ShapeError unless the bags together have all ids of the batch."""
        count = sum(part.rows for part in bags)
        if count != len(self.inverse):
            raise ShapeError(f"bags of {count} ids in all got {len(self.inverse)} ids")

    def merge(self, gradients: Floats, bags: Sequence[RowBags] | None = None) -> list[Floats]:
        """Sum the gradients of each distinct id; return float32 [distinct ids, dim] for each group (server).

        Gradients are added in the order of the batch, so the bits do not depend on the number of servers.

        Args:
            gradients: Gradients of the batch's rows, float32 [n, dim], or of its bags, float32 [all bags,
                dim].
            bags: Bags as for `pool`, or None for gradients of rows.
        """
        dim = gradients.shape[1] if gradients.ndim == 2 else 1  # `merge_into` refuses others
        sums = [np.empty((len(distinct_ids), dim), np.float32) for distinct_ids in self.unique]
        self.merge_into(gradients, sums, bags)
        return sums

    def merge_into(
        self, gradients: Floats, sums: Sequence[Floats], bags: Sequence[RowBags] | None = None
    ) -> None:
        """Sum the gradients of each distinct id as `merge` does, into arrays of the caller.

        Args:
            gradients, bags: As for `merge`.
            sums: For each group (server), a contiguous array to overwrite, float32 [distinct ids, dim].

        Raises:
            ShapeError: The gradients are not one row for each id, or each bag, as wide as the sums.
        """
        count, dim = len(self.inverse) if bags is None else sum(map(len, bags)), sums[0].shape[1]
        # Kernels write to the sums by address, in rows as wide as the gradients'.
        if gradients.shape != (count, dim):
            raise ShapeError(f"gradients have shape {gradients.shape}, they must be {(count, dim)}")
        if self.is_plain and bags is None:
            # An addition of 0 and not a copy, because kernels start each sum at 0, and 0 + -0 is 0. A copy
            # would keep -0 here alone.
            np.add(gradients, _ZERO, sums[0])
            return
        if bags is not None and len(self.inverse) >= _REPEATS * sum(map(len, self.unique)):
            later = self.sums_later(gradients, bags)
            if later is not None:
                for group, group_sums in enumerate(sums):
                    later.write(group_sums, group)
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
        """Add the gradients of bags to the sums of their ids. `target` is a result of `_not_begun`."""
        width_kernels("bag_rows", values.shape[1]).merge(
            *(address_of(codes), len(codes), self.shift, address_of(values)),
            *(*part.arguments, target),
        )

    def sums_later(self, gradients: Floats, bags: Sequence[RowBags]) -> "BagSums | None":
        """Return the sums that `merge` would return, not yet computed, or None if rows have weights.

        Args:
            gradients, bags: As for `merge`. The gradients must not change until the sums have been read.
        """
        self._check_bags(bags)
        if not bags or any(part.weights is not None for part in bags):
            return None
        return BagSums(self, _plain(gradients), bags)


class BagSums:
    """Sums of the gradients of bags by distinct id, computed when they are read, one block of rows at a time.

    A table that updates a block of rows from its sums just after they are made reads them from the nearest
    caches. An array of all sums would be written to memory and read from there twice: for the check of
    infinities, and for the update. Use it where an array would do: `np.asarray` computes all sums.

    Attributes:
        gradients: Gradients of the bags, float32 [all bags, dim].
        shape: Number of distinct ids, and dim.
        square: Sum of the squares of all sums that `blocks` has returned so far.
    """

    dtype = np.dtype(np.float32)

    def __init__(self, ids: UniqueIds, gradients: Floats, bags: Sequence[RowBags]) -> None:
        counts, dim = list(map(len, ids.unique)), gradients.shape[1]
        codes, rows = ids.inverse, sum(counts)
        self.gradients, self.shape, self.square = gradients, (rows, dim), 0.0
        self._firsts = firsts = np.array([*itertools.accumulate(counts, initial=0)], np.int64)
        joined = bags[0] if len(bags) == 1 else joined_bags(bags)
        ends, bag_count, _, scales = joined.arguments
        base = np.array([address_of(gradients)], np.int64)
        work = np.empty(rows + 2 + len(codes), np.uint32)
        kernels = width_kernels("bag_rows", dim)
        kernels.sort_bags(
            *(address_of(codes), len(codes), ids.shift, ends, bag_count),
            *(address_of(firsts), len(counts), address_of(work)),
        )
        self._arrays = base, work, joined  # keeps alive what the kernel has the addresses of
        self._n, self._sum_sorted = len(codes), kernels.sum_sorted
        self._sorted = address_of(work), rows, len(codes)
        self._gradients = address_of(base), scales

    def __len__(self) -> int:
        """Return the number of distinct ids."""
        return self.shape[0]

    @cached_property
    def are_surely_finite(self) -> bool:
        """True if no sum can overflow, because the gradients of the bags are so small. Reads those alone."""
        # An id occurs at most n times, and no value is above the norm. No scale is above 1 either: it is 1
        # over the length of a bag, since `sums_later` makes no sums of weighted rows.
        flat = self.gradients.reshape(-1)
        return bool(float(np.vdot(flat, flat)) ** 0.5 * self._n < _LARGEST)

    def blocks(self) -> Iterator[Floats]:
        """Return the sums of the distinct ids in order, float32 [rows, dim], as several blocks of rows.

        A block is valid until the next one, in the memory of which it is.
        """
        rows, dim = self.shape
        size = max(_SUMS_BYTES // (4 * dim), 1)
        buffer = _at_cache_lines(min(size, rows), dim)
        for start in range(0, rows, size):
            block = buffer[: min(size, rows - start)]
            self._sum(start, block)
            flat = block.reshape(-1)
            self.square += float(np.vdot(flat, flat))
            yield block

    def write(self, sums: Floats, group: int) -> None:
        """Write the sums of one group's (server's) distinct ids, float32 [distinct ids, dim], contiguous."""
        self._sum(int(self._firsts[group]), sums)

    def to_host(self) -> Floats:
        """Compute all sums, float32 [distinct ids, dim]."""
        sums = np.empty(self.shape, np.float32)
        self._sum(0, sums)
        return sums

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Floats:
        """Compute all sums for NumPy, which passes the arguments of `np.asarray`."""
        return self.to_host()

    def __getitem__(self, mask: NDArray[np.bool_]) -> Floats:
        """Compute all sums, and return those of the ids that the mask selects."""
        return self.to_host()[mask]

    def _sum(self, first: int, out: Floats) -> None:
        """Write the sums of as many rows as `out` has, from number `first` on."""
        last = first + len(out)
        self._sum_sorted(*self._sorted, first, last, *self._gradients, address_of(out))


def _at_cache_lines(rows: int, dim: int) -> Floats:
    """Return an array, float32 [rows, dim], that begins at a cache line.

    NumPy's arrays begin 16 bytes behind one, so that each load of a wide vector would read two lines.
    """
    buffer = np.empty(rows * dim + _LINE // 4, np.float32)
    skipped = -address_of(buffer) % _LINE // 4
    return buffer[skipped : skipped + rows * dim].reshape(rows, dim)


def dedup(ids: Ids, groups: int) -> UniqueIds:
    """Find the distinct ids of a batch and sort them by server.

    Args:
        ids: Ids of the batch, int64 [n], in any order and with any repeats.
        groups: Number of servers; `id_routing.routes` decides which server has an id.

    Raises:
        ShapeError: The batch is too long. A code has 32 bits for a server and a position, so the limit is
            2**31 - 1 ids for one or two servers, and halves each time the number of servers doubles.
    """
    # One server needs no bits, but `_route_codes` shifts 32-bit numbers, for which C defines no shift by 32.
    n, shift = len(ids), 32 - max(1, (groups - 1).bit_length())
    if n >= 1 << shift:
        raise ShapeError(
            f"a batch of {n} ids is too long for {groups} servers; the limit is {(1 << shift) - 1}"
        )
    if groups == 1 and n <= _FEW and len(set(ids.tolist())) == n:
        # A copy, because the result is cached for the push (`RecentBatches`), and the caller may change the
        # batch meanwhile.
        return UniqueIds([ids.copy()], _PLACES[:n], shift, is_plain=True)
    ids = _plain(ids)
    mask, (index, unique, codes, hashes) = _scratch_for(n)
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
        # A copy, because this thread's next batch overwrites the scratch.
        return UniqueIds([_scratch.buffers[1][:count].copy()], inverse, shift)
    # `unique` has the ids of all groups, mixed, in the order of first occurrence. Sort them by group.
    ends = [0, *itertools.accumulate(counts.tolist())]
    out, offsets = np.empty(count, np.int64), np.array(ends, np.int64)
    kernels.split(unique, codes, count, shift, address_of(offsets), address_of(out))
    # Slices instead of np.split, which takes 10 us for each table of a step.
    return UniqueIds([out[a:b] for a, b in itertools.pairwise(ends)], inverse, shift)


def load_batch_kernels(spec: TableSpec) -> None:
    """Load the kernels that batches of a sparse table need, so that the first pull and push do not wait.

    The first kernel of a process takes 0.4 s, and seconds if the cache is empty. Does nothing for a dense
    table.
    """
    # Not those of bags (bag_rows): a definition does not say whether the table's batches are pooled. With an
    # empty cache, tables whose batches are not would wait for kernels that they never call.
    if spec.kind == "sparse":
        static_kernels("dedup")
        for width in {spec.dim, spec.push_width}:
            width_kernels("row_sums", width, *_ROW_SUMS)


def first_repeat(ids: Ids) -> int | None:
    """Return the position of the first id that occurs earlier in the batch, or None if no id is repeated.

    This is much cheaper than `dedup`, because most ids need only one bit of a filter (`repeated` of
    sources/dedup.py).
    """
    n = len(ids)
    if n <= _FEW and len(set(ids.tolist())) == n:
        return None
    ids = _plain(ids)
    # The filter uses the memory that `dedup` uses for distinct ids, which is large enough: 64 bits per entry.
    mask, (index, bits, positions, hashes) = _scratch_for(n)
    filter_mask = _FILTER * (mask + 1) - 1
    position = static_kernels("dedup").repeated(
        address_of(ids), n, hashes, bits, filter_mask, positions, index, mask
    )
    return None if position < 0 else int(position)


def ascending(parts: Sequence[Ids]) -> Ids:
    """Return the distinct ids of these arrays in ascending order, int64.

    Sorting is ten times as fast as np.unique, which hashes the ids.
    """
    ids = np.sort(np.concatenate([*parts, np.zeros(0, np.int64)]))
    # The first id has no neighbour before it, so it is compared with another number.
    distinct: Ids = ids[np.diff(ids, prepend=ids[:1] - 1) != 0]
    return distinct


def merge_pushes(parts: Sequence[tuple[Ids, Floats]], scale: float) -> tuple[Ids, Floats]:
    """Merge several pushes into one: the union of their ids, and the sums of their rows, added in list order.

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
    """Return whether there is one feature whose bags are one row each, so that pooling changes nothing."""
    return len(bags) == 1 and bags[0].are_rows


def _add(inverse: NDArray[np.uint32], shift: int, rows: Floats, target: int) -> None:
    """Add rows to the sums of their codes. `target` is a result of `_not_begun`."""
    width_kernels("row_sums", rows.shape[1], *_ROW_SUMS).merge(
        address_of(inverse), len(inverse), shift, address_of(rows), target
    )


@cache
def _route_codes(groups: int, shift: int) -> NDArray[np.uint32]:
    """Return the server of each virtual shard as the kernel `dedup` takes it: uint32 [2 * virtual shards].

    A virtual shard is one of 1,024 classes of ids. The first half of the result has the number (group) of its
    server, and the second half the same number as the upper bits of a code.
    """
    table = routes(groups)
    return np.concatenate([table, table << np.uint32(shift)])


def _addresses(arrays: Sequence[Floats]) -> int:
    """Return the address of an array with the addresses of these arrays.

    The array is valid until this thread calls `_addresses` or `_not_begun` again.
    """
    words, address = _words(len(arrays))
    for i, array in enumerate(arrays):
        words[i] = address_of(array)
    return address


def _not_begun(sums: Sequence[Floats]) -> int:
    """Return the address of an array with (address, 0) for each of these sums. Kernels add to the sums.

    The second number counts the rows of a sum that have a value already. Positions count up in the order of
    first occurrence, so the first gradient of a row finds its position equal to the count. The kernel then
    writes the gradient instead of adding it, and the arrays need not be cleared. The array is valid as long
    as that of `_addresses`.
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


def _scratch_for(n: int) -> tuple[int, list[int]]:
    """Return this thread's scratch for a batch of n ids.

    Returns:
        Number of entries of the hash table less one, a bit mask, and the addresses of the hash table, the
        distinct ids, the codes, and the hashes of a block.
    """
    # At least two entries of the hash table for each id, so that searches are short. The other three numbers
    # of entries are then enough too. And at least 16 entries, because the kernel `repeated` clears a filter
    # of _FILTER bits for each entry by words of 64 bits. There are 256 at least, so that batches of up to 128
    # ids share one set of arrays. Other sizes have not been measured.
    mask = (1 << max(8, (2 * n - 1).bit_length())) - 1
    buffers = getattr(_scratch, "buffers", None)
    if buffers is None or len(buffers[0]) <= mask:
        buffers = [
            np.empty(mask + 1, np.uint32),
            np.empty(mask + 1, np.int64),
            np.empty(mask + 1, np.uint32),
            np.empty(_BLOCK, np.uint64),
        ]
        _scratch.buffers, _scratch.addresses = buffers, [address_of(array) for array in buffers]
    addresses: list[int] = _scratch.addresses
    return mask, addresses
