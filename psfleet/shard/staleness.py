"""Staleness of gradients on arrival.

The staleness of a push is the number of pushes of other workers that this server has applied since
it last gave its worker values: since the weights were read that the gradient is taken for. A worker
that reads ahead (psfleet.torch.prefetch) uses rows of the pull before; its figures are then too low by
what came in between.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_EXACT = 256  # beyond that only the power of two below is kept, so a histogram stays small


@dataclass
class StalenessHistogram:
    """A histogram over the pushes of one shard; costs two additions for each.

    Attributes:
        counts: Number of pushes by staleness; above 256 rounded down to a power of two.
    """

    counts: dict[int, int] = field(default_factory=dict)
    _applied: int = 0  # pushes of all workers
    _own: dict[int, int] = field(default_factory=dict)
    _seen: dict[int, int] = field(default_factory=dict)

    def pulled(self, worker: int) -> None:
        """The worker is given values."""
        self._seen[worker] = self._applied - self._own.get(worker, 0)

    def age(self, worker: int) -> int:
        """Return the staleness of the worker's next push if it is applied now."""
        others = self._applied - self._own.get(worker, 0)
        return others - self._seen.setdefault(worker, others)

    def pushed(self, worker: int) -> None:
        """A new push of the worker is applied."""
        own = self._own.get(worker, 0)
        others = self._applied - own
        age = others - self._seen.setdefault(worker, others)
        bucket = age if age < _EXACT else 1 << (age.bit_length() - 1)
        self.counts[bucket] = self.counts.get(bucket, 0) + 1
        self._applied += 1
        self._own[worker] = own + 1


def quantile(histograms: Iterable[Mapping[int, int]], share: float) -> int | None:
    """The staleness that so great a share of all pushes did not exceed; None: there were none."""
    total: dict[int, int] = {}
    for histogram in histograms:
        for age, count in histogram.items():
            total[age] = total.get(age, 0) + count
    rest = share * sum(total.values())
    for age in sorted(total):
        rest -= total[age]
        if rest <= 0:
            return age
    return None
