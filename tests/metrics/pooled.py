"""Samples, and what scikit-learn says of all of them together."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet import metrics

__all__ = ["Samples", "expected", "every_metric"]

Floats = NDArray[np.float64]


@dataclass(eq=False)
class Samples:
    """Click data: predictions with ties, weights, 3 slices, groups of up to 12 samples side by side."""

    predictions: Floats
    labels: Floats
    weights: Floats
    slices: NDArray[np.int64]
    groups: NDArray[np.int64]

    @classmethod
    def drawn(cls, groups: int, seed: int) -> "Samples":
        """Of so many groups."""
        dice = np.random.default_rng(seed)
        sizes = dice.integers(1, 13, groups)
        number = np.repeat(np.arange(groups), sizes)
        chance = 1 / (1 + np.exp(-dice.normal(-1, 1.5, len(number))))
        return cls(
            np.clip(chance + dice.normal(0, 0.05, len(number)), 0.001, 0.999).round(3),
            (dice.random(len(number)) < chance).astype(np.float64),
            # Equal within a group, as recall and NDCG want it.
            dice.uniform(0.1, 3, groups)[number],
            dice.integers(0, 3, groups)[number],
            number,
        )

    def __len__(self) -> int:
        return len(self.labels)

    def where(self, chosen: Any) -> "Samples":
        """Some of them."""
        columns = (self.predictions, self.labels, self.weights, self.slices, self.groups)
        return Samples(*(column[chosen] for column in columns))

    def parts(self, parts: int) -> list["Samples"]:
        """Cut between groups."""
        cuts = np.array_split(np.arange(self.groups.max() + 1), parts)
        return [self.where(np.isin(self.groups, cut)) for cut in cuts]


def every_metric() -> list[metrics.Metric]:
    """One of each kind."""
    return [
        metrics.Auc(),
        metrics.Auc("fine", spacing="logit", num_thresholds=8191),
        metrics.LogLoss(),
        metrics.NormalizedEntropy(),
        metrics.Calibration(),
        metrics.RMSE(),
        metrics.GroupAuc(),
        metrics.Recall(3),
        metrics.NDCG(5),
    ]


def expected(samples: Samples, weighted: bool = True) -> dict[str, float]:
    """By metric."""
    # Imported here, for it takes longer than all modules of a test folder together.
    from sklearn.metrics import log_loss, roc_auc_score, root_mean_squared_error

    p, y = samples.predictions, samples.labels
    w = samples.weights if weighted else np.ones(len(samples))
    base = np.full(len(samples), np.average(y, weights=w))
    loss = log_loss(y, p, sample_weight=w)
    area = roc_auc_score(y, p, sample_weight=w)
    return {
        "auc": area,
        "fine": area,
        "log_loss": loss,
        "normalized_entropy": loss / log_loss(y, base, sample_weight=w),
        "calibration": np.average(p, weights=w) / np.average(y, weights=w),
        "rmse": root_mean_squared_error(y, p, sample_weight=w),
        **_by_group(samples, w),
    }


def _by_group(samples: Samples, w: Floats) -> dict[str, float]:
    from sklearn.metrics import ndcg_score, recall_score, roc_auc_score

    values: dict[str, list[tuple[float, float]]] = {"gauc": [], "recall@3": [], "ndcg@5": []}
    for group in np.unique(samples.groups):
        mine = samples.groups == group
        p, y, weights = samples.predictions[mine], samples.labels[mine], w[mine]
        if 0 < y.sum() < len(y):
            area = roc_auc_score(y, p, sample_weight=weights)
            values["gauc"].append((area, weights.sum()))
        if y.any():
            top = np.zeros(len(y))
            top[np.argsort(-p, kind="stable")[:3]] = 1
            values["recall@3"].append((recall_score(y, top), weights[0]))
        # scikit-learn ranks two or more; one alone is ranked right.
        ndcg = ndcg_score([y], [p], k=5) if len(y) > 1 else y[0]
        values["ndcg@5"].append((ndcg, weights[0]))
    means = {name: np.array(found).T for name, found in values.items()}
    return {name: float(value @ weight / weight.sum()) for name, (value, weight) in means.items()}
