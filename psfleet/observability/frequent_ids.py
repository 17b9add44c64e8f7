"""The most frequent ids of a stream, in fixed memory.

A summary of Misra and Gries (1982) that is merged with the counts of whole batches, as in Agarwal et al.,
"Mergeable summaries", PODS 2012. It holds what SpaceSaving holds, less its overestimates.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["FrequentIds"]

Ids = NDArray[np.int64]


class FrequentIds:
    """Counts of at most `places` ids.

    A count is never too high, and too low by at most total / (places + 1): every id that makes up more
    than that share of the stream is held.

    Attributes:
        total: How many ids there were; those before a `fade` count less.
        ids: int64 [at most places].
        counts: float64, of each of them.
    """

    def __init__(self, places: int = 1024) -> None:
        self._places = places
        self.total = 0.0
        self.ids: Ids = np.zeros(0, np.int64)
        self.counts: NDArray[np.float64] = np.zeros(0)

    def add(self, ids: Ids) -> None:
        """Count the ids of a batch, int64 [n], with repeats."""
        distinct, counts = np.unique(ids, return_counts=True)
        merged, place = np.unique(np.concatenate([self.ids, distinct]), return_inverse=True)
        sums = np.zeros(len(merged))
        np.add.at(sums, place, np.concatenate([self.counts, counts]))
        if len(merged) > self._places:
            sums -= np.partition(sums, -self._places - 1)[-self._places - 1]
        kept = sums > 0
        self.ids, self.counts = merged[kept], sums[kept]
        self.total += len(ids)

    def fade(self, factor: float) -> None:
        """Let all that was counted so far weigh less."""
        self.total *= factor
        self.counts *= factor

    def share(self, count: int) -> float:
        """The share of the stream that the `count` most frequent ids make up; 0 without ids."""
        if not self.total:
            return 0.0
        top = np.sort(self.counts)[-count:]
        return float(top.sum() / self.total)

    def first(self) -> int | None:
        """The most frequent id; None: none is held."""
        return int(self.ids[self.counts.argmax()]) if len(self.ids) else None
