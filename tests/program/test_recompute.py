"""Recompute, by a script or by a strategy: the same bits, a fraction of the memory."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import psfleet as ps
from psfleet import fleet, layers, optimizer
from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.graph.program.backward import Automatic
from psfleet.core.graph.program.program import default_main_program
from psfleet.core.graph.program.recompute import (
    ActivationMeter,
    ForwardCosts,
    choose_cuts,
    even_cuts,
    peak_of,
)
from psfleet.core.graph.program.variable import Variable
from psfleet.core.runtime.strategy import RecomputeSettings, resolve
from tests.program.hand import HandSGD
from tests.runtimes import own_programs, own_runtime

pytestmark = pytest.mark.quick

FEED = {
    "x": np.random.default_rng(1).normal(size=(32, 24)).astype(np.float32),
    "ids": np.random.default_rng(2).integers(0, 40, (32, 3)),
}


def network(depth: int) -> tuple[Variable, list[Variable]]:
    """Layers with dropout, skip connections and an embedding; the loss and each layer's output."""
    x, ids = layers.data("x", [None, 24]), layers.data("ids", [None, 3], dtype="int64")
    rows = layers.reshape(layers.embedding(ids, [None, 8], is_distributed=True), [-1, 24])
    hidden, outputs = x + rows, []
    for i in range(depth):
        before = hidden
        hidden = layers.dropout(layers.fc(hidden, 24, act="relu"), 0.2)
        if i % 3 == 2:
            hidden = layers.layer_norm(hidden + before)
        outputs.append(hidden)
    return layers.mean(layers.square(hidden)), outputs


def run(
    every: int | None = None, checkpoints: Any = None, depth: int = 12
) -> tuple[Any, dict[str, Any], int]:
    """Two steps: the loss of the second, its gradients, the peak of activation bytes."""
    with own_programs():
        loss, outputs = network(depth)
        sgd = HandSGD(0)
        chosen = checkpoints if every is None else outputs[every - 1 :: every]
        sgd.minimize(loss, checkpoints=chosen)
        exe = ps.Executor()
        exe.meter = ActivationMeter()
        exe.run(feed=FEED)
        (value,) = exe.run(feed=FEED, fetch_list=[loss])
        assert len(sgd.calls) == 2
        return value, sgd.last, exe.meter.peak_bytes


@pytest.mark.parametrize(
    "chosen",
    [
        {"every": 1},
        {"every": 5},
        {"checkpoints": []},
        {"checkpoints": ["fc_3", "dropout_7"]},
        {"checkpoints": Automatic(60_000)},
    ],
)
def test_gradients_are_the_same_bits(chosen: dict[str, Any]) -> None:
    """Dropout masks, skip connections, sparse tables: whatever the checkpoints."""
    loss, gradients, plain = run()
    same, others, peak = run(**chosen)
    assert loss == same
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        rows = getattr(gradient, "rows", gradient)
        np.testing.assert_array_equal(rows, getattr(others[name], "rows", others[name]))
    assert peak <= plain


def test_automatic_cuts_keep_within_the_budget() -> None:
    """The measured peak stays within the budget; one that nothing fits is refused."""
    plain = run()[2]
    budget = plain // 2
    assert run(checkpoints=Automatic(budget))[2] <= budget * 1.1
    with pytest.raises(UsageError, match="do not fit into the memory budget of 100 bytes"):
        run(checkpoints=Automatic(100))


def test_the_chosen_cuts_are_better_than_even_ones() -> None:
    """Never slower than sqrt(n) even cuts at their memory; on uneven costs much faster."""
    random = np.random.default_rng(0)
    size = random.integers(1, 100, 49)
    costs = ForwardCosts(
        size * 1000, np.concatenate([[0], size * 1000])[:50], random.uniform(size=49)
    )
    even = even_cuts(49)
    edges, drops = choose_cuts(costs, None)
    assert peak_of(costs, edges, drops) <= peak_of(costs, *even)

    def replayed(edges: list[int], drops: list[bool]) -> float:
        return sum(
            float(costs.seconds[i:j].sum())
            for (i, j), dropped in zip(pairwise(edges), drops, strict=True)
            if dropped
        )

    assert replayed(edges, drops) < 0.8 * replayed(*even)


