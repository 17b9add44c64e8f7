"""Evaluations in a training loop, as a script makes them: published, read, and decided by."""

from functools import partial

import numpy as np
import pytest

from psfleet import metrics
from psfleet.core.base.errors import ConfigError
from psfleet.core.engine.runtime_interface import Gradient
from psfleet.core.runtime.dataset_pass import batches
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.script_runtime import ScriptRuntime
from psfleet.fleet.data_loops import DataLoops
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.metrics import FleetMetrics
from tests.trainings import in_threads, zero_rows

ROWS = zero_rows("rows")
SCORES, LABELS = np.array([0.1, 0.9, 0.8, 0.3]), np.array([0, 1, 0, 1])


def evaluated(runtime: ScriptRuntime) -> list[float]:
    """Three evaluations within `fleet.dataset`, and one after it: what each reads of itself and of all."""
    worker, workers = runtime.worker_index, runtime.worker_num
    runtime.create(ROWS)
    scores = FleetMetrics(runtime, [metrics.LogLoss()], window=1)
    loops = DataLoops(worker, workers, runtime.barrier, runtime=lambda: runtime)
    values: list[float] = []

    def evaluate(shift: float) -> None:
        scores.update(SCORES[worker::workers] * shift, LABELS[worker::workers])
        scores.publish()
        runtime.barrier()
        reading = scores.read()
        values.extend([reading.window["log_loss"], reading.run["log_loss"]])

    for step, rows in enumerate(
        loops.stepping(batches(24, 8 // workers, 1, 7, 1, lambda: runtime))
    ):
        runtime.push([Gradient(ROWS.key, np.full((len(rows), 1), -1, np.float32), rows, 1.0)])
        evaluate(1 / (step + 1))
    evaluate(1.0)
    state = runtime.read_table(ROWS.key)
    assert state.ids is not None
    assert state.ids.tolist() == list(range(24))
    with pytest.raises(ConfigError, match=r"counts metrics 'metrics' already; .* window=1"):
        FleetMetrics(runtime, [metrics.LogLoss()])
    runtime.barrier()
    runtime.close()
    return values


def test_an_evaluation_within_a_dataset() -> None:
    """In sync mode, on two servers and workers, readings are those of one process; samples train once."""
    values: list[list[float]] = []
    with LocalFleet(2, 2, in_process=True) as fleet:
        in_threads(
            [
                partial(lambda w: values.append(evaluated(fleet.connect(w, "sync"))), w)
                for w in (0, 1)
            ]
        )
        assert fleet.wait() == [0, 0]
    alone = evaluated(EmbeddedRuntime())
    assert len(alone) == 8
    for own in values:
        assert own == pytest.approx(alone, abs=1e-12)
