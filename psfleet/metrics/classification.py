"""Metrics of single predictions: AUC, precision, recall, log loss, calibration, RMSE and accuracy.

Each metric is computed from sums over samples, so the order of batches and workers does not matter. AUC is
therefore computed from a histogram of the scores, with a bound of its distance from the exact value.
"""

import math
from abc import abstractmethod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ConfigError, ShapeError
from psfleet.core.base.validation.annotations import NonNegative, Numbers, PositiveInt, checked
from psfleet.metrics.streaming_metric import (
    Batch,
    Metric,
    finite_numbers,
    sums_by_slice,
    whole_numbers,
)

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
Spacing = Literal["linear", "logit"]

_REACH = 16.0  # logits at which the outer bins of the logit spacing begin


_LEAST = 1e-7  # distance that probabilities keep from 0 and 1


@checked
class Auc(Metric):
    """Area under the ROC curve over many batches, computed from a histogram of the scores.

        auc = Auc()
        auc.update(predictions, labels)
        print(auc.result(), "+-", auc.error_bound())

    Scores in [0, 1] are counted in `num_thresholds` + 1 bins. A pair of a positive and a negative sample in
    the same bin counts 1/2, like a pair with equal scores. The value therefore differs from the exact area
    by at most `error_bound()`, which is half the share of such pairs.

    Args:
        name: Label of the results.
        curve: Must be "ROC".
        num_thresholds: Number of bins minus 1.
        spacing: "linear" for bins of equal width in the score; the last bin contains only 1. "logit" for
            bins of equal width in log(p / (1 - p)) between -16 and 16, for probabilities near 0 or 1.
    """

    default_name = "auc"

    def __init__(
        self,
        name: str | None = None,
        curve: Literal["ROC"] = "ROC",
        num_thresholds: PositiveInt = 4095,
        spacing: Spacing = "linear",
    ) -> None:
        self.num_thresholds = num_thresholds
        self.spacing = spacing
        super().__init__(name)

    @property
    def size(self) -> int:
        return 2 * (self.num_thresholds + 1)

    def layout(self) -> str:
        return f"{super().layout()} {self.spacing}"

    def check(self, batch: Batch) -> None:
        super().check(batch)
        batch.check_probabilities(self.name)

    def sums_of(self, batch: Batch) -> Floats:
        where = self._bins(batch.predictions)
        where += (batch.labels > 0) * (self.num_thresholds + 1)
        if batch.slices is not None:
            where += batch.slices * self.size
        counts = np.bincount(where, batch.weights, minlength=self.sums.size)
        return counts.reshape(self.sums.shape).astype(np.float64, copy=False)

    def _bins(self, scores: Floats) -> Ids:
        if self.spacing == "linear":
            return (scores * self.num_thresholds).astype(np.int64)
        with np.errstate(divide="ignore"):
            logits = np.log(scores) - np.log1p(-scores)
        share = (np.clip(logits, -_REACH, _REACH) + _REACH) / (2 * _REACH)
        bins: Ids = (share * self.num_thresholds).astype(np.int64)
        return bins

    def score(self, sums: Floats) -> float:
        """Return the area, or 0.5 if all samples are of one class."""
        return area_under_curve(*np.split(sums, 2))

    def scores(self, sums: Floats) -> dict[str, float]:
        return {self.name: self.score(sums), f"{self.name}_error": _bound(sums)}

    def error_bound(self, slice: int | None = None) -> float:
        """Return the largest possible difference between `result(slice)` and the exact area."""
        return _bound(self.sums.sum(axis=0) if slice is None else self.sums[slice])

    def eval(self) -> float:
        """Return the area over all batches so far, or 0.5 if all samples are of one class."""
        return self.result()


def area_under_curve(negatives: Floats, positives: Floats) -> float:
    """Return the area under the ROC curve from histograms of the scores, or 0.5 if a histogram is empty.

    Args:
        negatives, positives: Numbers of samples of each class in each bin, lowest score first.
    """
    pairs = positives.sum() * negatives.sum()
    below = np.cumsum(negatives) - negatives
    return float((positives * (below + negatives / 2)).sum() / pairs) if pairs else 0.5


def _bound(sums: Floats) -> float:
    negatives, positives = np.split(sums, 2)
    pairs = positives.sum() * negatives.sum()
    return float((positives * negatives).sum() / pairs / 2) if pairs else 0.0


