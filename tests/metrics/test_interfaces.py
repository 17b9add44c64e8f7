"""Programs, PyTorch and clients count the same."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import psfleet
from psfleet import fleet, layers, optimizer
from psfleet.core.graph.execution.executor import Executor
from psfleet.core.graph.program.program import Program, program_guard
from psfleet.core.runtime.process_runtime import current
from tests.metrics.pooled import Samples, every_metric, expected

SAMPLES = Samples.drawn(100, seed=6)
PARTS = SAMPLES.parts(4)
X, Y = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """No runtime before, none afterwards."""
    before = current().use(None)
    yield
    psfleet.reset()
    current().use(before)


def by_program() -> dict[str, float]:
    """Steps of an executor, in a loop of the fleet; each updates after its push."""
    fleet.init()
    with program_guard(Program(), Program()):
        x, label = layers.data("x", [None, 2]), layers.data("label", [None, 1])
        loss = layers.mean(layers.square_error_cost(layers.fc(x, 1), label))
        fleet.distributed_optimizer(optimizer.SGD(0.1)).minimize(loss)
        scores = fleet.metrics(every_metric())
        executor = Executor()
        for part in fleet.shard(PARTS):
            executor.run(feed={"x": X, "label": Y}, fetch_list=[loss])
            part.count(scores)
    scores.publish()
    return scores.read().run


def by_torch() -> dict[str, float]:
    """Steps of a converted module and its optimizer."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    import psfleet.torch as pst

    fleet.init()
    model: Any = torch.nn.Linear(2, 1)
    model, opt = pst.convert(model, torch.optim.SGD(model.parameters(), 0.1))
    scores = fleet.metrics(every_metric())
    for part in fleet.shard(PARTS):
        model(torch.from_numpy(X)).sum().backward()
        labels = torch.from_numpy(part.labels)
        replace(part, predictions=torch.from_numpy(part.predictions), labels=labels).count(scores)
        opt.step()
        opt.clear_grad()
    return scores.read().run


def by_client() -> dict[str, float]:
    """Pushes of a plain table."""
    with psfleet.connect() as ps:
        table = ps.sparse_table("rows", 2, optimizer.SGD(0.1))
        scores = ps.metrics(every_metric())
        for part in PARTS:
            part.count(scores)
            table.push(np.arange(4), X)
        return scores.read().run


@pytest.mark.parametrize("way", [by_program, by_torch, by_client])
def test_every_interface_counts_the_same(way: Any) -> None:
    """To scikit-learn's values; AUC within the stated error."""
    actual = way()
    for name, value in expected(SAMPLES).items():
        error = actual.get(f"{name}_error", 0.0)
        assert actual[name] == pytest.approx(value, abs=1e-9 + error), name
