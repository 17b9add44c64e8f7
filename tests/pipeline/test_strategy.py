"""The part `pipeline` of a strategy: what it says, and what it contradicts."""

from collections.abc import Callable
from typing import Any

import pytest

from psfleet import layers, optimizer
from psfleet.core.graph.program.backward import Backward
from psfleet.core.graph.program.variable import Variable
from psfleet.core.runtime.strategy import DistributedStrategy, Settings, resolve
from psfleet.optimizer.distributed import DistributedOptimizer
from tests.pipeline.conftest import build_model
from tests.runtimes import own_programs

pytestmark = pytest.mark.quick


def _backward(asked: dict[str, dict[str, Any]], cut: bool) -> Backward:
    """The backward pass of the model under a strategy."""
    model = build_model()
    sgd: Any = optimizer.SGD(0.1)
    chosen = optimizer.PipelineOptimizer(sgd, model.cuts, queue_size=4) if cut else sgd
    _, pairs = DistributedOptimizer(chosen, Settings.from_parts(asked)).minimize(model.loss)
    backward = pairs[0][1].backward_pass
    assert isinstance(backward, Backward)
    return backward


def test_a_strategy_puts_a_pipeline_around_any_optimizer() -> None:
    """Without cuts of its own a program is cut where the work is balanced."""
    spec = _backward(
        {"pipeline": {"schedule": "gpipe", "stages": 2, "micro_batches": 8}}, cut=False
    ).pipeline
    assert (spec.schedule, spec.stages, spec.micro_batches) == ("gpipe", 2, 8)
    assert spec.parts is None


@pytest.mark.parametrize("recompute", [{}, {"recompute": {"checkpoints": ["first"]}}])
def test_cuts_of_the_script_stay(recompute: dict[str, Any]) -> None:
    """A PipelineOptimizer keeps its cuts and queue, under a recomputing one too."""
    backward = _backward({"pipeline": {"micro_batches": 8, "queue_size": 9}, **recompute}, cut=True)
    assert (len(backward.pipeline.parts), backward.pipeline.micro_batches) == (3, 8)
    assert backward.pipeline.queue_size == 4
    assert (backward.checkpoints is None) == (not recompute)


def cut(cuts: Callable[[Variable, Variable], Any], **options: Any) -> list[int]:
    """How many records the forward pieces of a two-layer network have."""
    with own_programs():
        hidden = layers.fc(layers.data("x", [None, 2]), 3, act="tanh", name="first")
        loss = layers.mean(layers.fc(hidden, 1, name="second"))
        cut_optimizer = optimizer.PipelineOptimizer(
            optimizer.SGD(0.1), cuts(hidden, loss), **options
        )
        cut_optimizer.minimize(loss)
        return [len(section.records) for section in cut_optimizer.sections if section.forward]


def test_cuts_by_name() -> None:
    """A cut may name a variable, or a layer: then what the layer gives."""
    expected = cut(lambda hidden, loss: [[hidden], [loss]])
    assert expected == [2, 2]
    assert cut(lambda hidden, loss: [[hidden.name], [loss]]) == expected
    assert cut(lambda hidden, loss: ["first", loss.name]) == expected


def test_the_launcher_has_the_last_word() -> None:
    """Its keys go before the script's, one by one."""
    strategy = DistributedStrategy(
        pipeline=True, pipeline_configs={"micro_batches": 2, "stages": 4}
    )
    actual = resolve(strategy, '{"pipeline": {"micro_batches": 8}}').pipeline
    assert actual is not None
    assert (actual.micro_batches, actual.stages, actual.schedule) == (8, 4, "1f1b")
