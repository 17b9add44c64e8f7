"""Ranking metrics: they judge the order of the samples within each group, such as the items shown to a user.

All samples of a group must be in the same batch. A group with the same number in a later batch is a new
group, so the metrics need no memory for groups. A group has the slice and the user of its first sample.

If predictions in a group are equal, the value is the exact mean over all orders of these samples: McSherry
and Najork, "Computing information retrieval performance measures efficiently in the presence of tied
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
    """Samples of a batch, sorted by group and within a group by falling prediction.

    Samples with equal predictions are sorted by item or, without items, keep their order.

    Attributes:
        predictions, labels, weights: float64 [n], sorted.
        starts: Position of the first sample of each group, int64 [groups].
        slices: Slice of each group, int64 [groups], or None if all groups are in slice 0.
        users: User of each group, int64 [groups], or None if unknown.
        items: Item of each sample, int64 [n], sorted, or None if unknown.
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
        """Number of the group of each sample, int64 [n]."""
        return np.repeat(np.arange(len(self.starts)), self.lengths)

    @cached_property
    def lengths(self) -> Ids:
        """Number of samples in each group, int64 [groups]."""
        return np.diff(self.starts, append=len(self.labels))

    @cached_property
    def ranks(self) -> Ids:
        """Rank of each sample in its group, from 0, int64 [n]."""
        return np.arange(len(self.labels)) - self.starts[self.of_sample]

    @cached_property
    def ties(self) -> Ids:
        """Position of the first sample of each run of equal predictions in a group."""
        return _starts(self.of_sample, self.predictions)

    def sums(self, values: Floats) -> Floats:
        """Return the sum of the values [n] of each group's samples, float64 [groups]."""
        totals = np.bincount(self.of_sample, values, minlength=len(self.starts))
        return np.asarray(totals, np.float64)

    @property
    def mean_weights(self) -> Floats:
        """Mean weight of the samples of each group, float64 [groups]."""
        return self.sums(self.weights) / self.lengths


