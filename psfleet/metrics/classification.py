"""How good predictions are: exact measures, and streaming ones for results that come in batches."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from psfleet.errors import ConfigError, ShapeError

__all__ = ["Accuracy", "Auc", "accuracy", "auc", "log_loss"]


def accuracy(scores: ArrayLike, labels: ArrayLike, k: int = 1) -> float:
    """The share of samples whose label is among the k highest scores.

    Args:
        scores: [n, classes].
        labels: Whole numbers, [n] or [n, 1].
        k: How many guesses count.
    """
    values, wanted = np.asarray(scores), np.asarray(labels).reshape(-1, 1)
    if values.ndim != 2 or len(values) != len(wanted) or not 1 <= k <= values.shape[1]:
        raise ShapeError(
            f"accuracy of scores {values.shape} and {len(wanted)} labels with k {k}: "
            "scores must be [n, classes], and k at most the number of classes"
        )
    own = np.take_along_axis(values, wanted, axis=1)
    # Ties are broken towards the lower class, as argmax does.
    ahead = (values > own) | ((values == own) & (np.arange(values.shape[1]) < wanted))
    return float(np.mean(ahead.sum(axis=1) < k)) if len(values) else 0.0


def auc(labels: ArrayLike, scores: ArrayLike) -> float:
    """The exact area under the ROC curve: ties count half; 0.5 if only one class is there.

    Args:
        labels: 0 or 1, any shape.
        scores: As many; higher means 1.
    """
    truth, values = _flat_pair(labels, scores)
    positives = int(truth.sum())
    negatives = len(truth) - positives
    if positives == 0 or negatives == 0:
        return 0.5
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    total = ranks[where.reshape(-1)][truth].sum()
    return float((total - positives * (positives + 1) / 2) / (positives * negatives))


def log_loss(labels: ArrayLike, probabilities: ArrayLike) -> float:
    """The mean of -log(probability of what happened), probabilities kept 1e-7 from 0 and 1."""
    truth, values = _flat_pair(labels, probabilities)
    p = np.clip(values.astype(np.float64), 1e-7, 1 - 1e-7)
    return float(-np.mean(np.where(truth, np.log(p), np.log1p(-p))))


def _flat_pair(labels: ArrayLike, scores: ArrayLike) -> tuple[NDArray[np.bool_], NDArray[Any]]:
    truth, values = np.asarray(labels).reshape(-1) > 0, np.asarray(scores).reshape(-1)
    if len(truth) != len(values) or len(truth) == 0:
        raise ShapeError(f"there are {len(truth)} labels for {len(values)} scores")
    return truth, values


class Accuracy:
    """The weighted mean of accuracies."""

    def __init__(self, name: str | None = None) -> None:
        self.reset()

    def reset(self) -> None:
        """Start again."""
        self.value = 0.0
        self.weight = 0.0

    def update(self, value: ArrayLike, weight: float) -> None:
        """Take in one batch's accuracy; the weight is its number of samples."""
        self.value += float(np.asarray(value).reshape(-1)[0]) * weight
        self.weight += weight

    def eval(self) -> float:
        """The mean so far."""
        if self.weight == 0:
            raise ConfigError("the accuracy has had no batch; call update first")
        return self.value / self.weight


class Auc:
    """The area under the ROC curve over many batches, from a histogram of the scores.

    Exact up to scores that share one of `num_thresholds` + 1 bins on [0, 1].
    """

    def __init__(
        self, name: str | None = None, curve: str = "ROC", num_thresholds: int = 4095
    ) -> None:
        if curve != "ROC":
            raise ConfigError(f"curve is {curve!r}; only 'ROC' is available")
        self.num_thresholds = num_thresholds
        self.reset()

    def reset(self) -> None:
        """Start again."""
        self.positives = np.zeros(self.num_thresholds + 1, np.int64)
        self.negatives = np.zeros(self.num_thresholds + 1, np.int64)

    def update(self, preds: ArrayLike, labels: ArrayLike) -> None:
        """Take in a batch.

        Args:
            preds: Scores in [0, 1]: [n], [n, 1], or [n, 2] of which the second column counts.
            labels: 0 or 1, [n] or [n, 1].
        """
        scores = np.asarray(preds)
        truth, values = _flat_pair(labels, scores[:, 1] if scores.shape[1:] == (2,) else scores)
        if not (values.min() >= 0 and values.max() <= 1):
            raise ShapeError(
                f"auc needs scores in [0, 1]; they are {values.min()} to {values.max()}"
            )
        bins = (values * self.num_thresholds).astype(np.int64)
        width = self.num_thresholds + 1
        self.positives += np.bincount(bins[truth], minlength=width)
        self.negatives += np.bincount(bins[~truth], minlength=width)

    def eval(self) -> float:
        """The area so far; 0.5 while only one class has been seen."""
        pairs = int(self.positives.sum()) * int(self.negatives.sum())
        if pairs == 0:
            return 0.5
        below = np.cumsum(self.negatives) - self.negatives
        return float((self.positives * (below + self.negatives / 2)).sum() / pairs)
