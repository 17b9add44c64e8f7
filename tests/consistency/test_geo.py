"""geo: local steps on copies, then what was learned is added."""

import numpy as np
import pytest
from numpy.typing import NDArray

from psfleet.core.base.errors import ConfigError
from psfleet.core.engine.interface import Gradient
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.core.runtime.modes.geo import GeoRuntime
from psfleet.core.runtime.modes.switch import ModeSwitchRuntime, connect
from psfleet.core.runtime.strategy import ConsistencySettings, Settings
from psfleet.fleet.testing.local_fleet import LocalFleet
from tests.consistency.workers import ROWS, step, taken, together
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
