"""The engine itself has the bubbles of the formulas: on a clock of its own to the digit, and for real."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest

from psfleet import layers
from psfleet.core.base.settings.kinds import Schedule
from psfleet.core.graph.program.backward import append_backward
from psfleet.core.graph.program.operation import Array, Context, Op, Spec
from psfleet.core.graph.program.pipeline.cutting import PipelineSpec, split
from psfleet.core.graph.program.pipeline.pipelined_run import PipelinedRun
from psfleet.core.graph.program.program import Program, default_main_program
from psfleet.core.graph.program.run import ExecutionPlan, check_feed, make_plan
from psfleet.core.graph.program.variable import Variable, apply
from psfleet.core.runtime.stages import (
    Action,
    Links,
    StagePosition,
    live_micro_batches,
    make_schedule,
)
from tests.pipeline.thread_links import ThreadLinks
from tests.runtimes import own_programs
from tests.trainings import in_threads

pytestmark = pytest.mark.quick

_KINDS: tuple[Schedule, ...] = get_args(Schedule)
_working = threading.local()


class Clock:
    """A stage's time: `work` seconds pass for it alone."""

    def __init__(self) -> None:
        self.now = 0.0
        self.busy = 0.0

    def work(self, seconds: float) -> None:
        """Nothing but the clock moves."""
        self.now += seconds
        self.busy += seconds


class Stamped:
    """Links whose messages carry the sender's time: who waits for one is no earlier than that.

    Args:
        latency: Seconds that a message takes.
    """

    def __init__(self, links: Links, clock: Clock, latency: float) -> None:
        self._links, self._clock, self._latency = links, clock, latency

    def send(self, process: int, tag: str, arrays: Sequence[Array]) -> None:
        """As Links.send."""
        stamp = np.array([self._clock.now + self._latency])
        self._links.send(process, tag, [stamp, *arrays])

    def receive(self, process: int, tag: str) -> list[Array]:
        """As Links.receive."""
        stamp, *arrays = self._links.receive(process, tag)
        self._clock.now = max(self._clock.now, float(stamp[0]))
        return arrays


@dataclass(frozen=True)
class SlowAddition(Op):
    """x + w, which takes `seconds`; so does each of the two gradients."""

    seconds: float

    def infer(self, x: Variable, w: Variable) -> Spec:
        return x.shape, x.dtype

    def forward(self, context: Context, x: Array, w: Array) -> Array:
        _working.clock.work(self.seconds)
        return x + w

    def backward(self, context: Context, gradient: Array) -> Any:
        _working.clock.work(self.seconds * sum(context.needs))
        return gradient, gradient.sum(axis=0)


def run_step(
    clocks: Sequence[Clock],
    links: Sequence[Links],
    kind: Schedule,
    micro_batches: int,
    seconds: float,
    per_stage: int,
) -> None:
    """One step of as many stages as there are clocks, each a thread, on pieces of equal work."""
    with own_programs():
        program, plan, feeds = build(kind, len(clocks) * per_stage, micro_batches, seconds)
    ready = threading.Barrier(len(clocks))

    def work(stage: int) -> None:
        _working.clock = clocks[stage]
        run = PipelinedRun(
            program, plan, feeds, StagePosition(0, stage, len(clocks)), links[stage], 0
        )
        ready.wait()
        run.complete([])

    in_threads([partial(work, stage) for stage in range(len(clocks))])


def build(
    kind: Schedule, pieces: int, micro_batches: int, seconds: float
) -> tuple[Program, ExecutionPlan, dict[Variable, Array]]:
    """A program of equal pieces, the plan of a step and its feeds."""
    value = layers.data("x", [None, 3]) + layers.create_parameter([3], name="start")
    cuts = []
    for i in range(pieces):
        value = apply(SlowAddition(seconds), value, layers.create_parameter([3], name=f"w{i}"))
        cuts.append([value])
    loss = layers.mean(value)
    [(_, gradient), *_] = append_backward(loss)
    assert gradient.backward_pass is not None
    parts = [s.records for s in split(loss, [*cuts[:-1], [loss]]) if s.forward]
    gradient.backward_pass.pipeline = PipelineSpec(
        kind, pieces, micro_batches, parts, queue_size=99
    )
    program = default_main_program()
    plan = make_plan(program, [gradient])
    feeds = check_feed(program, plan.feeds, {"x": np.zeros((2 * micro_batches, 3), np.float32)})
    return program, plan, feeds


def timed_bubble(
    kind: Schedule, stages: int, micro: int, latency: float = 0.0, per_stage: int = 1
) -> float:
    """The bubble of a step of the engine on clocks of its own."""
    clocks, post = [Clock() for _ in range(stages)], ThreadLinks(stages)
    links = [Stamped(post.of(stage), clocks[stage], latency) for stage in range(stages)]
    run_step(clocks, links, kind, micro, 1.0, per_stage)
    return 1 - sum(clock.busy for clock in clocks) / (stages * max(clock.now for clock in clocks))


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize(("stages", "micro", "per_stage"), [(2, 4, 2), (3, 6, 1), (4, 8, 1)])
def test_the_engine_has_the_formulas_bubble(
    kind: Schedule, stages: int, micro: int, per_stage: int
) -> None:
    """With pieces of equal work and messages that take no time, whatever the machine does meanwhile."""
    bubble = timed_bubble(kind, stages, micro, per_stage=per_stage)
    assert bubble == pytest.approx((stages - 1) / (micro + stages - 1))


@pytest.mark.parametrize("kind", _KINDS)
def test_messages_cost_the_way_down_and_up_at_most(kind: Schedule) -> None:
    """Two stages, messages that take a hundredth of a piece: few of them are on the critical path."""
    length = {late: 12 / (1 - timed_bubble(kind, 2, 4, late)) for late in (0.0, 0.01)}
    assert length[0.01] - length[0.0] <= 0.01 * 2 * 4 + 1e-9


def walk(kind: Schedule, stages: int, micro_batches: int) -> list[int]:
    """Take the work of all stages in order, each piece once its input is there.

    Returns:
        For each stage, the most micro-batches that were alive at once.
    """
    waiting = [make_schedule(kind, stage, stages, micro_batches) for stage in range(stages)]
    done: list[list[Action]] = [[] for _ in range(stages)]
    peaks = [0] * stages
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(waiting):
            before = stage - 1 if actions and actions[0].forward else stage + 1
            if actions and (not 0 <= before < stages or actions[0] in done[before]):
                done[stage].append(actions.pop(0))
                forwards = sum(action.forward for action in done[stage])
                peaks[stage] = max(peaks[stage], 2 * forwards - len(done[stage]))
                moved = True
    for actions in done:
        for forward in (True, False):
            order = [action.micro for action in actions if action.forward is forward]
            assert order == [*range(micro_batches)]
    return peaks


@pytest.mark.parametrize("kind", _KINDS)
def test_every_schedule_comes_to_an_end(kind: Schedule) -> None:
    """Any number of stages and micro-batches: each micro-batch goes forward and back once, in order, no
    standstill, and as many are alive as a memory budget is shared among."""
    for stages in range(1, 7):
        for micro_batches in range(1, 15):
            expected = [live_micro_batches(kind, s, stages, micro_batches) for s in range(stages)]
            assert walk(kind, stages, micro_batches) == expected


def test_memory_is_bounded_by_the_stages() -> None:
    """gpipe keeps all micro-batches, 1f1b one for each stage behind and its own."""
    live = {kind: [live_micro_batches(kind, s, 4, 16) for s in range(4)] for kind in _KINDS}
    assert live == {"gpipe": [16] * 4, "1f1b": [4, 3, 2, 1]}
