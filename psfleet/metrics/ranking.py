"""How well predictions order the samples of each user or query.

All samples of a group come in one batch; a group that comes again counts as another one. So the state
stays small however many groups there are. A group is in the slice of its first sample.
"""

import math
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import ConfigError, ShapeError
from psfleet.metrics.streaming_metric import Batch, Metric, sums_by_slice

__all__ = ["NDCG", "GroupAuc", "Recall"]

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


class _Groups:
    """Samples side by side by group, in a group by falling prediction; ties as they came.

    Attributes:
        predictions, labels, weights: float64 [n], in that order.
        starts: int64 [groups]: where each group begins.
        slices: int64 [groups]; None: all are in slice 0.
    """

    def __init__(self, batch: Batch) -> None:
        assert batch.groups is not None
        order = np.lexsort((-batch.predictions, batch.groups))
        groups = batch.groups[order]
        self.predictions, self.labels = batch.predictions[order], batch.labels[order]
        self.weights = np.ones(len(batch)) if batch.weights is None else batch.weights[order]
        self.starts: Ids = _starts(groups)
        first = np.minimum.reduceat(order, self.starts) if len(order) else order
        self.slices = None if batch.slices is None else batch.slices[first]

    @cached_property
    def of_sample(self) -> Ids:
        """The number of each sample's group."""
        return np.repeat(np.arange(len(self.starts)), self.lengths)

    @cached_property
    def lengths(self) -> Ids:
        """Samples of each group."""
        return np.diff(self.starts, append=len(self.labels))

    @cached_property
    def ranks(self) -> Ids:
        """The place of each sample in its group, from 0."""
        return np.arange(len(self.labels)) - self.starts[self.of_sample]

    @cached_property
    def ties(self) -> Ids:
        """Where each run of equal predictions of one group begins."""
        return _starts(self.of_sample, self.predictions)

    def sums(self, values: Floats) -> Floats:
        """The sum over each group."""
        found = np.bincount(self.of_sample, values, minlength=len(self.starts))
        return np.asarray(found, np.float64)

    @property
    def mean_weights(self) -> Floats:
        """The mean weight of each group's samples."""
        return self.sums(self.weights) / self.lengths


def _starts(*keys: NDArray[Any]) -> Ids:
    """Where a new value begins in any of the keys [n]."""
    changed = np.ones(len(keys[0]), np.bool_)
    if len(changed):
        changed[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return np.flatnonzero(changed)


class _GroupMetric(Metric):
    """The weighted mean over groups."""

    size = 2

    def check(self, batch: Batch) -> None:
        super().check(batch)
        if batch.groups is None:
            raise ShapeError(f"{self.name} needs the group of each sample; pass groups=")

    def sums_of(self, batch: Batch) -> Floats:
        groups = _Groups(batch)
        weights, values = self.measure(groups)
        return sums_by_slice([weights, weights * values], groups.slices, len(self.sums))

    def measure(self, groups: _Groups) -> tuple[Floats, Floats]:
        """The weight of each group, 0 for those that say nothing, and its value."""
        raise NotImplementedError

    def score(self, sums: Floats) -> float:
        return float(sums[1] / sums[0]) if sums[0] else math.nan


class GroupAuc(_GroupMetric):
    """GAUC: the mean of the exact AUC of each group, weighted by the weights of its samples.

    Zhu et al., "Optimized cost per click in Taobao display advertising", KDD 2017. Groups in which all
    labels are equal have no AUC and are left out.
    """

    default_name = "gauc"

    def measure(self, groups: _Groups) -> tuple[Floats, Floats]:
        truth = groups.labels > 0
        positive, negative = groups.weights * truth, groups.weights * ~truth
        pairs = groups.sums(positive) * groups.sums(negative)
        if not len(pairs):
            return pairs, pairs
        ties = groups.ties
        plus, minus = np.add.reduceat(positive, ties), np.add.reduceat(negative, ties)
        owner = groups.of_sample[ties]
        lost = _before(minus, owner) + minus / 2  # negatives that stand at or before the positives
        area = np.bincount(owner, plus * lost, minlength=len(pairs))
        found = np.divide(area, pairs, out=np.ones(len(pairs)), where=pairs > 0)
        return groups.sums(groups.weights) * (pairs > 0), 1 - found


def _before(values: Floats, owner: Ids) -> Floats:
    """The sum of the earlier values of the same owner."""
    total = np.cumsum(values) - values
    starts = _starts(owner)
    first: Floats = np.repeat(total[starts], np.diff(starts, append=len(values)))
    return total - first


class _TopMetric(_GroupMetric):
    """Looks at the k highest predictions of a group.

    Args:
        k: How many.
        name: How results are labelled.
    """

    def __init__(self, k: int, name: str | None = None) -> None:
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise ConfigError(f"k is {k!r}; it must be a whole number above 0")
        self.k = k
        super().__init__(name or f"{self.default_name}@{k}")

    def layout(self) -> str:
        return f"{super().layout()} {self.k}"


class Recall(_TopMetric):
    """recall@k: the mean share of a group's positives that are among its k highest predictions.

    Ties are broken in the order in which samples came. A group weighs as its samples do on average; one
    without positives is left out.
    """

    default_name = "recall"

    def measure(self, groups: _Groups) -> tuple[Floats, Floats]:
        truth = (groups.labels > 0).astype(np.float64)
        positives = groups.sums(truth)
        hits = groups.sums(truth * (groups.ranks < self.k))
        return groups.mean_weights * (positives > 0), hits / np.maximum(positives, 1)


class NDCG(_TopMetric):
    """NDCG@k: the mean over groups of DCG@k divided by that of the best order.

    DCG@k is the sum of label / log2(rank + 1) over the ranks 1 to k, equal predictions sharing the mean of
    their labels (Jarvelin and Kekalainen, "Cumulated gain-based evaluation of IR techniques", ACM TOIS
    20(4), 2002; ties: McSherry and Najork, ECIR 2008). A group weighs as its samples do on average; one
    without a label above 0 counts 0. Labels are at least 0.
    """

    default_name = "ndcg"

    def check(self, batch: Batch) -> None:
        super().check(batch)
        if len(batch) and batch.labels.min() < 0:
            raise ShapeError(f"{self.name}: label {batch.labels.min()} is negative")

    def measure(self, groups: _Groups) -> tuple[Floats, Floats]:
        discounts = np.where(groups.ranks < self.k, 1 / np.log2(groups.ranks + 2.0), 0)
        best = groups.labels[np.lexsort((-groups.labels, groups.of_sample))]
        ideal = groups.sums(best * discounts)
        ties = groups.ties
        if not len(ties):
            return ideal, ideal
        shared = np.add.reduceat(groups.labels, ties) / np.diff(ties, append=len(groups.labels))
        gains = shared * np.add.reduceat(discounts, ties)
        gained = np.bincount(groups.of_sample[ties], gains, minlength=len(ideal))
        found = np.divide(gained, ideal, out=np.zeros(len(ideal)), where=ideal > 0)
        return groups.mean_weights, found
