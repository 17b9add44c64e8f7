"""Gradients that arrive late are corrected as the strategy says, on real servers."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from psfleet.core.base.errors import ConfigError
from psfleet.core.engine import rules
from psfleet.core.engine.interface import Gradient, Read
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.runtime.modes.switch import ModeSwitchRuntime, connect
from psfleet.core.runtime.strategy import ConsistencySettings, resolve
from psfleet.fleet import DistributedStrategy
from psfleet.fleet.testing.local_fleet import LocalFleet

ROWS = TableSpec("rows", "sparse", (4,), rules.SGD())
WHOLE = TableSpec("whole", "dense", (8,), rules.SGD())
IDS = np.array([11, 2, 7, 5])
RATE = 0.1

Floats = NDArray[np.float32]


def pull(runtime: ModeSwitchRuntime) -> list[Floats]:
    return [a.copy() for a in runtime.pull([Read(WHOLE.key), Read(ROWS.key, IDS)])]


def push(runtime: ModeSwitchRuntime, whole: Floats, rows: Floats) -> None:
    gradients = Gradient(WHOLE.key, whole, None, RATE), Gradient(ROWS.key, rows, IDS, RATE)
    runtime.push(gradients)
    runtime.flush()


def late(fleet: LocalFleet, consistency: ConsistencySettings) -> list[list[Floats]]:
    """Worker 0 pulls, worker 1 makes three steps, worker 0 pushes: values then, before and after it."""
    slow, fast = (connect(fleet.environment(worker), consistency) for worker in (0, 1))
    for runtime in (slow, fast):
        runtime.create(WHOLE, np.ones(8, np.float32))
        runtime.create(ROWS)
    then = pull(slow)
    for _ in range(3):
        push(fast, np.full(8, 2, np.float32), np.full((4, 4), -1, np.float32))
    before = pull(fast)
    push(slow, *gradients())
    after = pull(fast)
    for runtime in (slow, fast):
        runtime.close()
    return [then, before, after]


def gradients() -> tuple[Floats, Floats]:
    dice = np.random.default_rng(4)
    return dice.standard_normal(8, np.float32), dice.standard_normal((4, 4), np.float32)


@pytest.mark.parametrize(
    ("mode", "damping", "compensation"),
    [("async", 0.5, 0.0), ("async", 1.0, 3.0), ("ssp", 1.0, 0.0), ("half-async", 0.5, 3.0)],
)
def test_a_late_push_is_corrected(mode: Any, damping: float, compensation: float) -> None:
    """Three pushes late: the rate falls by 4^p, and g becomes g + c g g (w - w0), in each mode."""
    more: dict[str, Any] = {"staleness": 8} if mode == "ssp" else {}
    with LocalFleet(2, 2, in_process=True) as fleet:
        then, before, after = late(
            fleet,
            ConsistencySettings(
                mode, staleness_damping=damping, delay_compensation=compensation, **more
            ),
        )
    for old, now, new, gradient in zip(then, before, after, gradients(), strict=True):
        corrected = gradient + compensation * gradient * gradient * (now - old)
        np.testing.assert_allclose(new, now - RATE / 4**damping * corrected, rtol=2e-6, atol=2e-6)


def test_a_push_that_is_not_late_stays_as_it_is() -> None:
    """One worker alone trains with the same bits, whatever is to be done with late pushes."""
    states = []
    for consistency in (
        ConsistencySettings("async"),
        ConsistencySettings("async", staleness_damping=1.0, delay_compensation=10.0),
    ):
        with LocalFleet(2, 1, in_process=True) as fleet:
            runtime = connect(fleet.environment(0), consistency)
            runtime.create(WHOLE, np.ones(8, np.float32))
            runtime.create(ROWS)
            for _ in range(5):
                whole, rows = pull(runtime)
                push(runtime, whole * 2, rows + 1)
            states.append([array.tobytes() for array in pull(runtime)])
            runtime.close()
    assert states[0] == states[1]


def test_a_log_holds_corrected_pushes() -> None:
    """Servers that are killed and replay their logs have the same bits as before."""
    consistency = ConsistencySettings("async", staleness_damping=0.5, delay_compensation=5.0)
    with LocalFleet(2, 2, durability="log") as fleet, fleet.reviving():
        slow, fast = (connect(fleet.environment(worker), consistency) for worker in (0, 1))
        for runtime in (slow, fast):
            runtime.create(WHOLE, np.ones(8, np.float32))
            runtime.create(ROWS)
        for _ in range(4):
            pull(slow)
            push(fast, *gradients())
            push(slow, *gradients())
        before = [array.tobytes() for array in pull(fast)]
        for server in range(2):
            fleet.kill(server)
        assert [array.tobytes() for array in pull(fast)] == before
        for runtime in (slow, fast):
            runtime.close()


def test_the_settings_are_checked() -> None:
    """A strategy says them in its a_sync_configs; what is no number, negative or of sync is refused."""
    said = DistributedStrategy(
        a_sync=True, a_sync_configs={"staleness_damping": 0.5, "delay_compensation": 2}
    )
    actual = resolve(said, "").consistency
    assert (actual.mode, actual.staleness_damping, actual.delay_compensation) == ("async", 0.5, 2)
    for wrong in (-1.0, float("nan"), "x", True):
        with pytest.raises(ConfigError, match=str(wrong)):
            resolve(
                DistributedStrategy(a_sync=True, a_sync_configs={"staleness_damping": wrong}), ""
            )
    with pytest.raises(ConfigError, match="a setting of async, ssp, half-async"):
        ConsistencySettings("sync", delay_compensation=1.0)
