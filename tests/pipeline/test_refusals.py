"""What cannot be a pipeline: schedules, strategies, stages and jobs that are refused with a sentence."""

import numpy as np
import pytest

from psfleet import layers
from psfleet.core.base.settings.environment import Environment, read_environment
from psfleet.core.graph.program.backward import append_backward
from psfleet.core.graph.program.pipeline.cutting import PipelineSpec, split
from psfleet.core.graph.program.program import default_main_program
from psfleet.core.runtime.strategy import Settings
from psfleet.optimizer import SGD, PipelineOptimizer, RecomputeOptimizer
from tests.pipeline.conftest import build_model, make_feed, run_stages
from tests.pipeline.test_strategy import cut
from tests.refusals import check_refusals, named

pytestmark = pytest.mark.quick

SETTINGS = """
strategy(pipeline={"schedule": "2f2b"})  # schedule is '2f2b'
strategy(pipeline={"schedule": "zero-bubble"})  # schedule is 'zero-bubble'; it must be gpipe or 1f1b
strategy(pipeline={"chunks": 2})  # no setting 'chunks'
strategy(pipeline={"stages": 0})  # pipeline stages is 0; it must be at least 1
strategy(pipeline={"micro_batches": "4"})  # micro_batches is '4'; it must be a whole number
strategy(pipeline={"stages": 2, "copies": [1, 2, 1]})  # copies is (1, 2, 1); it must name
strategy(pipeline={"depth": 4})  # no setting 'depth'
strategy(pipeline={"stages": 2}, localsgd={})  # localsgd and pipeline contradict
strategy(pipeline={"stages": 2}, amp={"dtype": "float16"})  # amp with float16 and a pipeline
process(STAGE="2", STAGES="2")  # PSFLEET_STAGE is 2, but the worker has stages 0
process(STAGES="2")  # names 0 endpoints for 2 processes
process(STAGES="2", STAGE_COPIES="1")  # COPIES is (1,)
process(STAGE_COPIES="one")  # 'one'; it must be whole numbers
PipelineOptimizer(SGD(0.1), queue_size="2")  # queue_size is '2', it must be a whole number above 0
PipelineOptimizer(SGD(0.1), concurrency_list=[1, 0, 1])  # concurrency_list is [1, 0, 1], it must be a list, each a whole number above 0
PipelineOptimizer(SGD(0.1), concurrency_list=[1, "2", 1])  # concurrency_list is [1, '2', 1], it must be a list, each a whole
cut(lambda hidden, loss: [[hidden]])  # UsageError: ...must end with the loss
cut(lambda hidden, loss: [[fc(hidden, 1, name="other")], [loss]])  # UsageError: ...cut 0 has 'other.tmp_0'
cut(lambda hidden, loss: [[hidden], [hidden], [loss]])  # UsageError: ...is behind an earlier cut
cut(lambda hidden, loss: [[hidden], [loss]], place_list=[None])  # ConfigError: ...2 cuts make 3 sections, but place_list has 1
RecomputeOptimizer(SGD(0.1)).minimize(3)  # UsageError: ...has no checkpoints; call _set_checkpoints first
cut(lambda hidden, loss: "first")  # cut_list is 'first', it must be a list
cut(lambda hidden, loss: [[3], [loss]])  # UsageError: ...cut 0: 3 is neither a variable nor the name
cut(lambda hidden, loss: [["third"], [loss]])  # UsageError: ...cut 0: 'third' is not in the program
cut(lambda hidden, loss: [[], [loss]])  # UsageError: ...cut 0 is empty; it must have a variable
process(COPY="1")  # PSFLEET_COPY is 1, but stage 0 has 1 copies
PipelineOptimizer(SGD(0.1), sync_steps=4)  # ConfigError: ...sync_steps is 4, but copies of a section have one set
"""
RUNS = """
run(2)  # ConfigError: ...3 sections, which 2 stages
run(3, late=7)  # ShapeError: ...different numbers of samples
run(1, stages=400)  # ConfigError: ...too few for 400 sections
run(1, losses=2)  # UsageError: ...has 2 losses
"""


def strategy(**parts: object) -> Settings:
    """The settings of a strategy with these parts."""
    return Settings.from_parts(parts)  # type: ignore[arg-type]


def process(**more: str) -> Environment:
    """What a process of a worker reads that is told so."""
    said = {"ROLE": "worker", "RANK": "1", "WORKERS": "2", "SERVERS": "unix:/a", **more}
    return read_environment({f"PSFLEET_{name}": value for name, value in said.items()})


def test_settings() -> None:
    """Schedules, strategies and places of processes that cannot be, each by the value that is wrong."""
    classes = named(PipelineOptimizer, RecomputeOptimizer, SGD)
    check_refusals(SETTINGS, classes | named(strategy, process, layers.fc, cut))


def test_runs() -> None:
    """Stages that do not divide the pieces, contradictions, feeds that cannot be cut, a second loss."""
    model = build_model()
    pairs = append_backward(model.loss)
    gradients, backward = [gradient for _, gradient in pairs], pairs[0][1].backward_pass
    assert backward is not None
    parts = [s.records for s in split(model.loss, model.cuts) if s.forward]
    program, feed = default_main_program(), make_feed()

    def run(count: int, late: int = 24, stages: int = 0, losses: int = 1) -> None:
        cut = PipelineSpec(micro_batches=4, parts=parts)
        backward.pipeline = PipelineSpec(stages=stages) if stages else cut
        expected = gradients if losses == 1 else [gradients[0], append_backward(model.loss)[0][1]]
        run_stages(program, feed | {"late": feed["late"][:late]}, expected, count)

    check_refusals(RUNS, {"run": run, "np": np})
