"""Measures of predictions against scikit-learn and by hand."""

import numpy as np
import pytest

import psfleet as ps
from psfleet import layers, metrics
from psfleet.errors import ConfigError, ShapeError

R = np.random.default_rng(0)
LABELS = R.integers(0, 2, 3000)
SCORES = np.round(np.clip(R.normal(0.4 + 0.2 * LABELS, 0.2), 0, 1), 2)


def test_auc_and_log_loss_are_scikit_learns() -> None:
    """With many ties."""
    # Imported here, for each process that collects tests would take 1.3 CPU-s for it.
    from sklearn.metrics import log_loss, roc_auc_score

    assert metrics.auc(LABELS, SCORES) == pytest.approx(roc_auc_score(LABELS, SCORES), abs=1e-12)
    p = np.clip(SCORES, 0.01, 0.99)
    assert metrics.log_loss(LABELS, p) == pytest.approx(log_loss(LABELS, p), abs=1e-9)
    assert metrics.auc([1, 1], [0.1, 0.2]) == 0.5


def test_auc_over_batches_is_that_of_the_whole() -> None:
    """Scores of two decimals fall into bins of their own: exact."""
    streamed = metrics.Auc()
    for part in np.array_split(np.arange(3000), 7):
        streamed.update(np.stack([1 - SCORES[part], SCORES[part]], axis=1), LABELS[part, None])
    assert streamed.eval() == pytest.approx(metrics.auc(LABELS, SCORES), abs=1e-12)
    streamed.reset()
    assert streamed.eval() == 0.5
    with pytest.raises(ShapeError, match="needs scores in"):
        streamed.update([1.5], [1])
    with pytest.raises(ConfigError, match="curve is 'PR'"):
        metrics.Auc(curve="PR")  # type: ignore[arg-type]


def test_accuracy_breaks_ties_towards_the_lower_class() -> None:
    """As argmax; k guesses; weighted means over batches."""
    scores = [[0.5, 0.5, 0.0], [0.1, 0.2, 0.7]]
    assert metrics.accuracy(scores, [0, 2]) == 1.0
    assert metrics.accuracy(scores, [1, 1]) == 0.0
    assert metrics.accuracy(scores, [[1], [1]], k=2) == 1.0
    with pytest.raises(ShapeError, match="k at most the number of classes"):
        metrics.accuracy(scores, [0, 1], k=4)
    mean = metrics.Accuracy()
    with pytest.raises(ConfigError, match="has had no batch"):
        mean.eval()
    mean.update(1.0, 1)
    mean.update([0.5], 3)
    assert mean.eval() == 0.625


def test_auc_and_accuracy_run_inside_programs() -> None:
    """auc accumulates over runs; the batch's own starts anew."""
    score, label = layers.data("score", [None, 1]), layers.data("label", [None, 1], dtype="int64")
    total, own, _ = layers.auc(score, label)
    both = layers.concat([1 - score, score], axis=1)
    right = layers.accuracy(both, label)
    exe = ps.Executor()
    good = {"score": np.array([[0.1], [0.9]]), "label": np.array([[0], [1]])}
    bad = {"score": np.array([[0.9], [0.1]]), "label": np.array([[0], [1]])}
    assert [v.item() for v in exe.run(feed=good, fetch_list=[total, own, right])] == [1, 1, 1]
    assert [v.item() for v in exe.run(feed=bad, fetch_list=[total, own, right])] == [0.5, 0, 0]
