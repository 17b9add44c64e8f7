"""Where programs are cut, who sits where, and what stays in memory."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psfleet import layers
from psfleet.core.base.errors import UsageError
from psfleet.core.base.settings.environment import Environment, read_environment
from psfleet.core.graph.execution import executor
from psfleet.core.graph.execution.executor import Executor
from psfleet.core.graph.program.backward import append_backward
from psfleet.core.graph.program.pipeline.chunk import cut_plan
from psfleet.core.graph.program.pipeline.cutting import PipelineSpec
from psfleet.core.graph.program.pipeline.estimates import balanced_parts, weight_of
from psfleet.core.graph.program.pipeline.pipelined_run import PipelinedRun
from psfleet.core.graph.program.program import default_main_program
from psfleet.core.graph.program.recompute import ActivationMeter
from psfleet.core.graph.program.run import ExecutionPlan, check_feed, make_plan
from psfleet.core.graph.program.variable import Variable
from psfleet.core.runtime import stages
from psfleet.core.runtime.stages import StagePosition
from psfleet.optimizer import SGD, Adam
from psfleet_launch.job.job_plan import Job, Told, child_environment
from psfleet_launch.job.job_request import JobRequest
from tests.pipeline.conftest import build_model, make_feed

pytestmark = pytest.mark.quick


def _deep(widths: list[int]) -> tuple[ExecutionPlan, list[Variable]]:
    """A plan for a chain of layers of these widths, and the layers' results."""
    hidden = [layers.data("x", [None, widths[0]])]
    for width in widths[1:]:
        hidden.append(layers.fc(hidden[-1], width, act="tanh"))
    pairs = append_backward(layers.mean(hidden[-1]))
    return make_plan(default_main_program(), [gradient for _, gradient in pairs]), hidden


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_balanced_parts_are_as_light_as_can_be(count: int) -> None:
    """No other edges make the heaviest part lighter by more than the slack of a tenth."""
    plan, _ = _deep([16, 64, 8, 64, 32, 32, 4])
    weights = [weight_of(record) for record in plan.forward]
    parts = balanced_parts(plan, count)
    assert [record for part in parts for record in part] == plan.forward
    heaviest = max(sum(map(weight_of, part)) for part in parts)
    assert heaviest <= 1.1 * min(
        max(sum(weights[i:j]) for i, j in pairwise(edges))
        for edges in _all_edges(len(weights), count)
    )


def _all_edges(length: int, count: int, start: int = 0) -> list[list[int]]:
    if count == 1:
        return [[start, length]]
    return [
        [start, *rest]
        for cut in range(start + 1, length - count + 2)
        for rest in _all_edges(length, count - 1, cut)
    ]


def test_among_light_parts_the_ones_that_send_least_are_chosen() -> None:
    """The cut lies where the network is narrow."""
    plan, _ = _deep([32, 32, 2, 32, 32])
    first, second = balanced_parts(plan, 2)
    assert first[-1].output.shape == (None, 2)
    assert second[0].inputs[0] is first[-1].output


def test_pieces_say_what_travels() -> None:
    """A value goes to each piece that uses it; its gradient from the last of them back to the maker."""
    model = build_model()
    plan = make_plan(default_main_program(), [append_backward(model.loss)[0][1]])
    thirds = balanced_parts(plan, 3)
    parts = cut_plan(plan, thirds)
    for i, part in enumerate(parts):
        assert all(i in parts[maker].gives[v] for v, maker in part.takes.items())
        assert all(parts[after].last_user[v] == i for v, after in part.next_user.items())
    shift = default_main_program().variable("shift")
    assert [shift in part.own_leaves for part in parts].count(True) <= 1


