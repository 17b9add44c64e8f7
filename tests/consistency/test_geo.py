"""geo: local steps on copies, then what was learned is added."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from psfleet.core.base.errors import ConfigError, DeadlineExceeded, UsageError
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, PendingPush, Read
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.modes.geo import GeoRuntime
from psfleet.core.runtime.modes.switch import ModeSwitchRuntime, connect
from psfleet.core.runtime.strategy import ConsistencySettings, Settings
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.consistency.workers import DENSE, ROWS, ready, step, taken, together
from tests.trainings import TrainingWorkload

IDS = np.arange(8)


def test_one_worker_trains_as_by_itself() -> None:
    """With one worker, k local steps and an exchange end, to rounding, where the embedded runtime ends:
    Adam and Adagrad, dense and sparse, optimizer state kept over the exchanges."""
    training = TrainingWorkload(steps=17)
    alone = EmbeddedRuntime()
    training.run(alone)
    expected = training.result(alone)
    with LocalFleet(2, 1, in_process=True) as fleet:
        runtime = connect(fleet.environment(0), ConsistencySettings("geo", k_steps=5))
        training.run(runtime)
        actual = training.result(runtime)
        assert runtime.stats()[0]["pushes"] == 4  # three exchanges and the rest
        runtime.close()
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours.values[0], theirs.values[0], rtol=2e-4, atol=2e-6)
    assert expected[1].ids is not None
    np.testing.assert_array_equal(actual[1].ids, expected[1].ids)


def test_everything_that_workers_learn_is_added() -> None:
    """Two workers with unequal steps and rows, some shared: after a barrier the servers hold the sum of
    all steps, and so does each worker; ids that were only read have no row."""

    def work(runtime: ModeSwitchRuntime) -> None:
        mine = IDS[:5] if runtime.worker_index else IDS[3:]
        for _ in range(7 + 4 * runtime.worker_index):
            step(runtime, mine)
        taken(runtime, np.arange(100, 140))
        runtime.barrier()
        dense, rows = taken(runtime, IDS)
        assert dense == pytest.approx(18, rel=1e-5)
        assert rows == pytest.approx([11, 11, 11, 18, 18, 7, 7, 7], rel=1e-5)
        assert sum(t["count"] for s in runtime.stats() for t in s["tables"][1:]) == 8
        assert sum(server["samples"] for server in runtime.stats()) == 2 * (7 * 5 + 11 * 5)

    with LocalFleet(2, 2, in_process=True) as fleet:
        together(fleet, ConsistencySettings("geo", k_steps=3), work)


def test_a_worker_sees_its_own_steps_at_once_and_others_after_an_exchange() -> None:
    """Between exchanges a copy shows this worker's steps whole; an exchange sends 1/workers of
    them and keeps the rest in the copy."""

    def work(runtime: ModeSwitchRuntime) -> None:
        if runtime.worker_index == 0:
            for number in range(4):
                assert taken(runtime, IDS) == (number, [number] * 8)
                step(runtime, IDS)
            assert taken(runtime, IDS) == (4, [4] * 8)
        runtime.all_reduce(np.zeros(1))  # sends the rest
        if runtime.worker_index == 1:
            assert taken(runtime, IDS) == (4, [4] * 8)

    with LocalFleet(1, 2, in_process=True) as fleet:
        together(fleet, ConsistencySettings("geo", k_steps=4), work)


def test_copies_are_bounded() -> None:
    """A worker that passes over many ids keeps copies of some, and loses nothing."""

    def work(runtime: ModeSwitchRuntime) -> None:
        geo = runtime._fleet
        assert isinstance(geo, GeoRuntime)
        for number in range(40):
            step(runtime, np.arange(number * 10, number * 10 + 20))
            assert len(geo._copies[ROWS.key]) <= 50 + 2 * 20
        runtime.barrier()
        _, rows = taken(runtime, np.arange(400))
        assert rows == pytest.approx([2] * 10 + [4] * 390, rel=1e-5)

    with LocalFleet(1, 2, in_process=True) as fleet:
        together(fleet, ConsistencySettings("geo", k_steps=2, copied_rows=50), work)


def test_what_geo_does_not_go_with() -> None:
    """Parts that are about gradients on their way are refused."""
    for part in ("dgc", "amp", "pipeline", "localsgd"):
        with pytest.raises(ConfigError, match=f"{part} and the consistency mode 'geo'"):
            Settings.from_parts({"consistency": {"mode": "geo"}, part: {}})


def test_a_rule_that_moves_every_row() -> None:
    """Rows that drift without a gradient (Momentum) are exchanged too."""
    spec = TableSpec("drift", "sparse", (2,), make_rule("momentum", {}), every_row=True)

    def run(runtime: ModeSwitchRuntime | EmbeddedRuntime) -> NDArray[np.float32]:
        runtime.create(spec)
        for number in range(6):
            ids = np.array([number % 3])
            runtime.push([Gradient(spec.key, np.ones((1, 2), np.float32), ids, 0.1)])
        return runtime.read_table(spec.key).values[0]

    with LocalFleet(1, 1, in_process=True) as fleet:
        runtime = connect(fleet.environment(0), ConsistencySettings("geo", k_steps=4))
        np.testing.assert_allclose(run(runtime), run(EmbeddedRuntime()), rtol=1e-5)
        runtime.close()


class FailingRuntime(ClusterRuntime):
    """A cluster's runtime whose pushes raise errors before they are sent.

    Attributes:
        errors: Errors of the next pushes.
    """

    errors: tuple[Exception, ...] = ()

    def push(self, gradients: Sequence[Gradient], **fields: Any) -> PendingPush:
        if self.errors:
            error, *rest = self.errors
            self.errors = tuple(rest)
            raise error
        return super().push(gradients, **fields)


@pytest.mark.parametrize("k_steps", [1, 100])
@pytest.mark.parametrize("error", [DeadlineExceeded, UsageError])
def test_an_exchange_that_fails_loses_nothing(k_steps: int, error: type[Exception]) -> None:
    """The updates of an exchange whose push was not sent are in the next one."""
    consistency = ConsistencySettings("geo", k_steps=k_steps)

    def exchange(runtime: ModeSwitchRuntime) -> None:
        step(runtime, IDS)  # exchanges itself if k_steps is 1
        runtime.flush()

    with LocalFleet(1, 1, in_process=True) as fleet:
        cluster = FailingRuntime(fleet.environment(0), consistency.declared)
        runtime = ModeSwitchRuntime(cluster, consistency)
        runtime.create(DENSE, np.zeros(DENSE.shape, np.float32))
        runtime.create(ROWS)
        cluster.errors = (error("not sent"), error("not sent"))
        with pytest.raises(error, match="not sent"):
            exchange(runtime)
        cluster.errors = ()
        exchange(runtime)
        rows = runtime.read_table(ROWS.key)
        assert taken(runtime, IDS) == (2, [2] * 8)
        np.testing.assert_array_equal(rows.values[0], np.full((8, 2), -2))
        runtime.close()


def test_counts_go_straight_to_the_servers() -> None:
    """A table whose rule counts has no copies: it is pulled, pushed and written as in any other mode."""
    counts = TableSpec(
        "counts", "sparse", (2,), make_rule("exact_sum", {}), initializer=ROWS.initializer
    )
    ones = np.ones((8, 2), np.float32)
    with LocalFleet(1, 1, in_process=True) as fleet:
        runtime = ready(fleet, 0, ConsistencySettings("geo", k_steps=100))
        runtime.create(counts)
        runtime.push([Gradient(counts.key, ones, IDS), Gradient(ROWS.key, ones, IDS, 1.0)])
        before = runtime.read_table(counts.key)
        runtime.push([Gradient(counts.key, ones, IDS)])
        assert runtime.read_table(counts.key).values[0].sum() == 2 * before.values[0].sum() > 0
        runtime.write_table(counts.key, before)
        rows, sums = runtime.pull([Read(ROWS.key, IDS), Read(counts.key, IDS)])
        np.testing.assert_array_equal(rows, -ones)
        np.testing.assert_array_equal(sums, before.values[0])
        runtime.close()