def test_measuring_leaves_no_trace_in_metrics() -> None:
    """An accumulated AUC counts each batch once, also the one by which the cuts were chosen."""
    peaks = []
    for chosen in (None, Automatic()):
        with own_programs():
            loss, outputs = network(3)
            label = layers.data("label", [None, 1], dtype="int64")
            auc, *_ = layers.auc(layers.softmax(layers.fc(outputs[-1], 2)), label)
            HandSGD(0).minimize(loss, checkpoints=chosen)
            executor, dice = ps.Executor(), np.random.default_rng(5)
            for _ in range(2):
                feed = {
                    "x": dice.normal(size=(32, 24)).astype(np.float32),
                    "ids": FEED["ids"],
                    "label": dice.integers(0, 2, (32, 1)),
                }
                (value,) = executor.run(feed=feed, fetch_list=[auc])
            peaks.append(float(value.item()))
    assert peaks[0] == peaks[1]


def test_a_checkpoint_that_the_loss_does_not_depend_on_is_refused() -> None:
    """By its name."""
    loss, _ = network(2)
    strange = layers.fc(default_main_program().variable("x"), 3, name="strange")
    HandSGD(0).minimize(loss, checkpoints=[strange])
    with pytest.raises(UsageError, match=r"does not depend on the checkpoint 'strange\.tmp_0'"):
        ps.Executor().run(feed=FEED)


def deep(depth: int, width: int, every: int | None) -> tuple[ps.Executor, Variable]:
    """A deep MLP with an update that does nothing."""
    hidden = layers.data("x", [None, width])
    outputs = []
    for _ in range(depth):
        hidden = layers.fc(hidden, width, act="relu")
        outputs.append(hidden)
    loss = layers.mean(hidden)
    HandSGD(0).minimize(loss, checkpoints=outputs[every - 1 :: every] if every else None)
    return ps.Executor(), loss


def test_64_layers_take_a_quarter_of_the_memory() -> None:
    """Peak activation bytes are at most 0.25 of the plain run's."""
    feed = {"x": np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)}
    peaks: list[int] = []
    for every in (None, 8):
        with own_programs():
            exe, loss = deep(64, 32, every)
            exe.meter = ActivationMeter()
            exe.run(feed=feed, fetch_list=[loss])
            peaks.append(exe.meter.peak_bytes)
    assert peaks[1] <= 0.25 * peaks[0]


def train(strategy: fleet.DistributedStrategy) -> Any:
    """The weights after some steps of a deep network with dropout."""
    with own_runtime(), own_programs():
        hidden = layers.data("x", [None, 8])
        for _ in range(9):
            hidden = layers.dropout(layers.fc(hidden, 8, act="tanh"), 0.1)
        loss = layers.mean(layers.square(hidden))
        fleet.Fleet().distributed_optimizer(optimizer.Adam(0.01), strategy).minimize(loss)
        exe = ps.Executor()
        random = np.random.default_rng(0)
        for _ in range(4):
            exe.run(feed={"x": random.normal(size=(16, 8)).astype(np.float32)})
        (weights,) = exe.run(
            ps.default_main_program().clone(for_test=True), fetch_list=["fc_4.w_0"]
        )
    return weights


@pytest.mark.parametrize(
    ("configs", "merge"),
    [({}, False), ({"checkpoints": ["fc_2", "fc_5"]}, True), ({"memory_budget": "64KiB"}, False)],
)
def test_a_strategy_recomputes_to_the_same_bits(configs: dict[str, Any], merge: bool) -> None:
    """Chosen or given checkpoints, with and without gradient merge."""
    plain, strategy = fleet.DistributedStrategy(), fleet.DistributedStrategy()
    plain.gradient_merge = strategy.gradient_merge = merge
    plain.gradient_merge_configs = strategy.gradient_merge_configs = {"k_steps": 2}
    strategy.recompute = True
    strategy.recompute_configs = configs
    np.testing.assert_array_equal(train(strategy), train(plain))


def test_sizes_are_read() -> None:
    """Decimal and binary units; nonsense and contradictions are refused."""
    assert RecomputeSettings().budget is None
    assert RecomputeSettings(memory_budget="2GiB").budget == 2**31
    assert RecomputeSettings(memory_budget="1.5 MB").budget == 1_500_000
    assert RecomputeSettings(memory_budget="4096").budget == 4096
    for wrong in ("much", "1.2.3MB", "-1GB", "5 miles"):
        with pytest.raises(ConfigError, match="it must be a number and one of"):
            RecomputeSettings(memory_budget=wrong)
    with pytest.raises(ConfigError, match="leave one out"):
        resolve(None, '{"recompute": {"checkpoints": ["fc_1"], "memory_budget": "1GB"}}')
