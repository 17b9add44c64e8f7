"""Recompute as a strategy: the script does not change, nor do the weights."""

from typing import Any

import numpy as np
import pytest

import psfleet as ps
from psfleet import fleet, layers, optimizer
from psfleet.errors import ConfigError
from psfleet.strategy import RecomputeSettings, resolve
from tests.runtimes import own_programs, own_runtime


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
