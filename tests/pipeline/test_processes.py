"""Stages as processes, started by the real launcher, with real servers."""

import json
import os
import re
import signal
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psfleet.core.graph.program.pipeline.cutting import cores_of
from psfleet.core.runtime.stages import StagePosition
from tests.launch.conftest import Launch, launch
from tests.pipeline.conftest import alone, finished, saved_bits

__all__ = ["launch"]

SCRIPT = str(Path(__file__).parent / "scripts" / "trainer.py")
ROOT = Path(__file__).resolve().parents[2]
Train = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the script trains by itself."""
    return alone(tmp_path_factory.mktemp("alone") / "out.npz", SCRIPT, "plain", "4")


@pytest.mark.parametrize(
    ("wrapper", "options"),
    [
        ("cut", "--pipeline 1f1b --stages 3 --servers 2"),
        pytest.param("plain", "--pipeline gpipe --stages 2 --recompute", marks=pytest.mark.long),
        ("loss", "--pipeline 1f1b --stages 2"),  # the second stage reads no parameter
    ],
)
def test_stage_processes_give_the_bits_of_one(
    expected: dict[str, bytes], launch: Launch, tmp_path: Path, wrapper: str, options: str
) -> None:
    """Losses and weights of 4 steps equal those of the script run by itself, in every bit."""
    out = tmp_path / "out.npz"
    finished(launch, f"--micro-batches 4 {options}", SCRIPT, str(out), wrapper, "4")
    assert saved_bits(out) == expected


@pytest.mark.long
def test_two_workers_of_two_stages(launch: Launch, tmp_path: Path) -> None:
    """Workers average as without stages, also with recompute and gradient merge from a file. Two processes
    of the second stage take micro-batches in turn: the same but for rounding."""
    results = []
    for name, stages in (("one", 1), ("two", 2), ("copies", "2\ncopies = [1, 2]")):
        strategy, out = tmp_path / f"{name}.toml", tmp_path / f"{name}.npz"
        strategy.write_text(
            '[consistency]\nmode = "sync"\n[gradient_merge]\nk_steps = 2\n[recompute]\n'
            f"[pipeline]\nmicro_batches = 4\nstages = {stages}\n"
        )
        job = finished(launch, f"--workers 2 --strategy {strategy}", SCRIPT, str(out), "sgd", "4")
        assert bool(job.log("workerlog.1.stage.1.copy.1")) == (name == "copies")
        with np.load(out) as arrays:
            results.append(dict(arrays))
    for key, value in results[0].items():
        np.testing.assert_array_equal(results[1][key], value)
        np.testing.assert_allclose(results[2][key], value, rtol=1e-4, atol=1e-6, err_msg=key)


def test_a_killed_stage_is_named_and_ends_the_job(launch: Launch, tmp_path: Path) -> None:
    """The launcher says which stage it was; nothing is left running. Only servers come back from logs."""
    options = ["--durability", "log", "--stages", "2", "--micro-batches", "4"]
    words = [SCRIPT, str(tmp_path / "out.npz"), "plain", "100000"]
    job = launch("--no-progress", *options, *words)
    job.until_logged("workerlog.0.stage.1", "step 3")
    [pid] = [pid for pid in job.family() if "PSFLEET_STAGE=1" in _variables(pid)]
    os.kill(pid, signal.SIGKILL)
    code, _, err = job.ends()
    assert code == 128 + signal.SIGKILL
    assert "worker 0 stage 1 failed first: killed by SIGKILL" in err


def _variables(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_text().split("\0")


_SCRIPT = """
import os, threading, warnings
import numpy as np
from psfleet import fleet, optimizer
from psfleet.core.graph.execution.executor import CPUPlace, CUDAPlace, Executor
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
    """Side by side from the first one on; behind the last core it begins again."""
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


COMPOSED = Path(__file__).parent / "scripts" / "composed.py"


