"""The engine gives the bits of the unpipelined program, whatever the stages and the schedule."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from psfleet.core.base.settings.kinds import Schedule
from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.graph.execution.executor import Executor
from psfleet.core.graph.program.backward import Automatic, Backward, append_backward
from psfleet.core.graph.program.operation import Record
from psfleet.core.graph.program.pipeline.cutting import PipelineSpec, split
from psfleet.core.graph.program.program import default_main_program
from psfleet.core.graph.program.variable import Variable
from psfleet.core.runtime.strategy import GradientMergeSettings
from psfleet.optimizer import Adam, PipelineOptimizer
from psfleet.optimizer.outgoing_gradients import GradientMerger
from tests.pipeline.conftest import Model, bits, build_model, make_feed, run_stages
from tests.runtimes import own_programs, own_runtime

pytestmark = pytest.mark.quick


def _cut(model: Model, **settings: Any) -> tuple[list[Variable], Backward]:
    """A pipeline for the model; its gradients and the backward pass."""
    pairs = append_backward(model.loss)
    backward = pairs[0][1].backward_pass
    assert backward is not None
    parts = [s.records for s in split(model.loss, model.cuts) if s.forward]
    backward.pipeline = PipelineSpec(**{"parts": parts, **settings})
    return [gradient for _, gradient in pairs], backward


def _plain(model: Model, micro: int, gradients: list[Variable]) -> list[Any]:
    """The bits of loss and gradients of the plain Executor on one micro-batch after the other, merged."""
    program, feed = default_main_program(), make_feed()
    merger: GradientMerger[int] = GradientMerger(GradientMergeSettings(micro))
    size, losses, merged = 24 // micro, [], None
    for m in range(micro):
        part = {name: array[m * size : (m + 1) * size] for name, array in feed.items()}
        loss, *values = Executor().run(program, part, [model.loss, *gradients])
        merged = merger.take(list(enumerate(values)), size)
        losses.append(loss)
        program.step = m + 1
    program.step = 0
    assert merged is not None
    by_number: dict[Any, Any] = dict(merged[0])
    mean = np.asarray(np.mean(np.stack(losses).astype(np.float64), axis=0), np.float32)
    return [bits(value) for value in (mean, *(by_number[i] for i in range(len(gradients))))]


def _check_bits(
    stages: int, cut: Callable[[Model, Backward, list[list[Record]]], PipelineSpec]
) -> None:
    """Loss and every gradient of the model, on every stage, equal the merged ones of plain runs in every bit.

    Args:
        cut: The pipeline, by the model, its backward pass and the parts between the model's own cuts.
    """
    model = build_model()
    gradients, backward = _cut(model)
    parts, backward.pipeline = backward.pipeline.parts, None
    expected = _plain(model, 4, gradients)
    backward.pipeline = cut(model, backward, parts)
    results = [model.loss, *gradients]
    for run in run_stages(default_main_program(), make_feed(), results, stages):
        assert [bits(run.result(variable)) for variable in results] == expected


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [1, 3])
def test_gradients_are_those_of_the_plain_program(kind: Schedule, stages: int) -> None:
    """Under each schedule."""
    _check_bits(stages, lambda _, __, parts: PipelineSpec(kind, micro_batches=4, parts=parts))


@pytest.mark.parametrize(("kind", "per_stage"), [("1f1b", 1), ("1f1b", 2), ("gpipe", 2)])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_chosen_cuts_change_nothing(kind: Schedule, per_stage: int, stages: int) -> None:
    """Cuts chosen by the work between them, also several to a stage, give the same bits."""
    _check_bits(stages, lambda *_: PipelineSpec(kind, stages * per_stage, 4))


@pytest.mark.parametrize("checkpoints", ["first", "budget"])
@pytest.mark.parametrize("stages", [1, 3])
def test_recompute_inside_stages_changes_nothing(checkpoints: str, stages: int) -> None:
    """With checkpoints, or cuts for a memory budget, gradients are the same bits."""

    def cut(model: Model, backward: Backward, parts: Any) -> PipelineSpec:
        first = [model.cuts[0][0]]
        backward.checkpoints = Automatic(1 << 16) if checkpoints == "budget" else first
        return PipelineSpec("1f1b", micro_batches=4, parts=parts)

    _check_bits(stages, cut)


def test_uneven_micro_batches_weigh_by_their_samples() -> None:
    """Of 23 samples in 4 parts each counts alike: the gradient is the whole batch's but for rounding."""
    model = build_model()
    gradients, backward = _cut(model, micro_batches=4)
    program, feed = default_main_program().clone(for_test=True), make_feed(23)
    spec, backward.pipeline = backward.pipeline, None
    expected = Executor().run(program, feed, [model.loss, *gradients])
    backward.pipeline = spec
    [run] = run_stages(program, feed, [model.loss, *gradients, model.guess], 1)
    for variable, value in zip([model.loss, *gradients], expected, strict=True):
        actual = run.result(variable)
        if isinstance(actual, SparseGrad):
            actual, value = _dense(actual), _dense(value)
        np.testing.assert_allclose(actual, value, rtol=2e-4, atol=1e-6)
    assert run.result(model.guess).shape == (23, 1)


def _dense(grad: SparseGrad) -> Any:
    whole = np.zeros((50, grad.rows.shape[1]), np.float32)
    np.add.at(whole, grad.ids, grad.rows)
    return whole


def test_results_come_to_every_stage() -> None:
    """Predictions, feeds, parameters and ids can be fetched from any stage."""
    model = build_model()
    gradients, _ = _cut(model, micro_batches=3)
    program, feed = default_main_program(), make_feed()
    expected = [gradients[0], model.guess, program.variable("ids"), program.variable("first.w_0")]
    runs = run_stages(program, feed, expected, 3)
    assert runs[0].result(model.guess).shape == (24, 1)
    for run in runs[1:]:
        assert all(bits(run.result(v)) == bits(runs[0].result(v)) for v in expected)


@pytest.mark.parametrize("micro", [1, 4])
def test_training_by_the_executor(micro: int) -> None:
    """5 steps of exe.run give the weights of the same micro-batches with gradient merge."""
    curves = []
    for pipelined in (True, False):
        with own_runtime(), own_programs():
            curves.append(_trained(pipelined, micro))
    assert curves[0] == curves[1]


def _trained(pipelined: bool, micro: int) -> list[Any]:
    model = build_model()
    if pipelined:
        optimizer = PipelineOptimizer(Adam(0.01), model.cuts)
        _, pairs = optimizer.minimize(model.loss)
        pairs[0][1].backward_pass.pipeline.micro_batches = micro
    else:
        plain = Adam(0.01)
        plain.merger = GradientMerger(GradientMergeSettings(micro))
        _, pairs = plain.minimize(model.loss)
    executor = Executor()
    for step in range(5):
        feed, size = make_feed(seed=step), 24 // micro
        parts = (
            [feed]
            if pipelined
            else [
                {name: array[m * size : (m + 1) * size] for name, array in feed.items()}
                for m in range(micro)
            ]
        )
        for part in parts:
            executor.run(feed=part, fetch_list=[model.loss])
    return [bits(p.lookup(np.arange(50)) if p.sparse else p.numpy()) for p, _ in pairs]
