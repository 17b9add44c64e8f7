"""How well predictions fit as numbers: log loss, normalised entropy, calibration, RMSE."""

import math

import numpy as np
from numpy.typing import NDArray

from psfleet.errors import ShapeError
from psfleet.metrics.streaming_metric import Batch, Metric, sums_by_slice

__all__ = ["RMSE", "Calibration", "LogLoss", "NormalizedEntropy", "cross_entropy"]

Floats = NDArray[np.float64]
_LEAST = 1e-7  # distance that probabilities keep from 0 and 1


def cross_entropy(labels: Floats, probabilities: Floats) -> Floats:
    """-y log p - (1 - y) log(1 - p) of each sample, probabilities kept 1e-7 from 0 and 1."""
    p = np.clip(probabilities, _LEAST, 1 - _LEAST)
    return -(labels * np.log(p) + (1 - labels) * np.log1p(-p))


class _MeanMetric(Metric):
    """Sums over samples; the first is that of the weights."""

    def columns(self, batch: Batch) -> list[Floats]:
        """What each sample adds, without its weight, to the sums after the first."""
        raise NotImplementedError

    def sums_of(self, batch: Batch) -> Floats:
        columns = [np.ones(len(batch)), *self.columns(batch)]
        weighted = [batch.weighted(column) for column in columns]
        return sums_by_slice(weighted, batch.slices, len(self.sums))


class _ProbabilityMetric(_MeanMetric):
    def check(self, batch: Batch) -> None:
        super().check(batch)
        batch.check_probabilities(self.name)
        labels = batch.labels
        if len(labels) and not 0 <= labels.min() <= labels.max() <= 1:
            raise ShapeError(
                f"{self.name} needs labels in [0, 1]; they are {labels.min()} to {labels.max()}"
            )


class LogLoss(_ProbabilityMetric):
    """The weighted mean of -y log p - (1 - y) log(1 - p), probabilities kept 1e-7 from 0 and 1."""

    default_name = "log_loss"
    size = 2

    def columns(self, batch: Batch) -> list[Floats]:
        return [cross_entropy(batch.labels, batch.predictions)]

    def score(self, sums: Floats) -> float:
        return _ratio(sums[1], sums[0])


class NormalizedEntropy(_ProbabilityMetric):
    """The log loss divided by that of always predicting the mean label; lower is better, 1 is no use.

    He et al., "Practical lessons from predicting clicks on ads at Facebook", ADKDD 2014. nan where all
    labels are equal.
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


class Calibration(_MeanMetric):
    """The sum of predictions divided by the sum of labels: 1.1 promises ten percent too much.

    He et al., "Practical lessons from predicting clicks on ads at Facebook", ADKDD 2014. nan where no
    label is above 0.
    """

    default_name = "calibration"
    size = 3

    def columns(self, batch: Batch) -> list[Floats]:
        return [batch.predictions, batch.labels]

    def score(self, sums: Floats) -> float:
        return _ratio(sums[1], sums[2])


class RMSE(_MeanMetric):
    """The root of the weighted mean of (prediction - label)^2."""

    default_name = "rmse"
    size = 2

    def columns(self, batch: Batch) -> list[Floats]:
        return [(batch.predictions - batch.labels) ** 2]

    def score(self, sums: Floats) -> float:
        return math.sqrt(_ratio(sums[1], sums[0]))


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else math.nan
