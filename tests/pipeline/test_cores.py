"""Cores, copies and steps that a PipelineOptimizer names: kept to, or refused."""

import os
import re
from pathlib import Path

from psfleet.program.pipeline.cutting import cores_of
from psfleet.stages.links import StagePosition
from tests.launch.conftest import Launch, launch
from tests.pipeline.conftest import finished

__all__ = ["launch"]

_SCRIPT = """
import os, threading, warnings
import numpy as np
from psfleet import fleet, optimizer
from psfleet.execution.executor import CPUPlace, CUDAPlace, Executor
from tests.pipeline.conftest import build_model, make_feed
fleet.init()
model = build_model()
cpu, gpu = CPUPlace(), CUDAPlace(0)
chosen = optimizer.PipelineOptimizer(
    optimizer.SGD(0.1), model.cuts, [cpu, cpu, gpu, cpu, cpu], [1, 1, 1, 2, 1], start_cpu_core_id=1
)
fleet.distributed_optimizer(chosen).minimize(model.loss)
Executor().run(feed=make_feed())
print("cores", sorted({tuple(os.sched_getaffinity(int(t))) for t in os.listdir("/proc/self/task")}))
"""


def test_processes_take_cores_in_turn() -> None:
    """Side by side from the first one on; behind the last core it begins anew."""
    places = [StagePosition(worker, stage, 2) for worker in (0, 1) for stage in (0, 1)]
    assert [cores_of(p, 1, 1, [0, 2, 4, 6, 8]) for p in places] == [[2], [4], [6], [8]]
    assert [cores_of(p, 2, 2, [0, 2, 4, 6]) for p in places[:2]] == [[4, 6], [0, 2]]
    assert cores_of(places[0], 0, 3, [5]) == [5]


def test_stage_processes_keep_to_their_cores(launch: Launch, tmp_path: Path) -> None:
    """All threads of a stage on CPUPlace have its one core; one on CUDAPlace may use all. Too few
    copies and cores are said in a sentence."""
    script = tmp_path / "pinned.py"
    script.write_text(_SCRIPT)
    root = str(Path(__file__).resolve().parents[2])
    job = finished(launch, "--stages 3 --micro-batches 2", str(script), PYTHONPATH=root)
    logs = [job.log(f"workerlog.0.stage.{stage}") for stage in range(3)]
    matches = [re.findall(r"cores (\[.*\])", log)[0] for log in logs]
    allowed = sorted(os.sched_getaffinity(0))
    for stage in (0, 1):
        assert matches[stage] == f"[({allowed[(1 + stage) % len(allowed)]},)]"
    assert matches[2] == str([tuple(allowed)])
    assert "concurrency_list asks for 2 copies of stage 1" in logs[1]
    assert ("want 4 cores" in logs[0]) == (len(allowed) < 4)
