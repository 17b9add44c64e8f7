"""Samples, and what scikit-learn says of all of them together."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet import metrics

Floats = NDArray[np.float64]


@dataclass(eq=False)
class Samples:
    """Click data: predictions with ties, weights, 3 slices, groups of up to 12 samples side by side.

    A tenth as many users as groups, each in any slice, and 40 items.
    """

    predictions: Floats
    labels: Floats
    weights: Floats
    slices: NDArray[np.int64]
    groups: NDArray[np.int64]
    users: NDArray[np.int64]
    items: NDArray[np.int64]

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
            dice.integers(0, groups // 10, groups)[number],
            dice.integers(0, 40, len(number)),
        )

    def count(self, scores: Any, slices: Any = None, **more: Any) -> None:
        """Update fleet metrics by these samples; `slices` are in place of their own."""
        scores.update(
            *(self.predictions, self.labels, self.weights, slices),
            groups=self.groups,
            users=self.users,
            items=self.items,
            **more,
        )

    def __len__(self) -> int:
        return len(self.labels)

    def where(self, chosen: Any) -> "Samples":
        """Some of them."""
        return Samples(*(getattr(self, column.name)[chosen] for column in fields(self)))

    def parts(self, parts: int) -> list["Samples"]:
        """Cut between groups."""
        cuts = np.array_split(np.arange(self.groups.max() + 1), parts)
        return [self.where(np.isin(self.groups, cut)) for cut in cuts]


def every_metric() -> list[metrics.Metric]:
    """One of each kind."""
    plain = (metrics.Auc, metrics.LogLoss, metrics.NormalizedEntropy, metrics.Calibration)
    return [
        *(kind() for kind in (*plain, metrics.RMSE, metrics.GroupAuc, metrics.Precision)),
        metrics.Auc("fine", spacing="logit", num_thresholds=8191),
        metrics.BinaryRecall("binary_recall"),
        *(metrics.Recall(3), metrics.NDCG(5), metrics.HitRate(2), metrics.MRR(4)),
        metrics.HitRate(3, "user_hr", users=40),
        metrics.NDCG(2, "user_ndcg", users=40),
        metrics.Coverage(1, 40),
    ]


def area(samples: Samples, weighted: bool = True) -> float:
    """The exact area under the curve."""
    from sklearn.metrics import roc_auc_score

    weights = samples.weights if weighted else None
    auc: float = roc_auc_score(samples.labels, samples.predictions, sample_weight=weights)
    return auc


def expected(samples: Samples, weighted: bool = True) -> dict[str, float]:
    """By metric."""
    # Imported here, for it takes longer than all modules of a test folder together.
    from sklearn.metrics import log_loss, precision_score, recall_score, root_mean_squared_error

    p, y = samples.predictions, samples.labels
    w = samples.weights if weighted else np.ones(len(samples))
    base = np.full(len(samples), np.average(y, weights=w))
    loss = log_loss(y, p, sample_weight=w)
    return {
        "auc": (exact := area(samples, weighted)),
        "fine": exact,
        "log_loss": loss,
        "normalized_entropy": loss / log_loss(y, base, sample_weight=w),
        "calibration": np.average(p, weights=w) / np.average(y, weights=w),
        "precision": precision_score(y, p >= 0.5, sample_weight=w),
        "binary_recall": recall_score(y, p > 0.5, sample_weight=w),
        "rmse": root_mean_squared_error(y, p, sample_weight=w),
        **_by_group(samples, w),
    }


def rankings(p: Floats) -> Iterator[list[int]]:
    """All orders of samples by falling prediction."""
    runs = [np.flatnonzero(p == value).tolist() for value in np.unique(p)[::-1]]
    for order in itertools.product(*(itertools.permutations(run) for run in runs)):
        yield list(itertools.chain(*order))


def top_values(p: Floats, y: Floats) -> dict[str, float]:
    """Recall@3, HR@2, HR@3 and MRR@4 of a group, written out: the mean over all orders of its samples."""
    figures = []
    for order in rankings(p):
        hits = y[order] > 0
        first = int(np.argmax(hits)) + 1 if hits.any() else 99
        figures.append((hits[:3].sum(), first <= 2, first <= 3, first <= 4 and 1 / first))
    recall, *others = np.mean(figures, axis=0).tolist()
    names = ("recall@3", "hr@2", "hr@3", "mrr@4")
    return dict(zip(names, (recall / max((y > 0).sum(), 1), *others), strict=True))


def _by_group(samples: Samples, w: Floats) -> dict[str, float]:
    from sklearn.metrics import ndcg_score, roc_auc_score

    values: dict[str, list[tuple[float, float, int]]] = {}
    shown = set()
    for group in np.unique(samples.groups):
        mine = samples.groups == group
        p, y, weights = samples.predictions[mine], samples.labels[mine], w[mine]
        user = int(samples.users[mine][0])
        shown.add(int(samples.items[mine][np.lexsort((samples.items[mine], -p))[0]]))
        figures = top_values(p, y)
        if not y.any():
            del figures["recall@3"]
        # scikit-learn ranks two or more; one alone is ranked right.
        for k in (2, 5):
            figures[f"ndcg@{k}"] = ndcg_score([y], [p], k=k) if len(y) > 1 else y[0]
        for name, value in figures.items():
            values.setdefault(name, []).append((value, weights[0], user))
        if 0 < y.sum() < len(y):
            area = roc_auc_score(y, p, sample_weight=weights)
            values.setdefault("gauc", []).append((area, weights.sum(), user))
    by_user = {"user_hr": values.pop("hr@3"), "user_ndcg": values.pop("ndcg@2")}
    means = {
        name: float(
            np.average([value for value, *_ in of], weights=[weight for _, weight, _ in of])
        )
        for name, of in values.items()
    }
    for name, groups in by_user.items():
        value, weight, users = np.array(groups).T
        chosen = [users == number for number in np.unique(users)]
        means[name] = float(np.mean([np.average(value[k], weights=weight[k]) for k in chosen]))
    return means | {"coverage@1": len(shown) / 40}
