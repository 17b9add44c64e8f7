"""Servers that die at any point and come back: no bit changes, no push is lost or counted twice.

The seeds of these tests are those of continuous integration; PSFLEET_TORTURE=n adds n more, and counts
the deaths by their points at the end.
"""

import random
from collections.abc import Callable

import pytest

from psfleet.core.engine.runtime_interface import TableState
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.programs import MORE
from tests.push_counts import count_pushes
from tests.trainings import TrainingWorkload, same_bits, trained

TRAINING = TrainingWorkload()
POINTS = ("append", "tear", "appended", "applied", "settled")
DEATHS = 3  # of each server in one run
pytestmark = pytest.mark.timeout(600)  # a dozen processes start one after the other


def crashes(seed: int, records: int) -> dict[int, list[str]]:
    """Where each of two servers dies, early enough that it is reached within so many records.

    Not at the first, which says that it is ready: nobody would start it again yet.
    """
    dice = random.Random(seed)
    return {
        server: [
            f"{dice.choice(POINTS)}:{dice.randint(2, records // DEATHS)}" for _ in range(DEATHS)
        ]
        for server in range(2)
    }


@pytest.fixture(scope="module")
def expected() -> list[TableState]:
    """The result without faults and without a log."""
    with LocalFleet(2, 2, in_process=True) as fleet:
        return trained(fleet, TRAINING)


@pytest.mark.parametrize("seed", range(1 + MORE))
def test_kills_do_not_change_a_bit(
    expected: list[TableState], seed: int, record_property: Callable[[str, object], None]
) -> None:
    """Sync mode: both servers die three times each, at seeded points, and the result is the same."""
    with LocalFleet(2, 2, durability="log", crashes=crashes(seed, 90)) as fleet:
        same_bits(trained(fleet, TRAINING), expected)
        record_property("deaths in sync mode", fleet.deaths)
        assert fleet.restarts >= 2 * DEATHS - 1


@pytest.mark.parametrize(
    "point",
    [pytest.param(p, marks=[pytest.mark.long] * (p not in ("tear", "applied"))) for p in POINTS],
)
def test_one_server_dies_at_every_point(point: str) -> None:
    """One worker and one server that is also the coordinator, over TLS and with rows of 16 bits; the disk is
    asked to keep each record."""
    training, alone = TrainingWorkload(precision="bfloat16/bfloat16"), EmbeddedRuntime()
    training.run(alone)
    with LocalFleet(1, 1, "tcp", durability="log+fsync", crashes={0: [f"{point}:33"]}) as fleet:
        same_bits(trained(fleet, training), training.result(alone))
        assert fleet.restarts == 1


def test_a_server_may_die_before_it_is_ready() -> None:
    """Its points come in another order on a busy machine: the fleet starts it again, as it does later."""
    with LocalFleet(1, 1, durability="log", crashes={0: ["applied:1"]}) as fleet:
        assert fleet.deaths == ["applied:1"]
        ClusterRuntime(fleet.environment(0), "async").close()
        assert fleet.wait() == [0]


@pytest.mark.parametrize("seed", range(1 + MORE))
def test_every_push_is_counted_once(
    seed: int, record_property: Callable[[str, object], None]
) -> None:
    """Async mode: tables that count pushes count each one once, however often servers die."""
    with LocalFleet(2, 2, durability="log", crashes=crashes(seed, 90)) as fleet, fleet.reviving():
        count_pushes(fleet)
        assert fleet.wait(300) == [0, 0]
        record_property("deaths in async mode", fleet.deaths)
        assert fleet.restarts >= 2 * DEATHS - 1
