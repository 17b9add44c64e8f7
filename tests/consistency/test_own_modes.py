"""A mode of a user's own: one declaration, which servers and workers import by name."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from psfleet.mode_runtimes.switch import ModeSwitchRuntime
from psfleet.strategy import ConsistencySettings, Settings
from psfleet.testing.local_fleet import LocalFleet
from tests.consistency.module_of_modes import module_of_modes
from tests.consistency.workers import step, taken, together

SOURCE = '''
"""bounded-geo: geo, in which no worker is more than `staleness` exchanges ahead of another."""
from dataclasses import dataclass
from psfleet.consistency import GeoMode, at_least_0, register

@register
@dataclass(frozen=True)
class BoundedGeoMode(GeoMode):
    """As geo, but a pull waits while its worker is too many exchanges ahead of another."""
    staleness: int = at_least_0(1, "exchanges a worker may be ahead of another")
    name = "bounded-geo"
    number = 1000
    has_clocks = True
    main_setting = "staleness"
    a_sync = {}
'''
IDS = np.arange(8)


@pytest.fixture(autouse=True)
def own_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module `own_modes`, which servers find too; psfleet knows its mode until the test ends."""
    yield from module_of_modes("own_modes", SOURCE, tmp_path, monkeypatch)


def bounded(**settings: int) -> ConsistencySettings:
    """The mode with these settings, as a strategy file says it."""
    return Settings.from_parts({"consistency": {"mode": "bounded-geo", **settings}}).consistency


def test_it_trains_on_servers_that_are_killed() -> None:
    """Workers with unequal steps meet in the mode, in sync mode and in the mode again; both servers die
    and come back from their logs. Every step counts once, and the bound holds."""

    def train(runtime: ModeSwitchRuntime, steps: int) -> None:
        for _ in range(steps):
            step(runtime, IDS)
        runtime.barrier()

    def work(runtime: ModeSwitchRuntime) -> None:
        train(runtime, 5 + 4 * runtime.worker_index)
        assert taken(runtime, IDS) == (14, [14] * 8)
        runtime.barrier()
        runtime.set_mode(ConsistencySettings("sync"))
        train(runtime, 3)
        runtime.set_mode(bounded(staleness=0, k_steps=4))
        train(runtime, 6)
        assert taken(runtime, IDS) == (29, [29] * 8)
        for server in runtime.stats():
            assert (server["mode"], server["leading_steps"]) == ("bounded-geo", 0)

    crashes = {0: ["applied:9"], 1: ["appended:12"]}
    fleet = LocalFleet(2, 2, durability="log", crashes=crashes, rules=["own_modes"])
    with fleet, fleet.reviving():
        together(fleet, bounded(staleness=1, k_steps=2), work)
        assert fleet.wait() == [0, 0]
        assert fleet.restarts == 2


def test_servers_without_the_module_refuse_it() -> None:
    """They say which modes they know."""
    with (
        LocalFleet(1, 1) as fleet,
        pytest.raises(Exception, match=r"mode 1000 is unknown; this server knows sync \(1\)"),
    ):
        fleet.connect(0, "bounded-geo")
