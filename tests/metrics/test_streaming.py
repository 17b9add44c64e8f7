"""Streaming metrics equal scikit-learn's values on the pooled samples."""

import math
from typing import Any

import numpy as np
import pytest

from psfleet import fluid, metrics
from psfleet.core.base.errors import ConfigError, ShapeError
from psfleet.metrics.classification import share_of_hits
from tests.metrics.pooled import Samples, area, every_metric, expected, top_values
from tests.refusals import check_refusals

pytestmark = pytest.mark.quick

SAMPLES = Samples.drawn(150, seed=1)


def counted(metric: metrics.Metric, samples: Samples, weighted: bool) -> metrics.Metric:
    """The metric with these samples in it."""
    weights = samples.weights if weighted else None
    metric.update(
        samples.predictions,
        samples.labels,
        weights,
        *(samples.slices, samples.groups, samples.users, samples.items),
    )
    return metric


def check(metric: metrics.Metric, slice: int | None, wanted: float) -> None:
    """AUC is within its stated error, which is small; the rest is equal to 1e-9."""
    error = 1e-9
    if isinstance(metric, metrics.Auc):
        error += metric.error_bound(slice)
        assert error < 3e-3
    assert metric.result(slice) == pytest.approx(wanted, abs=error), metric.name


@pytest.mark.parametrize("weighted", [False, True])
def test_metrics_are_scikit_learns(weighted: bool) -> None:
    """In 7 batches, which 3 metrics count and merge in another order; over all samples and by slice."""
    of_all = expected(SAMPLES, weighted)
    of_slices = [expected(SAMPLES.where(SAMPLES.slices == slice), weighted) for slice in range(3)]
    for metric in every_metric():
        total = merged(metric, weighted)
        check(total, None, of_all[total.name])
        for slice, wanted in enumerate(of_slices):
            check(total, slice, wanted[total.name])
        loaded = metric.sliced(3)
        loaded.load(total.state())
        assert loaded.result(1) == total.result(1)


def merged(metric: metrics.Metric, weighted: bool) -> metrics.Metric:
    """What three copies of the metric have counted of the samples."""
    workers = [metric.sliced(3) for _ in range(3)]
    for batch, part in enumerate(SAMPLES.parts(7)):
        counted(workers[batch % 3], part, weighted)
    total = metric.sliced(3)
    for worker in reversed(workers):
        total.merge(worker)
    return total


@pytest.mark.parametrize("spacing", ["linear", "logit"])
def test_the_error_bound_of_auc_holds(spacing: Any) -> None:
    """With 5 bins the bound is wide, and the exact area lies within it."""
    for seed in range(20):
        samples = Samples.drawn(40, seed)
        metric = metrics.Auc(num_thresholds=4, spacing=spacing)
        counted(metric, samples.where(samples.slices == 0), True)
        exact = area(samples.where(samples.slices == 0))
        assert 0.01 < metric.error_bound() < 0.5
        assert abs(metric.result() - exact) <= metric.error_bound() + 1e-12


def test_whole_numbers_are_counted_exactly() -> None:
    """The counts of an AUC without weights are whole, so any split gives the same bits."""
    one, two = metrics.Auc(), metrics.Auc()
    one.update(SAMPLES.predictions, SAMPLES.labels)
    for part in SAMPLES.parts(11):
        two.update(part.predictions, part.labels)
    assert one.result() == two.result()
    assert one.sums.sum() == len(SAMPLES)


def test_nothing_to_measure() -> None:
    """Empty batches count nothing; a metric without samples is nan, an AUC of one class 0.5, precision and
    recall of two classes are 0, as in the reference.
    """
    empty = {metrics.Auc: 0.5, metrics.Precision: 0.0, metrics.BinaryRecall: 0.0}
    for metric in every_metric():
        metric.update([], [], [], [], [], [], [])
        np.testing.assert_equal(metric.result(), empty.get(type(metric), math.nan))
    lonely = metrics.GroupAuc()
    lonely.update([0.1, 0.2], [1, 1], groups=["a", "a"])
    assert math.isnan(lonely.result())
    assert metrics.Auc().result() == 0.5
    ranked = metrics.NDCG(2)
    ranked.update([0.1, 0.2], [0, 0], groups=["a", "a"])
    assert ranked.result() == 0


@pytest.mark.parametrize("seed", range(10))
def test_ties_count_as_the_mean_of_all_rankings(seed: int) -> None:
    """HR, MRR and recall of a group of 7 samples with 3 distinct predictions, over all of its rankings; a
    model that predicts the same for all items hits as often as chance does, wherever the positive stands.
    """
    dice = np.random.default_rng(seed)
    p, y = dice.integers(0, 3, 7) / 2, (dice.random(7) < 0.3).astype(np.float64)
    y[0] = 1
    made = [metrics.Recall(3), metrics.HitRate(2), metrics.HitRate(3), metrics.MRR(4)]
    wanted = top_values(p, y)
    for metric in made:
        metric.update(p, y, groups=np.zeros(7))
        assert metric.result() == pytest.approx(wanted[metric.name], abs=1e-12), metric.name
    chance = metrics.HitRate(10)
    chance.update(np.zeros(100), np.arange(100) == 0, groups=np.zeros(100))
    assert chance.result() == pytest.approx(0.1, abs=1e-12)


