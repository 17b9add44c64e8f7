"""Cuts by measured times: balanced where shapes say nothing, and the same in all stages."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from psfleet import layers
from psfleet.core.graph.execution.executor import Executor
from psfleet.core.graph.program.backward import append_backward
from psfleet.core.graph.program.operation import Array, Context, Op, Record, Spec
from psfleet.core.graph.program.pipeline import estimates as timing
from psfleet.core.graph.program.pipeline.estimates import agree_on_parts, measure
from psfleet.core.graph.program.program import default_main_program
from psfleet.core.graph.program.run import check_feed, make_plan
from psfleet.core.graph.program.variable import Variable, apply
from psfleet.core.runtime.stages import StagePosition
from psfleet.optimizer import SGD, PipelineOptimizer
from tests.pipeline.thread_links import ThreadLinks
from tests.trainings import in_threads

pytestmark = pytest.mark.quick


class Clock:
    """Time passes in slow operations only, whatever else the machine does."""

    now = 0.0

    def perf_counter(self) -> float:
        """As time.perf_counter."""
        return self.now


clock = Clock()


@pytest.fixture(autouse=True)
def measured_by_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements read the clock of this module."""
    monkeypatch.setattr(timing, "time", clock)


@dataclass(frozen=True)
class Slow(Op):
    """x, after a while."""

    seconds: float

    def infer(self, x: Variable) -> Spec:
        return x.shape, x.dtype

    def forward(self, context: Context, x: Array) -> Array:
        clock.now += self.seconds
        return x + 1

    def backward(self, context: Context, gradient: Array) -> Any:
        clock.now += self.seconds
        return (gradient,)


def _build() -> Variable:
    """Eight layers of equal shape, of which the last takes as long as the others together."""
    value = layers.fc(layers.data("x", [None, 4]), 4)
    for i in range(8):
        value = apply(Slow(0.03 if i == 7 else 0.004), value)
    return layers.mean(value)


def test_the_slow_operation_is_alone() -> None:
    """All stages cut before it, though its shape is everybody's."""
    loss = _build()
    [(_, gradient), *_] = append_backward(loss)
    program = default_main_program()
    plan = make_plan(program, [gradient])
    feeds = check_feed(program, plan.feeds, {"x": np.ones((8, 4), np.float32)})
    post = ThreadLinks(3)
    records: list[list[list[Record]]] = [[], [], []]

    def work(stage: int) -> None:
        place = StagePosition(0, stage, 3)
        records[stage] = agree_on_parts(program, plan, feeds, 4, 2, place, post.of(stage), "cuts")

    in_threads([partial(work, stage) for stage in range(3)])
    assert records[0] == records[1] == records[2]
    second = [record.op for record in records[0][1]]
    assert [op.seconds for op in second if isinstance(op, Slow)] == [0.03]


def test_both_ways_are_measured() -> None:
    """An operation counts its forward and its backward, if a gradient goes through it."""
    loss = _build()
    [(_, gradient), *_] = append_backward(loss)
    program = default_main_program()
    plan = make_plan(program, [gradient])
    feeds = check_feed(program, plan.feeds, {"x": np.ones((8, 4), np.float32)})
    slow = [record for record in plan.forward if isinstance(record.op, Slow)]
    seconds = measure(program, plan, feeds, plan.forward)
    assert seconds[plan.forward.index(slow[-1])] == pytest.approx(0.06)


def test_one_process_cuts_by_its_first_step() -> None:
    """And keeps to these cuts, whatever is fetched later."""
    loss = _build()
    _, pairs = PipelineOptimizer(SGD(0.1)).minimize(loss)
    spec = pairs[0][1].backward_pass.pipeline
    spec.stages = 2
    executor, feed = Executor(), {"x": np.ones((8, 4), np.float32)}
    executor.run(feed=feed)
    parts = spec.parts
    executor.run(feed=feed, fetch_list=[loss])
    assert len(parts) == 2
    assert spec.parts is parts
