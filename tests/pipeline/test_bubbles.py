"""The engine itself has the bubbles of the formulas: on a clock of its own to the digit, and for real."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from psfleet import layers
from psfleet.core.base.errors import ConfigError
from psfleet.core.graph.program.backward import append_backward
from psfleet.core.graph.program.operation import Array, Context, Op, Spec
from psfleet.core.graph.program.pipeline.cutting import PipelineSpec, split
from psfleet.core.graph.program.pipeline.estimates import live_micro_batches, picture, validate
from psfleet.core.graph.program.pipeline.pipelined_run import PipelinedRun
from psfleet.core.graph.program.program import Program, default_main_program
from psfleet.core.graph.program.run import ExecutionPlan, check_feed, make_plan
from psfleet.core.graph.program.variable import Variable, apply
from psfleet.core.runtime.stages import Action, Links, Schedule, StagePosition, Work, make_schedule
from tests.pipeline.thread_links import ThreadLinks
from tests.runtimes import own_programs
from tests.trainings import in_threads

_FORMULAS: dict[str, Callable[[int, int], float]] = {
    "gpipe": lambda stages, micro: (stages - 1) / (micro + stages - 1),
    "1f1b": lambda stages, micro: (stages - 1) / (micro + stages - 1),
    "interleaved": lambda stages, micro: (stages - 1) / (2 * micro + stages - 1),
    "zero-bubble": lambda stages, micro: (stages - 1) / (3 * micro + stages - 1),
}
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
    kind: str,
    micro_batches: int,
    seconds: float,
    chunks: int = 1,
) -> None:
    """One step of as many stages as there are clocks, each a thread, on pieces of equal work."""
    with own_programs():
        program, plan, feeds = build(kind, len(clocks), micro_batches, seconds, chunks)
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
    kind: str, stages: int, micro_batches: int, seconds: float, chunks: int
) -> tuple[Program, ExecutionPlan, dict[Variable, Array]]:
    """A program of equal pieces, the plan of a step and its feeds."""
    value = layers.data("x", [None, 3]) + layers.create_parameter([3], name="start")
    cuts = []
    for i in range(stages * chunks):
        value = apply(SlowAddition(seconds), value, layers.create_parameter([3], name=f"w{i}"))
        cuts.append([value])
    loss = layers.mean(value)
    [(_, gradient), *_] = append_backward(loss)
    assert gradient.backward_pass is not None
    parts = [s.records for s in split(loss, [*cuts[:-1], [loss]]) if s.forward]
    gradient.backward_pass.pipeline = PipelineSpec(
        kind, stages, micro_batches, chunks, parts, queue_size=99
    )
    program = default_main_program()
    plan = make_plan(program, [gradient])
    feeds = check_feed(program, plan.feeds, {"x": np.zeros((2 * micro_batches, 3), np.float32)})
    return program, plan, feeds


def timed_bubble(kind: str, stages: int, micro: int, latency: float = 0.0) -> float:
    """The bubble of a step of the engine on clocks of its own."""
    clocks, post = [Clock() for _ in range(stages)], ThreadLinks(stages)
    links = [Stamped(post.of(stage), clocks[stage], latency) for stage in range(stages)]
    run_step(clocks, links, kind, micro, 1.0, 2 if kind == "interleaved" else 1)
    return 1 - sum(clock.busy for clock in clocks) / (stages * max(clock.now for clock in clocks))


@pytest.mark.parametrize("kind", _FORMULAS)
@pytest.mark.parametrize(("stages", "micro"), [(2, 4), (3, 6), (4, 8)])
def test_the_engine_has_the_formulas_bubble(kind: str, stages: int, micro: int) -> None:
    """With pieces of equal work and messages that take no time, whatever the machine does meanwhile."""
    assert timed_bubble(kind, stages, micro) == pytest.approx(_FORMULAS[kind](stages, micro))


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "zero-bubble"])
def test_messages_cost_the_way_down_and_up_at_most(kind: str) -> None:
    """Two stages, messages that take a hundredth of a piece: few of them are on the critical path."""
    length = {late: 12 / (1 - timed_bubble(kind, 2, 4, late)) for late in (0.0, 0.01)}
    assert length[0.01] - length[0.0] <= 0.01 * 2 * 4 + 1e-9


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_every_schedule_comes_to_an_end(kind: str) -> None:
    """Any number of stages and micro-batches: each piece of work once, in order, no standstill."""
    for stages in range(1, 7):
        for micro_batches in range(1, 15):
            for per_stage in (1, 2, 3) if kind != "zero-bubble" or stages == 1 else (1,):
                validate(make_schedule(kind, stages, micro_batches, per_stage))


def test_memory_is_bounded_by_the_stages() -> None:
    """gpipe keeps all micro-batches, 1f1b one for each stage behind, zero-bubble no more than S."""
    live = {
        kind: [live_micro_batches(make_schedule(kind, 4, 16), s) for s in range(4)]
        for kind in ("gpipe", "1f1b", "zero-bubble")
    }
    assert live == {"gpipe": [16] * 4, "1f1b": [4, 3, 2, 1], "zero-bubble": [4] * 4}


def test_queues_of_two_are_enough_for_1f1b() -> None:
    """Stages that alternate send nothing long before it is wanted."""
    validate(make_schedule("1f1b", 4, 12), queue_size=2)


def test_a_standstill_is_found() -> None:
    """Two stages that each wait for the other are named with what they wait before."""
    forward, back = (Action(Work.FORWARD, 0, c) for c in (0, 1)), Action(Work.BACKWARD, 0, 0)
    first, second = forward
    wrong = Schedule("1f1b", ((back, first), (second, Action(Work.BACKWARD, 0, 1))), 1, 2)
    with pytest.raises(ConfigError, match="stands still before B0, F0"):
        validate(wrong)
    with pytest.raises(ConfigError, match="stage 0 does F of chunk 0"):
        validate(Schedule("1f1b", ((back,), (second,)), 1, 2))


def test_pictures() -> None:
    """One line per stage, idle time as dots."""
    assert picture(make_schedule("1f1b", 2, 2)).splitlines() == [
        "stage 0  F0 F1 .. .. B0 -- .. B1 --",
        "stage 1  .. F0 B0 -- F1 B1 -- .. ..",
    ]
