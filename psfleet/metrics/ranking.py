"""Metrics of the order of samples within each user or query.

All samples of a group come in one batch; a group that comes again counts as another one. So the state
stays small however many groups there are. A group has the slice and the user of its first sample.

Where predictions of a group are equal, each value is the exact mean over all orders of them: McSherry and
Najork, "Computing information retrieval performance measures efficiently in the presence of tied
scores", ECIR 2008.
"""

import math
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from psfleet.core.base.errors import ShapeError
from psfleet.core.base.validation.annotations import NonNegativeInt, PositiveInt, checked
from psfleet.metrics.streaming_metric import Batch, Metric, sums_by_slice

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]


class _Groups:
    """Samples side by side by group, in a group by falling prediction; ties by item, or as they came.

    Attributes:
        predictions, labels, weights: float64 [n], in that order.
        starts: int64 [groups]: where each group begins.
        slices: int64 [groups], or None if all groups are in slice 0.
        users: int64 [groups], or None if unknown.
        items: int64 [n], in that order, or None if unknown.
    """

    def __init__(self, batch: Batch) -> None:
        assert batch.groups is not None
        items = () if batch.items is None else (batch.items,)
        order = np.lexsort((*items, -batch.predictions, batch.groups))
        groups = batch.groups[order]
        self.predictions, self.labels = batch.predictions[order], batch.labels[order]
        self.weights = np.ones(len(batch)) if batch.weights is None else batch.weights[order]
        self.starts: Ids = _starts(groups)
        first = np.minimum.reduceat(order, self.starts) if len(order) else order
        self.slices = None if batch.slices is None else batch.slices[first]
        self.users = None if batch.users is None else batch.users[first]
        self.items = None if batch.items is None else batch.items[order]

    @cached_property
    def of_sample(self) -> Ids:
        """Number of each sample's group, int64 [n]."""
        return np.repeat(np.arange(len(self.starts)), self.lengths)

    @cached_property
    def lengths(self) -> Ids:
        """Number of samples of each group."""
        return np.diff(self.starts, append=len(self.labels))

    @cached_property
    def ranks(self) -> Ids:
        """Rank of each sample in its group, counted from 0."""
        return np.arange(len(self.labels)) - self.starts[self.of_sample]

    @cached_property
    def ties(self) -> Ids:
        """Start of each run of equal predictions of one group."""
        return _starts(self.of_sample, self.predictions)

    def sums(self, values: Floats) -> Floats:
        """Return the sum of values, [n], over each group."""
        totals = np.bincount(self.of_sample, values, minlength=len(self.starts))
        return np.asarray(totals, np.float64)

    @property
    def mean_weights(self) -> Floats:
        """The mean weight of each group's samples."""
        return self.sums(self.weights) / self.lengths


