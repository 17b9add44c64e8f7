"""Every mode learns, on two servers with two workers."""

from functools import partial

import numpy as np
import pytest

from psfleet.core.runtime.modes.switch import connect
from psfleet.core.runtime.strategy import ConsistencySettings
from psfleet.fleet.testing.local_fleet import LocalFleet
from tests.click_model import ClicksWorkload
from tests.trainings import in_threads

pytestmark = pytest.mark.long

MODES = [
    ConsistencySettings("sync"),
    ConsistencySettings("async"),
    ConsistencySettings("ssp", staleness=0),
    ConsistencySettings("ssp", staleness=3),
    ConsistencySettings("geo", k_steps=5),
    ConsistencySettings("half-async"),
]


def test_every_mode_learns() -> None:
    """A model for each mode, on one fleet: the log loss on unseen samples falls far below that of a guess, ln
    2; it ends near 0.47."""
    losses: dict[ConsistencySettings, float] = {}

    def train(fleet: LocalFleet, worker: int) -> None:
        runtime = connect(fleet.environment(worker), MODES[0])
        for number, consistency in enumerate(MODES):
            job = ClicksWorkload(name=f"clicks {number}")
            runtime.set_mode(consistency)
            job.create(runtime)
            job.train(runtime)
            if worker == 0:
                losses[consistency] = job.log_loss(runtime)
            runtime.barrier()
        runtime.close()

    with LocalFleet(2, 2, in_process=True) as fleet:
        in_threads([partial(train, fleet, worker) for worker in range(2)])
    assert len(losses) == len(MODES)
    assert max(losses.values()) < 0.85 * np.log(2), losses
