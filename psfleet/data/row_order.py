"""Order in which an epoch reads the rows of files: one block (batch) at a time, from a few row groups in
turn.

The positions of `fleet.dataset` are positions in this order. The order depends only on the sizes of the row
groups, the batch size, the seed and the epoch. So every worker, and a job that resumes, reads the same row
at the same position. Row groups are read in windows of `interleave` groups. An example with three groups,
windows of 2 groups and blocks of 4 rows:

    group 0: 10 rows    group 1: 8 rows    group 2: 6 rows

    0[0:4]  1[0:4]  0[4:8]  1[4:8]  2[0:4]  0[8:10]  2[4:6]
    |-- window of groups 0, 1 ---|  | 2  |  |-remainders--|

docs/decisions/0023-order-of-rows.md has the reasons, and the alternatives that were rejected.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows `low` to `high` - 1 of a row group. Rows are numbered in the epoch's order of the group."""

    group: int
    low: int
    high: int


class RowSequence:
    """Order of the rows in one epoch.

    `interleave` row groups at a time form a window, and their blocks of `batch_size` rows are read in turn.
    In sync mode workers take blocks in turn too. So if `interleave` is a multiple of the number of workers,
    each worker always reads from the same groups of a window, and no two workers decode the same group. The
    rows left at the end of a group, fewer than a block, come at the end of the epoch. So all earlier blocks
    are full, each from a single group, and each worker takes exactly one block in each round of sync mode.

    Args:
        sizes: Number of rows of each row group.
        batch_size: Number of rows in a block.
        interleave: Number of row groups in a window.
        seed: Seed that shuffles the groups and the rows within each group, or None for the order of the
            files.
        epoch: Number of the epoch. With a seed, each epoch has another order.
    """

    def __init__(
        self, sizes: Sequence[int], batch_size: int, interleave: int, seed: int | None, epoch: int
    ) -> None:
        self._block, self._seed, self._epoch = batch_size, seed, epoch
        self._sizes = np.asarray(sizes, np.int64)
        groups = np.arange(len(sizes)) if seed is None else self._dice(-1).permutation(len(sizes))
        self._groups, self._starts = self._blocks(groups, interleave)
        self._rests = groups[self._sizes[groups] % batch_size > 0]
        ends = np.cumsum(self._sizes[self._rests] % batch_size)
        self._full = len(self._groups) * batch_size
        self._ends = self._full + ends

    def _blocks(self, groups: Ids, interleave: int) -> tuple[Ids, Ids]:
        """Return for each full block of the epoch its group, and the first of its rows: two int64 arrays
        [blocks].
        """
        # Sort by window, then by block within the group, then by group. This takes the groups of a window
        # in turn.
        counts = self._sizes[groups] // self._block
        window = np.repeat(np.arange(len(groups)) // interleave, counts)
        group_ranks = np.repeat(np.arange(len(groups)), counts)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        order = np.lexsort((group_ranks, within, window))
        return groups[group_ranks[order]], within[order] * self._block

    def _dice(self, group: int) -> np.random.Generator:
        assert self._seed is not None
        return np.random.default_rng((abs(self._seed), self._seed < 0, self._epoch, group + 1))

    def rows_of(self, group: int) -> Ids:
        """Return the order of a group's rows in a shuffled epoch, as numbers of rows in the file, int64
        [rows].
        """
        return self._dice(group).permutation(self._sizes[group])

    def ranges(self, low: int, high: int) -> Iterator[RowRange]:
        """Yield the rows at the positions `low` to `high` - 1 of the epoch, as one range after the other."""
        while low < high:
            rows, length = self._at(low)
            count = min(length, high - low)
            yield RowRange(rows.group, rows.low, rows.low + count)
            low += count

    def _at(self, position: int) -> tuple[RowRange, int]:
        """Return the rows from this position to the end of its block, and the number of these rows.

        The rows left at the end of a group, fewer than a block, count as a block too.
        """
        if position < self._full:
            block, skip = divmod(position, self._block)
            group, first = int(self._groups[block]), int(self._starts[block])
            return RowRange(group, first + skip, first + self._block), self._block - skip
        index = int(np.searchsorted(self._ends, position, side="right"))
        group = int(self._rests[index])
        end, remaining_rows = int(self._sizes[group]), int(self._ends[index]) - position
        return RowRange(group, end - remaining_rows, end), remaining_rows