@pytest.mark.parametrize(
    ("metric", "arguments", "sentence"),
    [
        (metrics.Auc(), ([0.5, np.nan], [0, 1]), "prediction 1 is nan; metrics need finite"),
        (metrics.Auc(), ([0.5], [0, 1]), "there are 2 labels for 1 scores"),
        (metrics.LogLoss(), ([1.5], [1]), r"log_loss needs scores in \[0, 1\]; they are 1.5"),
        (metrics.LogLoss(), ([0.5], [2]), r"log_loss needs labels in \[0, 1\]; they are 2"),
        (metrics.RMSE(), ([0.5], [2], [-1]), "weight -1.0 is negative"),
        (metrics.RMSE(), ([0.5], [2], None, [1]), "has the slices 0 to 0"),
        (metrics.RMSE(), ([0.5], [2], None, [0.5]), "slices have dtype float64"),
        (metrics.GroupAuc(), ([0.5], [1]), "gauc needs the group of each sample"),
        (metrics.NDCG(2), ([0.5], [-1], None, None, [1]), "label -1.0 is negative"),
        (metrics.MRR(2, users=3), ([0.5], [1], None, None, [1]), "needs the users of the samples"),
        (
            metrics.MRR(2, users=3),
            ([0.5], [1], None, None, [1], [3]),
            "users are 3 to 3; .* 0 to 2",
        ),
        (metrics.MRR(2, users=3), ([0.5], [1], None, None, [1], [0.5]), "users have dtype float64"),
        (metrics.Coverage(2, 3), ([0.5], [1], None, None, [1], [0]), "pass items="),
        (metrics.Coverage(2, 3), ([0.5], [1], None, None, [1], [0], [-1]), "items are -1 to -1"),
    ],
)
def test_bad_batches_are_refused(metric: metrics.Metric, arguments: Any, sentence: str) -> None:
    """One sentence quotes the value; nothing is counted."""
    with pytest.raises(ShapeError, match=sentence):
        metric.update(*arguments)
    assert not metric.sums.any()


def test_bad_parameters_are_refused() -> None:
    """Sums with different meanings are not added."""
    spacing: Any = "cubic"
    with pytest.raises(ConfigError, match="spacing is 'cubic'"):
        metrics.Auc(spacing=spacing)
    with pytest.raises(ConfigError, match="num_thresholds is 0"):
        metrics.Auc(num_thresholds=0)
    with pytest.raises(ConfigError, match="merge metrics with the same parameters"):
        metrics.NDCG(2).merge(metrics.NDCG(3))
    with pytest.raises(ConfigError, match="merge metrics with the same parameters"):
        metrics.Coverage(2, 9).merge(metrics.Coverage(3, 9))
    with pytest.raises(ShapeError, match=r"is \(2,\); it must be \(1, 2\)"):
        metrics.RMSE().load([1.0, 2.0])


def test_precision_and_recall_are_the_references() -> None:
    """Its values for scores with one decimal, among which 0.5 counts as 1 for precision alone."""
    precision, recall = fluid.metrics.Precision(), fluid.metrics.Recall()
    assert (precision.eval(), recall.accumulate()) == (0.0, 0.0)
    random = np.random.default_rng(4)
    for n, wanted in ((50, (16 / 34, 10 / 20)), (7, (17 / 37, 11 / 23))):
        scores = np.round(random.random((n, 1)), 1)
        labels = (random.random((n, 1)) < 0.4).astype("int64")
        precision.update(scores, labels)
        recall.update(scores, labels)
        assert (precision.eval(), recall.accumulate()) == pytest.approx(wanted)
    assert (fluid.metrics.Precision.default_name, recall.name) == ("precision", "recall")


REFUSED = """
metrics.accuracy([[NAN, 1], [0, 1]], [0, 1])  # score 0 is nan; metrics need finite numbers
metrics.accuracy([[0, 1], [INF, 1]], [0, 1])  # score 2 is inf
metrics.accuracy([[0, 1]], [-1])  # accuracy: labels are -1 to -1; scores (1, 2) have the classes 0 to 1
metrics.accuracy([[0, 1]], [2])  # accuracy: labels are 2 to 2; scores (1, 2) have the classes 0 to 1
metrics.accuracy([[0, 1]], [0.5])  # labels have dtype float64; give whole numbers
metrics.accuracy([[0, 1]], [NAN])  # labels have dtype float64; give whole numbers
metrics.auc([0, 1], [0.5, NAN])  # prediction 1 is nan
metrics.auc([NAN, 1], [0.5, 0.5])  # label 0 is nan
metrics.auc([], [])  # there are 0 labels for 0 scores
metrics.log_loss([0, 1], [-3, 4])  # log_loss needs scores in [0, 1]; they are -3.0 to 4.0
metrics.log_loss([-1, 1], [0.5, 0.5])  # log_loss needs labels in [0, 1]; they are -1.0 to 1.0
metrics.log_loss([0, 1], [0.5, NAN])  # prediction 1 is nan
metrics.Accuracy().update(NAN, 1)  # accuracy 0 is nan
fluid.metrics.accuracy([[0, 1]], [2])  # labels are 2 to 2
fluid.metrics.Accuracy().update([INF], 1)  # accuracy 0 is inf
"""


def test_exact_metrics_refuse_what_streaming_ones_do() -> None:
    """Numbers that are not finite, scores and labels out of range, and classes that there are not."""
    check_refusals(REFUSED, globals() | {"NAN": math.nan, "INF": math.inf})


def test_exact_log_loss_is_the_streaming_one() -> None:
    """Also of labels between 0 and 1."""
    streaming = metrics.LogLoss()
    streaming.update([0.2, 0.9], [0.3, 1])
    assert metrics.log_loss([0.3, 1], [0.2, 0.9]) == pytest.approx(streaming.result(), abs=1e-15)


def test_a_program_counts_no_hit_where_a_score_is_nan() -> None:
    """The NaN policy, not a metric, decides whether a program that computes NaN goes on."""
    assert share_of_hits([[math.nan, 1.0], [math.nan, math.nan], [0.0, 1.0]], [0, 1, 1], 1) == 1 / 3