def _starts(*keys: NDArray[Any]) -> Ids:
    """Return the positions at which the value of at least one key [n] differs from the previous position."""
    begins = np.ones(len(keys[0]), np.bool_)
    if len(begins):
        begins[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return np.flatnonzero(begins)


@checked
class _GroupMetric(Metric):
    """Base of metrics that are a weighted mean of a value of each group."""

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
        """Return the weight and the value of each group. The weight is 0 for a group to leave out."""
        raise NotImplementedError

    def score(self, sums: Floats) -> float:
        return float(sums[1] / sums[0]) if sums[0] else math.nan


@checked
class GroupAuc(_GroupMetric):
    """GAUC: mean of the exact AUC of each group. A group's weight is the sum of its samples' weights.

        gauc = GroupAuc()
        gauc.update(predictions, labels, groups=user_ids)

    Groups in which all labels are equal have no AUC and are left out. From Zhu et al., "Optimized cost per
    click in Taobao display advertising", KDD 2017.
    """

    default_name = "gauc"

    def measure(self, groups: _Groups) -> tuple[Floats, Floats]:
        truth = groups.labels > 0
        positive, negative = groups.weights * truth, groups.weights * ~truth
        pairs = groups.sums(positive) * groups.sums(negative)
        if not len(pairs):
            return pairs, pairs
        # Each run of equal predictions has the weight `plus` of positives and `minus` of negatives. A pair
        # is lost if the negative ranks above the positive, and half lost if both are in the same run. AUC
        # is 1 - the lost share.
        ties = groups.ties
        plus, minus = np.add.reduceat(positive, ties), np.add.reduceat(negative, ties)
        owner = groups.of_sample[ties]
        above = _before(minus, owner) + minus / 2  # negatives ranked above the positives, ties half
        area = np.bincount(owner, plus * above, minlength=len(pairs))
        loss = np.divide(area, pairs, out=np.ones(len(pairs)), where=pairs > 0)
        return groups.sums(groups.weights) * (pairs > 0), 1 - loss


def _before(values: Floats, owner: Ids) -> Floats:
    """Return, for each value, the sum of the earlier values of the same owner. Owners must be sorted."""
    total = np.cumsum(values) - values
    starts = _starts(owner)
    first: Floats = np.repeat(total[starts], np.diff(starts, append=len(values)))
    return total - first


@checked
class _TopMetric(_GroupMetric):
    """Base of metrics of the k highest predictions of each group.

    Args:
        k: Number of samples with the highest predictions to consider.
        name: Label of the results.
        users: 0 to average over all groups. With a number of users, the value is first averaged over the
            groups of each user, in all batches and on all workers, and then over the users, so that each
            user has the same weight. This needs memory for two sums per user.
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


def _check_numbers(name: str, argument: str, numbers: Ids | None, count: int) -> None:
    """Raise ShapeError if the users or items of a batch are missing or out of range."""
    if numbers is None:
        raise ShapeError(f"{name} needs the {argument} of the samples; pass {argument}=")
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < count:
        raise ShapeError(
            f"{name}: {argument} are {numbers.min()} to {numbers.max()}; it was made for {count} {argument}, "
            f"0 to {count - 1}"
        )


def _counted(
    metric: Metric, numbers: Ids | None, columns: list[Floats], slices: Ids | None
) -> Floats:
    """Return the sums of columns [n] for each slice and each user or item, float64 [slices, size]."""
    assert numbers is not None
    count = metric.size // len(columns)
    sum_indices = numbers if slices is None else slices * count + numbers
    return sums_by_slice(columns, sum_indices, len(metric.sums) * count).reshape(metric.sums.shape)


@checked
class Recall(_TopMetric):
    """recall@k: share of a group's positives that are among its k highest predictions, averaged over groups.

        recall = Recall(10)
        recall.update(predictions, labels, groups=user_ids)

    A group's weight is the mean weight of its samples. Groups without positives are left out.
    """

    default_name = "recall"

    def measure(self, groups: _Groups) -> tuple[Floats, Floats]:
        truth = (groups.labels > 0).astype(np.float64)
        positives = groups.sums(truth)
        ties, owner = groups.ties, groups.of_sample[groups.ties]
        if not len(ties):
            return positives, positives
        # `inside` is the share of a run's places that are among the first k. In a random order of the run,
        # each of its samples is among the first k with this probability.
        sizes = np.diff(ties, append=len(truth))
        inside = np.clip(self.k - groups.ranks[ties], 0, sizes) / sizes
        hits = np.bincount(owner, np.add.reduceat(truth, ties) * inside, minlength=len(positives))
        return groups.mean_weights * (positives > 0), hits / np.maximum(positives, 1)


@checked
class _FirstHit(_TopMetric):
    """Base of metrics that depend only on the rank of a group's first positive. Without a positive the
    value is 0."""

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
        # The first positive is in a run of t samples with equal predictions, m of them positive. The run
        # begins after `before` samples. All orders of the run are equally likely, so it is at offset x with
        # the probability remaining * m / (t - x), where `remaining` is the probability that it is not at an
        # earlier offset.
        t, m = np.diff(ties, append=len(truth))[runs], hits[runs]
        before, remaining = groups.ranks[ties[runs]], np.ones(len(runs))
        for x in range(min(self.k, int(t.max(initial=0)))):
            candidates = np.maximum(t - x, 1)
            chance = remaining * np.minimum(m / candidates, 1)
            values[owners] += chance * self._gain(before + x + 1)
            remaining -= chance
            if not remaining.any():
                break
        return groups.mean_weights, values

    def _gain(self, ranks: Ids) -> Floats:
        """Return the values of groups, given the rank of the first positive of each, from 1."""
        raise NotImplementedError


@checked
class HitRate(_FirstHit):
    """HR@k: share of groups with a positive among the k highest predictions.

    A group's weight is the mean weight of its samples. From Deshpande and Karypis, "Item-based top-N
    recommendation algorithms", ACM TOIS 22(1), 2004.
    """

    default_name = "hr"

    @override
    def _gain(self, ranks: Ids) -> Floats:
        return (ranks <= self.k).astype(np.float64)


@checked
class MRR(_FirstHit):
    """MRR@k: mean over groups of 1 / rank of the first positive, or 0 if the rank is above k.

    A group's weight is the mean weight of its samples. From Voorhees, "The TREC-8 question answering track
    report", TREC 1999.
    """

    default_name = "mrr"

    @override
    def _gain(self, ranks: Ids) -> Floats:
        return (ranks <= self.k) / ranks


@checked
class Coverage(_GroupMetric):
    """Catalogue coverage: share of all items that are among the k highest predictions of at least one group.

        coverage = Coverage(10, items=50_000)
        coverage.update(predictions, labels, groups=user_ids, items=item_ids)

    Of equal predictions the smaller item number ranks first. Groups of weight 0 are left out, and labels
    have no effect. The metric stores a count for each item. From Ge, Delgado-Battenfeld and Jannach,
    "Beyond accuracy: evaluating recommender systems by coverage and serendipity", RecSys 2010.

    Args:
        k: Number of samples with the highest predictions to consider.
        items: Number of items in the catalogue.
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
    """NDCG@k: mean over groups of DCG@k, divided by the DCG@k of the best possible order.

        ndcg = NDCG(10)
        ndcg.update(predictions, relevances, groups=query_ids)

    DCG@k is the sum of label / log2(rank + 1) over the ranks 1 to k. Samples with equal predictions all get
    the mean of their labels. Labels must be at least 0. A group without a label above 0 has the value 0. A
    group's weight is the mean weight of its samples.

    From Jarvelin and Kekalainen, "Cumulated gain-based evaluation of IR techniques", ACM TOIS 20(4), 2002.
    Equal predictions as in McSherry and Najork, ECIR 2008.
    """

    default_name = "ndcg"

    def check(self, batch: Batch) -> None:
        super().check(batch)
        if len(batch) and batch.labels.min() < 0:
            raise ShapeError(f"{self.name}: label {batch.labels.min()} is negative")

    def measure(self, groups: _Groups) -> tuple[Floats, Floats]:
        discounts = np.where(groups.ranks < self.k, 1 / np.log2(groups.ranks + 2.0), 0)
        # `best` has each group's labels in falling order, which is the best possible order.
        best = groups.labels[np.lexsort((-groups.labels, groups.of_sample))]
        ideal = groups.sums(best * discounts)
        ties = groups.ties
        if not len(ties):
            return ideal, ideal
        # In a random order of a run, the mean label at each of its places is the mean of its labels.
        shared = np.add.reduceat(groups.labels, ties) / np.diff(ties, append=len(groups.labels))
        gains = shared * np.add.reduceat(discounts, ties)
        dcg = np.bincount(groups.of_sample[ties], gains, minlength=len(ideal))
        ratios = np.divide(dcg, ideal, out=np.zeros(len(ideal)), where=ideal > 0)
        return groups.mean_weights, ratios