class _BinaryMetric(Metric):
    """Base of precision and recall: a share of some samples whose prediction and label are both 1."""

    size = 2

    @abstractmethod
    def counted(self, batch: Batch) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return the mask of samples that are predicted as 1, and the mask of samples to divide by."""

    def sums_of(self, batch: Batch) -> Floats:
        is_positive, counts = self.counted(batch)
        hits = is_positive & (batch.labels == 1) & counts
        columns = [batch.weighted(column.astype(np.float64)) for column in (counts, hits)]
        return sums_by_slice(columns, batch.slices, len(self.sums))

    def score(self, sums: Floats) -> float:
        """Return the share, or 0 if there is no sample to divide by."""
        return float(sums[1] / sums[0]) if sums[0] else 0.0

    def eval(self) -> float:
        """Return the share over all batches so far, or 0 if there is no sample to divide by."""
        return self.result()

    def accumulate(self) -> float:
        """Return the result, as `eval` does."""
        return self.result()


class Precision(_BinaryMetric):
    """Share of samples labelled 1 among the samples predicted as 1, that is with a score of at least 0.5."""

    default_name = "precision"

    def counted(self, batch: Batch) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        is_positive = np.floor(batch.predictions + 0.5) == 1
        return is_positive, is_positive


class BinaryRecall(_BinaryMetric):
    """Share of samples predicted as 1, that is with a score above 0.5, among the samples labelled 1.

    As in Paddle, a score of exactly 0.5 is a prediction of 0 here, but of 1 in Precision.
    """

    default_name = "recall"

    def counted(self, batch: Batch) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        return np.rint(batch.predictions) == 1, batch.labels == 1


def cross_entropy(labels: Floats, probabilities: Floats) -> Floats:
    """Return -y log p - (1 - y) log(1 - p) of each sample. p is clipped to [1e-7, 1 - 1e-7]."""
    p = np.clip(probabilities, _LEAST, 1 - _LEAST)
    return -(labels * np.log(p) + (1 - labels) * np.log1p(-p))


@checked
class _MeanMetric(Metric):
    """Base of metrics whose first sum is the sum of the samples' weights."""

    def columns(self, batch: Batch) -> list[Floats]:
        """Return, for each sum after the first, the terms of all samples before multiplication by the
        weights."""
        raise NotImplementedError

    def sums_of(self, batch: Batch) -> Floats:
        columns = [np.ones(len(batch)), *self.columns(batch)]
        weighted = [batch.weighted(column) for column in columns]
        return sums_by_slice(weighted, batch.slices, len(self.sums))


@checked
class _ProbabilityMetric(_MeanMetric):
    def check(self, batch: Batch) -> None:
        super().check(batch)
        _check_chances(self.name, batch)


def _check_chances(name: str, batch: Batch) -> None:
    """Raise ShapeError if a prediction or label is outside [0, 1]."""
    batch.check_probabilities(name)
    labels = batch.labels
    if len(labels) and not 0 <= labels.min() <= labels.max() <= 1:
        raise ShapeError(
            f"{name} needs labels in [0, 1]; they are {labels.min()} to {labels.max()}"
        )


@checked
class LogLoss(_ProbabilityMetric):
    """Weighted mean of the log loss -y log p - (1 - y) log(1 - p). p is clipped to [1e-7, 1 - 1e-7]."""

    default_name = "log_loss"
    size = 2

    def columns(self, batch: Batch) -> list[Floats]:
        return [cross_entropy(batch.labels, batch.predictions)]

    def score(self, sums: Floats) -> float:
        return _ratio(sums[1], sums[0])


@checked
class NormalizedEntropy(_ProbabilityMetric):
    """Log loss divided by the log loss of a model that always predicts the mean label.

    Lower is better, and 1 is as good as no model. NaN if all labels are equal. From He et al., "Practical
    lessons from predicting clicks on ads at Facebook", ADKDD 2014.
    """

    default_name = "normalized_entropy"
    size = 3

    def columns(self, batch: Batch) -> list[Floats]:
        return [cross_entropy(batch.labels, batch.predictions), batch.labels]

    def score(self, sums: Floats) -> float:
        weight, loss, positive = sums
        if not 0 < positive < weight:
            return math.nan
        rate = positive / weight
        entropy = -(positive * math.log(rate) + (weight - positive) * math.log1p(-rate))
        return _ratio(loss, entropy)


@checked
class Calibration(_MeanMetric):
    """Sum of the predictions divided by the sum of the labels. 1.1 means that predictions are 10 % too high.

    NaN if all labels are 0. From He et al., "Practical lessons from predicting clicks on ads at Facebook",
    ADKDD 2014.
    """

    default_name = "calibration"
    size = 3

    def columns(self, batch: Batch) -> list[Floats]:
        return [batch.predictions, batch.labels]

    def score(self, sums: Floats) -> float:
        return _ratio(sums[1], sums[2])


