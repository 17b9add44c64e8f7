"""Order in which an epoch reads the rows of row groups: blocks of a batch, from some groups in turn.

Positions of `fleet.dataset` count rows in this order. It is a pure function of the groups' sizes, the batch
size, the seed and the epoch, so that every worker and a job that resumes read the same rows
(docs/decisions/0023-order-of-rows.md).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows `low` to `high` - 1 of a row group, counted in the order in which the epoch reads the group."""

    group: int
    low: int
    high: int


class RowSequence:
    """The order of one epoch.

    Row groups are read in windows of `interleave`, from which blocks of `batch_size` rows come in turn.
    In sync mode, where workers take such blocks in turn, each of `interleave` workers (or of a number that
    divides it) therefore reads row groups of its own, and no group is decoded in vain. What is left
    of each group, less than a block, comes at the end of the epoch, so that a block lies in one group.

    Args:
        sizes: Rows of each row group.
        batch_size: Rows of a block.
        interleave: Row groups of a window.
        seed: Shuffles the groups, and the rows within each; None: as they are.
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
        """The group of each whole block, and its first row."""
        counts = self._sizes[groups] // self._block
        window = np.repeat(np.arange(len(groups)) // interleave, counts)
        places = np.repeat(np.arange(len(groups)), counts)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        order = np.lexsort((places, within, window))
        return groups[places[order]], within[order] * self._block

    def _dice(self, group: int) -> np.random.Generator:
        assert self._seed is not None
        return np.random.default_rng((abs(self._seed), self._seed < 0, self._epoch, group + 1))

    def rows_of(self, group: int) -> Ids:
        """The rows of a group, in the order in which a shuffled epoch reads them."""
        return self._dice(group).permutation(self._sizes[group])

    def ranges(self, low: int, high: int) -> Iterator[RowRange]:
        """The rows at the positions `low` to `high` - 1 of the epoch, in order."""
        while low < high:
            rows, length = self._at(low)
            count = min(length, high - low)
            yield RowRange(rows.group, rows.low, rows.low + count)
            low += count

    def _at(self, position: int) -> tuple[RowRange, int]:
        """The rows from this position to the end of its block or rest, and their number."""
        if position < self._full:
            block, skip = divmod(position, self._block)
            group, first = int(self._groups[block]), int(self._starts[block])
            return RowRange(group, first + skip, first + self._block), self._block - skip
        place = int(np.searchsorted(self._ends, position, side="right"))
        group = int(self._rests[place])
        end, rest = int(self._sizes[group]), int(self._ends[place]) - position
        return RowRange(group, end - rest, end), rest
