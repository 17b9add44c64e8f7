"""Models built of layers learn, with the real optimizers on the embedded engine."""

from typing import Any

import numpy as np

import psfleet as ps
from psfleet import layers, metrics, optimizer
from psfleet.parameters.parameter import Parameter
from psfleet.program.variable import Variable, to_variable
from tests.program.hand import HandSGD


def clicks(size: int = 512) -> dict[str, Any]:
    """Ids of 4 fields whose hidden effects decide the label."""
    random = np.random.default_rng(5)
    ids = random.integers(0, 50, (size, 4)) + np.arange(4) * 1000
    effect = np.sin(ids * 12.9898) * 3
    late = random.uniform(size=size) < 1 / (1 + np.exp(-effect.sum(axis=1)))
    return {
        "ids": ids,
        "x": random.normal(size=(size, 3)).astype(np.float32),
        "y": late.astype(np.float32)[:, None],
    }


def train(logit: Variable, steps: int = 60) -> tuple[float, float, float]:
    """The first loss, the last one and the AUC after it."""
    label = layers.data("y", [None, 1])
    loss = layers.mean(layers.sigmoid_cross_entropy_with_logits(logit, label))
    optimizer.Adam(0.03).minimize(loss)
    exe, known = ps.Executor(), ps.default_main_program().variables
    feed = {name: value for name, value in clicks().items() if name in known}
    losses = [exe.run(feed=feed, fetch_list=[loss])[0].item() for _ in range(steps)]
    test = ps.default_main_program().clone(for_test=True)
    (scores,) = exe.run(test, feed=feed, fetch_list=[logit])
    return losses[0], losses[-1], metrics.auc(feed["y"], scores)


def test_a_wide_and_deep_model_learns() -> None:
    """The trainer script of the docs: loss falls, AUC rises."""
    ids = layers.data("ids", [None, 4], dtype="int64")
    x = layers.data("x", [None, 3])
    wide = layers.reduce_sum(layers.embedding(ids, [None, 1], is_distributed=True), dim=1)
    deep = layers.reshape(layers.embedding(ids, [None, 5], is_distributed=True), [-1, 20])
    deep = layers.fc(layers.concat([deep, x], axis=1), 16, act="relu")
    first, last, auc = train(layers.fc(deep, 1) + wide)
    assert first > 0.65
    assert last < 0.4
    assert auc > 0.9


def test_a_classifier_learns_eagerly() -> None:
    """The micrograd loop: forward, backward, step by hand."""
    random = np.random.default_rng(0)
    points = random.normal(size=(200, 2)).astype(np.float32)
    label = (points[:, 0] * points[:, 1] > 0).astype(np.int64)[:, None]
    weights = [
        Parameter("a", random.normal(size=(2, 16))),
        Parameter("b", np.zeros(16)),
        Parameter("c", random.normal(size=(16, 2)) * 0.5),
    ]
    sgd = HandSGD(0.5)
    for _ in range(150):
        hidden = layers.tanh(to_variable(points) @ weights[0] + weights[1])
        logits = layers.matmul(hidden, weights[2])
        loss = layers.mean(layers.cross_entropy(layers.softmax(logits), to_variable(label)))
        loss.backward()
        for parameter in weights:
            sgd.update(parameter, parameter.grad)
            parameter.grad = None
    assert loss.item() < 0.2
    assert layers.accuracy(layers.softmax(logits), to_variable(label)).item() > 0.95


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