def _starts(*keys: NDArray[Any]) -> Ids:
    """Return the positions at which a new value begins in any of the keys [n]."""
    begins = np.ones(len(keys[0]), np.bool_)
    if len(begins):
        begins[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return np.flatnonzero(begins)


@checked
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
        """Return the weight of each group, 0 if it does not count, and its value."""
        raise NotImplementedError

    def score(self, sums: Floats) -> float:
        return float(sums[1] / sums[0]) if sums[0] else math.nan


@checked
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
        above = _before(minus, owner) + minus / 2  # negatives that stand at or before the positives
        area = np.bincount(owner, plus * above, minlength=len(pairs))
        loss = np.divide(area, pairs, out=np.ones(len(pairs)), where=pairs > 0)
        return groups.sums(groups.weights) * (pairs > 0), 1 - loss


def _before(values: Floats, owner: Ids) -> Floats:
    """Return for each value the sum of the earlier values of the same owner."""
    total = np.cumsum(values) - values
    starts = _starts(owner)
    first: Floats = np.repeat(total[starts], np.diff(starts, append=len(values)))
    return total - first


@checked
class _TopMetric(_GroupMetric):
    """A mean over groups, or over users of the mean of each one's groups, of the k highest predictions.

    Args:
        k: Number of samples at the top.
        name: Label of the results.
        users: Number of users. Each then weighs the same: the value is the mean over users of the weighted
            mean of all groups of a user, in whichever batches and workers these come. The state has two
            sums for each user. 0 if all groups weigh the same.
    """

    def __init__(self, k: PositiveInt, name: str | None = None, users: NonNegativeInt = 0) -> None:
        self.k, self.users = k, users
        self.size = 2 * max(users, 1)
        super().__init__(name or f"{self.default_name}@{k}")

    @override
    def layout(self) -> str:
        return f"{super().layout()} {self.k} {self.users}"

    @override
    def check(self, batch: Batch) -> None:
        super().check(batch)
        if self.users:
            _check_numbers(self.name, "users", batch.users, self.users)

    @override
    def sums_of(self, batch: Batch) -> Floats:
        if not self.users:
            return super().sums_of(batch)
        groups = _Groups(batch)
        weights, values = self.measure(groups)
        return _counted(self, groups.users, [weights, weights * values], groups.slices)

    @override
    def score(self, sums: Floats) -> float:
        weights, weighted = sums.reshape(-1, 2).T
        mask = weights > 0
        return float(np.mean(weighted[mask] / weights[mask])) if mask.any() else math.nan


def _check_numbers(name: str, what: str, numbers: Ids | None, count: int) -> None:
    """Refuse a batch whose users or items are missing or out of range."""
    if numbers is None:
        raise ShapeError(f"{name} needs the {what} of the samples; pass {what}=")
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < count:
        raise ShapeError(
            f"{name}: {what} are {numbers.min()} to {numbers.max()}; it was made for {count} {what}, "
            f"0 to {count - 1}"
        )


def _counted(
    metric: Metric, numbers: Ids | None, columns: list[Floats], slices: Ids | None
) -> Floats:
    """Sums of columns [n] by slice and number, float64 [slices, size]."""
    assert numbers is not None
    count = metric.size // len(columns)
    sum_indices = numbers if slices is None else slices * count + numbers
    return sums_by_slice(columns, sum_indices, len(metric.sums) * count).reshape(metric.sums.shape)


@checked
class Recall(_TopMetric):
    """recall@k: the mean share of a group's positives that are among its k highest predictions.

    A group weighs as its samples do on average; one without positives is left out.
    """

    default_name = "recall"

    def measure(self, groups: _Groups) -> tuple[Floats, Floats]:
        truth = (groups.labels > 0).astype(np.float64)
        positives = groups.sums(truth)
        ties, owner = groups.ties, groups.of_sample[groups.ties]
        if not len(ties):
            return positives, positives
        sizes = np.diff(ties, append=len(truth))
        inside = np.clip(self.k - groups.ranks[ties], 0, sizes) / sizes
        hits = np.bincount(owner, np.add.reduceat(truth, ties) * inside, minlength=len(positives))
        return groups.mean_weights * (positives > 0), hits / np.maximum(positives, 1)


@checked
class _FirstHit(_TopMetric):
    """Depends on the rank of a group's first positive alone; a group without one counts 0."""

    @override
    def measure(self, groups: _Groups) -> tuple[Floats, Floats]:
        truth = (groups.labels > 0).astype(np.float64)
        values, ties = np.zeros(len(groups.starts)), groups.ties
        if not len(ties):
            return values, values
        hits = np.add.reduceat(truth, ties)
        runs = np.flatnonzero(hits)
        owners, firsts = np.unique(groups.of_sample[ties[runs]], return_index=True)
        runs = runs[firsts]
        # m positives among the t samples that share the places after `before`.
        t, m = np.diff(ties, append=len(truth))[runs], hits[runs]
        before, remaining = groups.ranks[ties[runs]], np.ones(len(runs))
        for x in range(min(self.k, int(t.max(initial=0)))):
            candidates = np.maximum(t - x, 1)
            chance = remaining * np.minimum(m / candidates, 1)  # that the first one stands here
            values[owners] += chance * self._gain(before + x + 1)
            remaining -= chance
            if not remaining.any():
                break
        return groups.mean_weights, values

    def _gain(self, ranks: Ids) -> Floats:
        """Return the value of groups whose first positives have these ranks, counted from 1."""
        raise NotImplementedError


@checked
class HitRate(_FirstHit):
    """HR@k: the mean over groups of 1 if a positive is among the k highest predictions, else 0.

    Deshpande and Karypis, "Item-based top-N recommendation algorithms", ACM TOIS 22(1), 2004. A group
    weighs as its samples do on average.
    """

    default_name = "hr"

    @override
    def _gain(self, ranks: Ids) -> Floats:
        return (ranks <= self.k).astype(np.float64)


@checked
class MRR(_FirstHit):
    """MRR@k: the mean over groups of 1 / rank of the first positive, 0 beyond rank k.

    Voorhees, "The TREC-8 question answering track report", TREC 1999. A group weighs as its samples do on
    average.
    """

    default_name = "mrr"

    @override
    def _gain(self, ranks: Ids) -> Floats:
        return (ranks <= self.k) / ranks


@checked
class Coverage(_GroupMetric):
    """Catalogue coverage: the share of all items that are among the k highest predictions of any group.

    Ge, Delgado-Battenfeld and Jannach, "Beyond accuracy: evaluating recommender systems by coverage and
    serendipity", RecSys 2010. Of equal predictions the smaller item number comes first. Groups of weight 0 do
    not count; labels do not matter. The state is a count for each item.

    Args:
        k: Number of samples at the top.
        items: Number of items of the catalogue.
        name: Label of the results.
    """

    default_name = "coverage"

    def __init__(self, k: PositiveInt, items: PositiveInt, name: str | None = None) -> None:
        self.k, self.size = k, items
        super().__init__(name or f"{self.default_name}@{k}")

    @override
    def layout(self) -> str:
        return f"{super().layout()} {self.k}"

    @override
    def check(self, batch: Batch) -> None:
        super().check(batch)
        _check_numbers(self.name, "items", batch.items, self.size)

    @override
    def sums_of(self, batch: Batch) -> Floats:
        groups = _Groups(batch)
        at_top = (groups.ranks < self.k) & (groups.mean_weights > 0)[groups.of_sample]
        slices = None if groups.slices is None else groups.slices[groups.of_sample]
        return _counted(self, groups.items, [at_top.astype(np.float64)], slices)

    @override
    def score(self, sums: Floats) -> float:
        return np.count_nonzero(sums) / self.size if sums.any() else math.nan


@checked
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
        dcg = np.bincount(groups.of_sample[ties], gains, minlength=len(ideal))
        ratios = np.divide(dcg, ideal, out=np.zeros(len(ideal)), where=ideal > 0)
        return groups.mean_weights, ratios
