"""The area under the ROC curve over many batches, from a histogram of the scores."""

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import ConfigError
from psfleet.metrics.streaming_metric import Batch, Metric

__all__ = ["Auc"]

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
Spacing = Literal["linear", "logit"]

_REACH = 16.0  # logits at which the outer bins of the logit spacing begin


class Auc(Metric):
    """The area under the ROC curve over many batches, from a histogram of the scores.

    Samples of both classes that share a bin count half, as ties do. So the value lies within
    `error_bound()` of the exact one, half the share of pairs of a positive and a negative that share
    a bin. It is exact up to scores that share one of the `num_thresholds` + 1 bins on [0, 1].

    Args:
        name: How results are labelled.
        curve: ROC.
        num_thresholds: Bins but one.
        spacing: "linear": bins of equal width; the last holds only 1. "logit": bins of equal width in
            log(p / (1 - p)) between -16 and 16, which suits probabilities near 0 or 1.
    """

    default_name = "auc"

    def __init__(
        self,
        name: str | None = None,
        curve: str = "ROC",
        num_thresholds: int = 4095,
        spacing: Spacing = "linear",
    ) -> None:
        if curve != "ROC":
            raise ConfigError(f"curve is {curve!r}; only 'ROC' is available")
        if spacing not in get_args(Spacing):
            raise ConfigError(f"spacing is {spacing!r}; it must be 'linear' or 'logit'")
        if num_thresholds < 1:
            raise ConfigError(f"num_thresholds is {num_thresholds}; it must be at least 1")
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
        """The area; 0.5 while only one class has been seen."""
        negatives, positives = np.split(sums, 2)
        pairs = positives.sum() * negatives.sum()
        below = np.cumsum(negatives) - negatives
        return float((positives * (below + negatives / 2)).sum() / pairs) if pairs else 0.5

    def scores(self, sums: Floats) -> dict[str, float]:
        return {self.name: self.score(sums), f"{self.name}_error": _bound(sums)}

    def error_bound(self, slice: int | None = None) -> float:
        """How far the result may be from the exact area."""
        return _bound(self.sums.sum(axis=0) if slice is None else self.sums[slice])

    def eval(self) -> float:
        """The area so far; 0.5 while only one class has been seen."""
        return self.result()


def _bound(sums: Floats) -> float:
    negatives, positives = np.split(sums, 2)
    pairs = positives.sum() * negatives.sum()
    return float((positives * negatives).sum() / pairs / 2) if pairs else 0.0
