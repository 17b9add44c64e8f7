"""Gradients by elements and in 16 bits. (The same bits on any fleet: tests/cluster/test_bits.py.)"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from psfleet.core.engine.kernels.number_formats import rounded
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Runtime
from psfleet.core.engine.schema.table import BLOCK, TableSpec
from psfleet.core.graph.parameters.binding import BoundTables
from psfleet.core.graph.parameters.parameter import Parameter
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.strategy import AMPSettings
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.optimizer import SGD
from psfleet.optimizer.outgoing_gradients import GradientScaler
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.refusals import check_refusals
from tests.trainings import on_fleet, same_bits, zero_rows

SIZE = 3 * BLOCK + 17
DENSE = TableSpec("short/dense", "dense", (SIZE,), make_rule("momentum", {"momentum": 0.9}))


def test_missing_elements_are_zero() -> None:
    """A gradient by elements does what the dense one with zeros does; Momentum moves on everywhere."""
    one, other = EmbeddedRuntime(), EmbeddedRuntime()
    for runtime in (one, other):
        runtime.create(DENSE, np.linspace(-1, 1, SIZE, dtype=np.float32))
    for step in range(6):
        dice = np.random.default_rng(step)
        positions = np.flatnonzero(dice.random(SIZE) < 0.01).astype(np.int64)
        whole = np.zeros(SIZE, np.float32)
        whole[positions] = dice.standard_normal(len(positions))
        one.push([Gradient(DENSE.key, whole[positions], positions, 0.1)])
        other.push([Gradient(DENSE.key, whole, None, 0.1)])
    same_bits([one.read_table(DENSE.key)], [other.read_table(DENSE.key)])


def test_16_bits_are_rounded_after_the_sum() -> None:
    """Rows of a repeated id are summed in float32 and rounded once: what cancels leaves the rest."""
    runtime = EmbeddedRuntime()
    spec = zero_rows("sum")
    runtime.create(spec)
    values = np.array([[1 + 2.0**-9], [-1]], np.float32)
    assert rounded(values, "bfloat16").sum() == 0
    runtime.push([Gradient(spec.key, values, np.array([4, 4]), 1.0, "bfloat16")])
    assert runtime.read_table(spec.key).values[0].tolist() == [[-(2.0**-9)]]


REFUSED = """
push(2, [5, 4])  # IdError: ...ascend
push(2, [5, 5])  # IdError: ...ascend
push(1, [SIZE])  # IdError: ...{SIZE}
push(1, [-1])  # IdError: ...-1
push(3, [0, 1])  # ShapeError: ...positions
push(SIZE, precision="int8")  # ConfigError: ...int8
push(SIZE, scale=0.0)  # ConfigError: ...0.0""".replace("{SIZE}", str(SIZE))


@pytest.fixture(scope="module", params=["embedded", "cluster"])
def runtime(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    """Each runtime, with the tables."""
    if request.param == "embedded":
        made: Runtime = EmbeddedRuntime()
        made.create(DENSE, np.zeros(SIZE, np.float32))
        yield made
        return
    with LocalFleet(2, 1, in_process=True) as fleet:
        made = ClusterRuntime(fleet.environment(0), "async")
        made.create(DENSE, np.zeros(SIZE, np.float32))
        yield made
        made.close()


def test_what_cannot_be_meant_is_refused(runtime: Runtime) -> None:
    """One sentence that quotes the value, before anything leaves the worker; nothing changes."""

    def push(count: int, ids: list[int] | None = None, **fields: Any) -> None:
        values = np.ones(count, np.float32)
        positions = None if ids is None else np.array(ids)
        runtime.push([Gradient(DENSE.key, values, positions, **fields)])

    check_refusals(REFUSED, {"push": push, "SIZE": SIZE})
    assert not runtime.read_table(DENSE.key).values[0].any()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_skipped_step_is_a_push_of_nothing(mode: Any) -> None:
    """A worker whose gradients do not fit in float16 pushes no table; in a round the mean is that of
    the others, and nobody waits."""
    ends: list[Any] = []

    def run_worker(fleet: LocalFleet, worker: int) -> None:
        runtime = ClusterRuntime(fleet.environment(worker), mode)
        tables = BoundTables(runtime)
        w = Parameter("w", np.zeros(5))
        seat = tables.bind(SGD(1.0), w)
        scaler = GradientScaler(AMPSettings(dtype="float16"))
        for step in range(4):
            value = np.inf if (worker, step) == (1, 2) else (1 + worker) / 4
            gradient = Gradient(seat.key, np.full(5, value, np.float32), None, 1.0)
            tables.push(scaler.take([(seat, gradient)]), 8, 0.5)
            tables.value(w)
        runtime.barrier()
        tables.drop_pulled()
        ends.append(w.numpy().tolist())
        runtime.close()

    on_fleet(run_worker)
    assert ends == [[-(3 * 0.375 + 0.25) if mode == "sync" else -2.5] * 5] * 2