def test_recompute_lowers_the_peak_of_all_live_micro_batches() -> None:
    """A meter sees every micro-batch that is alive: 16 layers under gpipe, 4 micro-batches."""
    plan, hidden = _deep([32] * 17)
    backward = plan.backwards[0].backward
    peaks = []
    for checkpoints in (None, [hidden[4], hidden[8], hidden[12]]):
        backward.checkpoints, meter = checkpoints, ActivationMeter()
        backward.pipeline = PipelineSpec("gpipe", micro_batches=4)
        feeds = check_feed(default_main_program(), plan.feeds, {"x": np.ones((64, 32), np.float32)})
        PipelinedRun(default_main_program(), plan, feeds, StagePosition(), None, 0, meter).complete(
            []
        )
        peaks.append(meter.peak_bytes)
    assert peaks[0] > 4 * 15 * 16 * 32 * 4
    assert peaks[1] < 0.6 * peaks[0]


def _variables(**more: str) -> dict[str, str]:
    return {
        "PSFLEET_ROLE": "worker",
        "PSFLEET_RANK": "1",
        "PSFLEET_WORKERS": "2",
        "PSFLEET_SERVERS": "unix:/a",
        **more,
    }


def test_each_process_has_a_seat_of_its_own() -> None:
    """Seats count worker by worker, stage by stage, copy by copy; the worker's rank stays."""
    settings = read_environment(
        _variables(
            PSFLEET_STAGE="1",
            PSFLEET_STAGES="2",
            PSFLEET_COPY="1",
            PSFLEET_STAGE_COPIES="1,2",
            PSFLEET_STAGE_ENDPOINTS="ipc:///0,ipc:///1,ipc:///2",
        )
    )
    assert (settings.rank, settings.workers) == (1, 2)
    assert (settings.seat.rank, settings.seat.workers, settings.seat.stages) == (5, 6, 1)
    assert Environment().seat == Environment()


def test_a_job_has_a_member_for_each_process(tmp_path: Path) -> None:
    """Named with stage and copy; servers count seats, workers count workers."""
    request = JobRequest(
        __file__, workers=2, strategy={"pipeline": {"stages": 2, "copies": [1, 2]}}
    )
    job = Job(request, "j", "t", tmp_path, tmp_path)
    names = [str(member) for member in job.workers[3:]]
    assert names == ["worker 1 stage 0", "worker 1 stage 1 copy 0", "worker 1 stage 1 copy 1"]
    environment = child_environment(job, job.workers[5], Told(["unix:/a"]), {})
    place = read_environment(environment)
    assert (place.rank, place.workers, place.stage, place.copy) == (1, 2, 1, 1)
    assert place.seat.rank == 5
    assert child_environment(job, job.servers[0], Told(["unix:/a"]), {})["PSFLEET_WORKERS"] == "6"


def test_state_is_not_set_from_stages() -> None:
    """It would reach the first stage's tables only: refused at once, not after a deadline."""
    model: Any = build_model()
    adam = Adam(0.1)
    adam.minimize(model.loss)
    Executor().run(feed=make_feed())
    state = adam.state_dict()
    stages.settle(StagePosition(stages=2))
    try:
        with pytest.raises(UsageError, match="cannot be set from the stages"):
            adam.set_state_dict(state)
    finally:
        stages.settle(StagePosition())


def test_a_program_that_is_not_cut_is_refused_on_stages() -> None:
    """Each stage would train the whole of it: the error says what to do."""
    model: Any = build_model()
    SGD(0.1).minimize(model.loss)
    stages.settle(StagePosition(stages=2))
    try:
        with pytest.raises(UsageError, match="is not cut into stages"):
            Executor().run(feed=make_feed(), fetch_list=[model.loss])
    finally:
        stages.settle(StagePosition())


def test_an_evaluation_that_does_not_fit_into_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that evaluates runs the whole program; one without room for the weights says so at once."""
    model: Any = build_model()
    program = default_main_program().clone(for_test=True)
    stages.settle(StagePosition(stages=2, stage=1))
    try:
        Executor().run(program, make_feed(), [model.guess])
        monkeypatch.setattr(executor, "available_memory", lambda: 100)
        with pytest.raises(UsageError, match="runs whole in worker 0 stage 1: its weights take"):
            Executor().run(program, make_feed(), [model.guess])
    finally:
        stages.settle(StagePosition())
