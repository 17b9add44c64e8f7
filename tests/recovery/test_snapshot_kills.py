"""Servers that die while a snapshot is taken, named or settled, and while they come back from one.

The seeds of these tests are those of continuous integration; PSFLEET_TORTURE=n adds n more.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from psfleet.core.engine.runtime_interface import TableState
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests import trainings
from tests.programs import MORE

TRAINING = trainings.TrainingWorkload(steps=60, pause=0.03)
COUNTS = trainings.zero_rows("counts")
PUSHES = 120
POINTS = ("turned", "cut", "page", "written")
LEADING = ("unnamed", "complete", "shortened")  # of server 0
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]  # a dozen processes, one after the other


def deaths(seed: int, points: Mapping[int, Sequence[str]]) -> dict[int, list[str]]:
    """Where each server dies: in a snapshot, and while it comes back from that; of other seeds than
    those of continuous integration twice.
    """
    dice, crashes = random.Random(seed), dict[int, list[str]]()
    for server, own in points.items():
        for _ in range(2 if seed else 1):
            death = [f"{dice.choice(own)}:1", f"replay:{dice.randint(1, 4)}"]
            crashes[server] = crashes.get(server, []) + death
    return crashes


@pytest.fixture(scope="module")
def alone() -> list[TableState]:
    """The result of one worker without servers."""
    runtime, training = EmbeddedRuntime(), replace(TRAINING, pause=0.0)
    training.run(runtime)
    return training.result(runtime)


@pytest.mark.parametrize("seed", range(1 + MORE))
def test_kills_around_snapshots_do_not_change_a_bit(
    seed: int, alone: list[TableState], record_property: Callable[[str, object], None]
) -> None:
    """Sync mode: both servers die at points of snapshots and of recovery, and the result is the same."""
    crashes = deaths(seed, {0: (*POINTS, *LEADING), 1: POINTS})
    with LocalFleet(2, 1, durability="log", crashes=crashes, snapshot_every="5 rounds") as fleet:
        trainings.same_bits(trainings.trained(fleet, TRAINING), alone)
        record_property("deaths in sync mode with snapshots", fleet.deaths)
        assert fleet.restarts >= 2


# After "unnamed" the log surely holds rounds that are replayed; after the others it may have none.
@pytest.mark.parametrize("points", [POINTS, (LEADING[0], "replay", *LEADING[1:])])
def test_the_only_server_dies_at_every_point(
    points: tuple[str, ...], alone: list[TableState]
) -> None:
    """One process after the other dies, each at another point; older logs are gone in the end."""
    crashes = {0: [f"{point}:1" for point in points]}
    # A server that starts again hears its worker after a second.
    slow = replace(TRAINING, pause=0.15)
    with LocalFleet(1, 1, durability="log", crashes=crashes, snapshot_every="5 rounds") as fleet:
        trainings.same_bits(trainings.trained(fleet, slow), alone)
        assert fleet.restarts == len(points)
        assert not (fleet.snapshots.parent / "server.0.log").exists()
        left = [path.name for path in fleet.snapshots.iterdir() if path.name.endswith(".partial")]
        assert len(left) <= 1


@pytest.mark.parametrize("seed", range(1 + MORE))
def test_every_push_is_counted_once(
    seed: int, record_property: Callable[[str, object], None]
) -> None:
    """Async mode, marks and kills: a table that counts pushes counts each one once."""
    crashes = deaths(seed, {0: POINTS, 1: POINTS})
    counted: list[np.ndarray] = []

    def work(worker: int) -> None:
        runtime = ClusterRuntime(fleet.environment(worker), "async", patience=trainings.PATIENCE)
        runtime.create(COUNTS)
        for _ in range(PUSHES):
            runtime.push([trainings.one_more(COUNTS, np.arange(50))]).wait()
            time.sleep(0.05)
        runtime.barrier()
        if worker == 0:
            counted.append(runtime.read_table(COUNTS.key).values[0])
        runtime.barrier()
        runtime.close()

    with (
        LocalFleet(2, 2, durability="log", crashes=crashes, snapshot_every="10 rounds") as fleet,
        fleet.reviving(),
    ):
        trainings.in_threads([partial(work, worker) for worker in range(2)])
        assert fleet.wait(300) == [0, 0]
        record_property("deaths in async mode with snapshots", fleet.deaths)
        assert fleet.restarts >= 2
        assert list(fleet.snapshots.glob("snapshot-*/manifest.json"))
    np.testing.assert_array_equal(counted[0], np.full((50, 1), 2 * PUSHES))