@checked
class RMSE(_MeanMetric):
    """Root of the weighted mean of (prediction - label)^2."""

    default_name = "rmse"
    size = 2

    def columns(self, batch: Batch) -> list[Floats]:
        return [(batch.predictions - batch.labels) ** 2]

    def score(self, sums: Floats) -> float:
        return math.sqrt(_ratio(sums[1], sums[0]))


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else math.nan


@checked
def accuracy(scores: Numbers, labels: Numbers, k: PositiveInt = 1) -> float:
    """Return the share of samples whose label is among the k classes with the highest scores.

        accuracy([[0.1, 0.7, 0.2]], [2], k=2)  # 1.0

    Args:
        scores: Score of each class, [n, classes].
        labels: Class numbers, [n] or [n, 1].
        k: Number of classes to consider.
    """
    finite_numbers(scores, "score")
    return share_of_hits(scores, labels, k)


def share_of_hits(scores: Numbers, labels: Numbers, k: int) -> float:
    """Return the accuracy of checked arrays. A sample with a score of NaN is counted as wrong."""
    values, count = np.asarray(scores), np.size(labels)
    if values.ndim != 2 or len(values) != count or not 1 <= k <= values.shape[1]:
        raise ShapeError(
            f"accuracy of scores {values.shape} and {count} labels with k {k}: "
            "scores must be [n, classes], and k at most the number of classes"
        )
    numbers = whole_numbers(labels, count, "labels")
    assert numbers is not None
    if count and not 0 <= numbers.min() <= numbers.max() < values.shape[1]:
        raise ShapeError(
            f"accuracy: labels are {numbers.min()} to {numbers.max()}; scores {values.shape} have the "
            f"classes 0 to {values.shape[1] - 1}"
        )
    classes = numbers.reshape(-1, 1)
    label_scores = np.take_along_axis(values, classes, axis=1)
    # Of equal scores the lower class ranks first, as in argmax. Comparisons with NaN are False, so NaN
    # ranks ahead of the label.
    behind = (values < label_scores) | (
        (values == label_scores) & (np.arange(values.shape[1]) >= classes)
    )
    return float(np.mean((~behind).sum(axis=1) < k)) if count else 0.0


@checked
def auc(labels: Numbers, scores: Numbers) -> float:
    """Return the exact area under the ROC curve of one batch, or 0.5 if all samples are of one class.

    Equal scores of a positive and a negative count 1/2.

    Args:
        labels: Labels 0 or 1, in any shape.
        scores: A score for each label. Higher scores predict 1.
    """
    batch = _flat_batch(labels, scores)
    truth, values = batch.labels > 0, batch.predictions
    positives = int(truth.sum())
    negatives = len(truth) - positives
    if positives == 0 or negatives == 0:
        return 0.5
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    total = ranks[where.reshape(-1)][truth].sum()
    return float((total - positives * (positives + 1) / 2) / (positives * negatives))


@checked
def log_loss(labels: Numbers, probabilities: Numbers) -> float:
    """Return the mean of the log loss -y log p - (1 - y) log(1 - p) of one batch. p is clipped to [1e-7, 1
    - 1e-7]."""
    batch = _flat_batch(labels, probabilities)
    _check_chances("log_loss", batch)
    return float(np.mean(cross_entropy(batch.labels, batch.predictions)))


def _flat_batch(labels: Numbers, scores: Numbers) -> Batch:
    if np.size(labels) != np.size(scores) or not np.size(labels):
        raise ShapeError(f"there are {np.size(labels)} labels for {np.size(scores)} scores")
    return Batch.of(np.asarray(scores).reshape(-1), labels)


@checked
class Accuracy:
    """Weighted mean of the accuracies of batches.

        total = Accuracy()
        total.update(batch_accuracy, weight=len(batch))
        print(total.eval())

    This is Paddle's metric. `accuracy` computes the accuracy of a batch.
    """

    def __init__(self, name: str | None = None) -> None:
        self.reset()

    def reset(self) -> None:
        """Drop all batches."""
        self.value = 0.0
        self.weight = 0.0

    def update(self, value: Numbers, weight: NonNegative) -> None:
        """Add the accuracy of a batch. `weight` is usually the number of samples in the batch."""
        if not (values := finite_numbers(value, "accuracy")).size:
            raise ShapeError("the accuracy of a batch is an empty array; give one number")
        self.value += float(values[0]) * weight
        self.weight += weight

    def eval(self) -> float:
        """Return the mean over all batches so far."""
        if self.weight == 0:
            raise ConfigError("the accuracy has had no batch; call update first")
        return self.value / self.weight
