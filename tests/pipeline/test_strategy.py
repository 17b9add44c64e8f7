"""The part `pipeline` of a strategy: what it says, and what it contradicts."""

from typing import Any

import pytest

from psfleet import optimizer
from psfleet.errors import ConfigError
from psfleet.optimizer.distributed import DistributedOptimizer
from psfleet.program.backward import Backward
from psfleet.strategy import DistributedStrategy, Settings, resolve
from tests.pipeline.conftest import build_model


def _backward(asked: dict[str, dict[str, Any]], cut: bool) -> Backward:
    """The backward pass of the model under a strategy."""
    model = build_model()
    sgd: Any = optimizer.SGD(0.1)
    chosen = optimizer.PipelineOptimizer(sgd, model.cuts, queue_size=4) if cut else sgd
    _, pairs = DistributedOptimizer(chosen, Settings.from_parts(asked)).minimize(model.loss)
    found = pairs[0][1].backward_pass
    assert isinstance(found, Backward)
    return found


def test_a_strategy_puts_a_pipeline_around_any_optimizer() -> None:
    """Without cuts of its own a program is cut where the work is balanced."""
    wish = _backward(
        {"pipeline": {"schedule": "interleaved", "stages": 2, "micro_batches": 8}}, cut=False
    ).pipeline
    assert (wish.schedule, wish.stages, wish.micro_batches, wish.chunks) == ("interleaved", 2, 8, 2)
    assert wish.parts is None


@pytest.mark.parametrize("recompute", [{}, {"recompute": {"checkpoints": ["first"]}}])
def test_cuts_of_the_script_stay(recompute: dict[str, Any]) -> None:
    """A PipelineOptimizer keeps its cuts and queue, under a recomputing one too."""
    backward = _backward({"pipeline": {"micro_batches": 8, "queue_size": 9}, **recompute}, cut=True)
    assert (len(backward.pipeline.parts), backward.pipeline.micro_batches) == (3, 8)
    assert backward.pipeline.queue_size == 4
    assert (backward.checkpoints is None) == (not recompute)


def test_the_launcher_has_the_last_word() -> None:
    """Its keys go before the script's, one by one."""
    strategy = DistributedStrategy(
        pipeline=True, pipeline_configs={"micro_batches": 2, "stages": 4}
    )
    found = resolve(strategy, '{"pipeline": {"micro_batches": 8}}').pipeline
    assert found is not None
    assert (found.micro_batches, found.stages, found.schedule) == (8, 4, "1f1b")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"pipeline": {"schedule": "2f2b"}}, "schedule is '2f2b'"),
        ({"pipeline": {"stages": 0}}, "pipeline stages is 0; it must be at least 1"),
        ({"pipeline": {"micro_batches": "4"}}, "micro_batches is '4'; it must be a whole number"),
        ({"pipeline": {"stages": 2, "copies": [1, 2, 1]}}, r"copies is \(1, 2, 1\); it must name"),
        ({"pipeline": {"depth": 4}}, "no setting 'depth'"),
        (
            {"pipeline": {"schedule": "zero-bubble", "chunks": 2}},
            "zero-bubble and chunks = 2 contradict",
        ),
        (
            {"pipeline": {"schedule": "zero-bubble"}, "recompute": {}},
            "recompute and the pipeline schedule",
        ),
        ({"pipeline": {"stages": 2}, "localsgd": {}}, "localsgd and pipeline contradict"),
        (
            {"pipeline": {"stages": 2}, "amp": {"dtype": "float16"}},
            "amp with float16 and a pipeline",
        ),
    ],
)
def test_contradictions_are_refused(asked: dict[str, dict[str, Any]], says: str) -> None:
    """Each with a sentence that says what to do."""
    with pytest.raises(ConfigError, match=says):
        Settings.from_parts(asked)
