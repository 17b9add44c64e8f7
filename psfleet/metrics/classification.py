"""How good predictions are: exact measures of one array, and the mean of accuracies."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from psfleet.errors import ConfigError, ShapeError
from psfleet.metrics.probabilities import cross_entropy

__all__ = ["Accuracy", "accuracy", "auc", "log_loss"]


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
    return float(np.mean(cross_entropy(truth.astype(np.float64), values.astype(np.float64))))


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
