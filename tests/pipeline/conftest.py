"""A model with all that a pipeline must carry, and ways to run it on stages."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psfleet import layers
from psfleet.core.engine.gradients import SparseGrad
from psfleet.core.graph.program.pipeline.pipelined_run import PipelinedRun
from psfleet.core.graph.program.program import Program
from psfleet.core.graph.program.run import check_feed, make_plan
from psfleet.core.graph.program.variable import Variable
from psfleet.core.runtime.stages import StagePosition
from tests.pipeline.thread_links import ThreadLinks
from tests.runtimes import own_programs, own_runtime

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Programs, names and a runtime of the test's own."""
    with own_runtime(), own_programs():
        yield


@dataclass
class Model:
    """A network with what makes pipelines hard: rows in two places, dropout, a skip, a tied weight.

    Attributes:
        cuts: Two places to cut, and the loss.
    """

    loss: Variable
    guess: Variable
    cuts: list[list[Variable]]


def build_model() -> Model:
    """Build it in the default program."""
    ids = layers.data("ids", [None, 3], dtype="int64")
    wind = layers.data("wind", [None, 4])
    late = layers.data("late", [None, 1])
    shift = layers.create_parameter([8], name="shift")
    deep = layers.reshape(
        layers.embedding(ids, size=[50, 4], is_sparse=True, name="deep"), [-1, 12]
    )
    first = layers.fc(layers.concat([deep, wind], axis=1), 8, act="relu", name="first") + shift
    second = layers.dropout(layers.fc(first, 8, act="tanh", name="second"), 0.3) + shift
    third = layers.fc(second, 8, act="relu", name="third") + first + shift
    wide = layers.reduce_sum(
        layers.embedding(ids, size=[None, 1], is_distributed=True, name="wide"), dim=1
    )
    guess = layers.fc(third, 1, name="last") + wide
    loss = layers.mean(layers.sigmoid_cross_entropy_with_logits(guess, late))
    return Model(loss, guess, [[first], [second], [loss]])


def make_feed(samples: int = 24, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """A batch."""
    dice = np.random.default_rng(seed)
    return {
        "ids": dice.integers(0, 50, (samples, 3)),
        "wind": dice.standard_normal((samples, 4), np.float32),
        "late": dice.integers(0, 2, (samples, 1)).astype(np.float32),
    }


def run_stages(
    program: Program, feed: dict[str, Any], results: list[Variable], stages: int
) -> list[PipelinedRun]:
    """One step of a program on stages that are threads; the finished run of each."""
    plan = make_plan(program, results)
    feeds = check_feed(program, plan.feeds, feed)
    post = ThreadLinks(stages)
    runs: list[PipelinedRun | BaseException] = [RuntimeError("did not run")] * stages

    def work(stage: int) -> None:
        try:
            run = PipelinedRun(
                program, plan, feeds, StagePosition(0, stage, stages), post.of(stage), 0
            )
            run.complete(results)
            runs[stage] = run
        except BaseException as error:
            runs[stage] = error

    threads = [threading.Thread(target=work, args=(stage,)) for stage in range(stages)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in runs:
        if isinstance(one, BaseException):
            raise one
    return [one for one in runs if isinstance(one, PipelinedRun)]


def bits(value: Any) -> Any:
    """A value in a form that compares by its bits."""
    if isinstance(value, SparseGrad):
        return ("rows", value.ids.tobytes(), value.rows.tobytes())
    return np.asarray(value).tobytes()


def finished(launch: Any, options: str, *words: str, **environment: str) -> Any:
    """A job that has ended well, of these options, a script and its words; one thread for each process."""
    job = launch("--no-progress", *options.split(), *words, OMP_NUM_THREADS="1", **environment)
    code, _, err = job.ends(120)
    assert code == 0, err + job.log("*")
    return job


def alone(out: Path, script: str | Path, *words: str, **strategy: Any) -> dict[str, bytes]:
    """What a script saves that runs by itself: one process, no cluster, 4 micro-batches."""
    asked = json.dumps({"pipeline": {"micro_batches": 4}, **strategy})
    here = {"OMP_NUM_THREADS": "1", "PSFLEET_STRATEGY": asked, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(out), *words]
    subprocess.run(command, check=True, timeout=120, env=os.environ | here)
    return saved_bits(out)


def saved_bits(path: Path) -> dict[str, bytes]:
    """What a script has saved."""
    with np.load(path) as arrays:
        return {name: value.tobytes() for name, value in arrays.items()}
