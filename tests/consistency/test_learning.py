"""Every mode learns, on two servers with two workers."""

import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from psfleet.mode_runtimes.switch import connect
from psfleet.strategy import ConsistencySettings
from psfleet.testing.local_fleet import LocalFleet
from tests.click_model import ClicksWorkload
from tests.programs import ended
from tests.trainings import in_threads

MODES = [
    ConsistencySettings("sync"),
    ConsistencySettings("async"),
    ConsistencySettings("ssp", staleness=0),
    ConsistencySettings("ssp", staleness=3),
    ConsistencySettings("geo", k_steps=5),
    ConsistencySettings("half-async"),
]
SCRIPT = Path(__file__).parent / "scripts" / "modes.py"


@pytest.fixture(scope="module")
def losses() -> dict[ConsistencySettings, float]:
    """The log loss on unseen samples that each mode reaches: a model for each, on one fleet."""
    curves: dict[ConsistencySettings, float] = {}

    def train(fleet: LocalFleet, worker: int) -> None:
        runtime = connect(fleet.environment(worker), MODES[0])
        for number, consistency in enumerate(MODES):
            job = ClicksWorkload(name=f"clicks {number}")
            runtime.set_mode(consistency)
            job.create(runtime)
            job.train(runtime)
            if worker == 0:
                curves[consistency] = job.log_loss(runtime)
            runtime.barrier()
        runtime.close()

    with LocalFleet(2, 2, in_process=True) as fleet:
        in_threads([partial(train, fleet, worker) for worker in range(2)])
    return curves


@pytest.mark.parametrize("consistency", MODES, ids=lambda c: f"{c.mode}-{c.staleness}")
def test_every_mode_learns(
    consistency: ConsistencySettings, losses: dict[ConsistencySettings, float]
) -> None:
    """The log loss on unseen samples falls far below that of a guess, ln 2; it ends near 0.47."""
    assert losses[consistency] < 0.85 * np.log(2)


def test_a_script_goes_through_every_mode(tmp_path: Path) -> None:
    """A trainer script under the launcher starts in the mode of a flag, changes it on its way through
    all others, and learns in each; with gradients of two steps merged."""
    command = [sys.executable, "-m", "psfleet_launch", "--servers", "2", "--workers", "2"]
    command += ["--mode", "ssp", "--staleness", "1", "--log-dir", str(tmp_path), "--no-progress"]
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[3])}
    process = ended(
        [*command, str(SCRIPT), str(tmp_path / "losses.npy")], timeout=240, env=environment
    )
    assert process.returncode == 0, process.stdout + process.stderr
    losses = np.load(tmp_path / "losses.npy")
    assert losses.shape == (6,)
    # Rows begin geo with fresh optimizer state, so not every mode ends below the one before it.
    assert losses.max() < 0.85 * np.log(2), losses
    assert losses[-1] < 0.95 * losses[0], losses