@pytest.mark.parametrize(
    "more",
    ["[dgc]\nsparsity = [0.75]\n", pytest.param("[lars]\n[amp]\n", marks=pytest.mark.long)],
    ids=["dgc", "lars, amp"],
)
def test_everything_around_one_optimizer(launch: Launch, tmp_path: Path, more: str) -> None:
    """Recompute, pipeline, merge and a switch of the rule, around Momentum that is in a
    PipelineOptimizer: weights, losses and the last stage's whole state_dict are those of one process."""
    asked = "[gradient_merge]\nk_steps = 2\n[recompute]\n" + more
    expected = alone(tmp_path / "alone.npz", COMPOSED, **tomllib.loads(asked))
    strategy, out = tmp_path / "strategy.toml", tmp_path / "out.npz"
    sync = '[consistency]\nmode = "sync"\n[pipeline]\nmicro_batches = 4\nstages = 3\n'
    strategy.write_text(sync + asked)
    finished(launch, f"--strategy {strategy}", str(COMPOSED), str(out))
    assert saved_bits(out) == expected
    assert any(name.startswith("state deep") for name in expected)


def test_a_script_that_updates_at_once_is_refused_on_stages(launch: Launch, tmp_path: Path) -> None:
    """Each stage would train the whole of it: a sentence says what to do instead."""
    script = tmp_path / "eager.py"
    script.write_text(
        "import numpy as np, psfleet as ps\n"
        "from psfleet import fleet, optimizer\n"
        "fleet.init()\n"
        "w = ps.Parameter('w', [4])\n"
        "sgd = fleet.distributed_optimizer(optimizer.SGD(0.1, parameters=[w]))\n"
        "w.grad = np.ones(4, np.float32)\n"
        "sgd.step()\n"
    )
    code, _, err = launch("--no-progress", "--stages", "2", str(script)).ends()
    assert code == 1
    assert "updates at once by computed gradients, and this is worker 0 stage" in err


DEALING = str(Path(__file__).parent / "scripts" / "dealing.py")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", ["ssp", "changing"])
def test_all_stages_have_the_same_batches(launch: Launch, tmp_path: Path, mode: str) -> None:
    """Two workers of two stages use every sample of two epochs once, each in one of them, in ssp mode
    without any lead, and where the mode changes from sync to async and back meanwhile; what a table counts
    of shows and clicks comes through the pieces of a pipeline."""
    options = ["--workers", "2", "--pipeline", "1f1b", "--stages", "2", "--micro-batches", "2"]
    if mode == "ssp":
        options += ["--mode", "ssp", "--staleness", "0"]
    job = launch("--no-progress", *options, DEALING, str(tmp_path), mode)
    code, _, err = job.ends(170)
    assert code == 0, err + job.log("*")
    seen = {
        (worker, stage): json.loads((tmp_path / f"{worker}.{stage}.json").read_text())
        for worker in range(2)
        for stage in range(2)
    }
    for worker in range(2):
        assert seen[worker, 0] == seen[worker, 1]
    used = Counter(sample for worker in range(2) for batch in seen[worker, 0] for sample in batch)
    assert used == Counter(dict.fromkeys(range(24), 2))
    scores = json.loads((tmp_path / "scores.json").read_text())
    # In sync mode a round counts the sums of its workers' pushes.
    assert scores == {str(sample): [12.0, 4.0] for sample in range(24)}


EXAMPLE = str(Path(__file__).resolve().parents[2] / "examples" / "pipeline_mlp.py")


@pytest.mark.long
def test_the_example_learns_on_two_stages(launch: Launch) -> None:
    """50 steps on two stages bring the loss of 10 classes from 2.3 below 0.3."""
    options = "--pipeline 1f1b --stages 2 --micro-batches 8"
    code, out, err = launch("--no-progress", *options.split(), EXAMPLE, "--steps", "50").ends()
    assert code == 0, err
    matches = re.findall(r"step 50: loss ([\d.]+)", out)
    assert len(matches) == 1
    assert float(matches[0]) < 0.3
