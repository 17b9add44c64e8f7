"""Sync mode gives the same bits whatever the fleet and the network do; in async mode a push counts once."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Precision, Runtime, TableState
from psfleet.core.engine.schema.table import BLOCK, TableSpec
from psfleet.core.runtime.embedded_runtime import EmbeddedRuntime
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_launch.chaos.message_faults import MessageFaults
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.push_counts import count_pushes
from tests.standby.pairs import Pairs
from tests.trainings import TrainingWorkload, same_bits, train_together

SIZE = 3 * BLOCK + 17
MOVING = TableSpec("short/dense", "dense", (SIZE,), make_rule("momentum", {"momentum": 0.9}))
SHORT = TableSpec("short/rows", "sparse", (5,), make_rule("adagrad", {}))
HALVES = replace(SHORT, name="halves", precision="bfloat16/bfloat16")
PRECISIONS: list[Precision] = ["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class AllGradients(TrainingWorkload):
    """Training whose gradients are also of some elements of a dense table, and in 16 bits; so are rows."""

    def run(self, runtime: Runtime) -> None:
        runtime.create(MOVING, np.linspace(-1, 1, SIZE, dtype=np.float32))
        runtime.create(SHORT)
        runtime.create(HALVES)
        super().run(runtime)

    def _step(self, runtime: Runtime, dice: np.random.Generator) -> None:
        super()._step(runtime, dice)
        runtime.pull([])
        values, ids = dice.standard_normal(SIZE, np.float32), dice.integers(-20, 20, 30)
        how = PRECISIONS[dice.integers(3)], 1024.0
        dense = Gradient(MOVING.key, values, None, 0.1, *how)
        if dice.random() < 0.7:
            elements = np.flatnonzero(dice.random(SIZE) < 0.01).astype(np.int64)
            dense = Gradient(MOVING.key, values[elements], elements, 0.1, *how)
        rows = dice.standard_normal((30, 5), np.float32)
        of_rows = [Gradient(spec.key, rows, ids, 0.1, *how) for spec in (SHORT, HALVES)]
        runtime.push([dense, *of_rows])

    def result(self, runtime: Runtime) -> list[TableState]:
        others = [runtime.read_table(spec.key) for spec in (MOVING, SHORT, HALVES)]
        return [*super().result(runtime), *others]


TRAINING = AllGradients(steps=12)
MODES: list[Mode] = ["sync", "async", "ssp"]


def train(
    fleet: LocalFleet, inject_faults: Callable[[int], Any] = lambda worker: None
) -> list[TableState]:
    """Sync training by every worker; the tables."""

    def connect(worker: int) -> ClusterRuntime:
        lane = "auto" if fleet.transport == "unix" else "inline"
        place = replace(fleet.environment(worker), lane=lane)
        return ClusterRuntime(place, "sync", inject_faults=inject_faults(worker))

    states = train_together(fleet.workers, TRAINING, connect)
    assert fleet.wait() == [0] * fleet.servers
    return states


@pytest.fixture(scope="module")
def expected() -> list[TableState]:
    """The result of 2 workers with one server and no fault."""
    with LocalFleet(servers=1, workers=2, in_process=True) as fleet:
        return train(fleet)


WAYS = [
    (1, "unix", "log"),
    (1, "tcp", "none"),
    (1, "plain tcp", "standbys"),
    (2, "unix", "none"),
    (2, "tcp", "standbys"),
    (2, "plain tcp", "log"),
    pytest.param(4, "unix", "standbys", marks=pytest.mark.long),
    (4, "tcp", "log"),
    (4, "plain tcp", "none"),
]
"""Each pair of a number of servers, a network and what servers keep: tensors go through shared memory on unix
sockets, else in messages; "tcp" is TLS; servers with standbys are processes, the others threads."""


@pytest.mark.parametrize(("servers", "network", "keeps"), WAYS)
def test_any_fleet_gives_the_same_bits(
    expected: list[TableState], servers: int, network: Any, keeps: str
) -> None:
    """All ways end with the same weights and optimizer state."""
    if keeps == "standbys":
        with Pairs(servers, 2, network) as pairs:
            pairs.await_standbys()
            with pairs.deciding():
                same_bits(train(pairs), expected)
                pairs.await_end()
            assert (pairs.takeovers, pairs.lost) == (0, 0)
        return
    with LocalFleet(servers, 2, network, durability=keeps, in_process=True) as fleet:
        same_bits(train(fleet), expected)


def test_a_process_without_servers_gives_the_same_bits() -> None:
    """Embedded, and one worker of two servers in every mode in which it sees its own pushes at once."""
    alone = EmbeddedRuntime()
    TRAINING.run(alone)
    for mode in MODES:
        with LocalFleet(2, 1, in_process=True) as fleet:
            runtime = fleet.connect(0, mode)
            TRAINING.run(runtime)
            same_bits(TRAINING.result(runtime), TRAINING.result(alone))
            runtime.close()


@pytest.mark.parametrize("servers", [1, 2])
def test_lost_and_repeated_messages_do_not_change_a_bit(
    expected: list[TableState], servers: int
) -> None:
    """With a quarter of answers lost and a quarter of requests repeated the result is that without faults."""
    faults = [MessageFaults(seed=worker, drop=0.25, duplicate=0.25) for worker in range(2)]
    with LocalFleet(servers, 2, in_process=True) as fleet:
        same_bits(train(fleet, lambda worker: faults[worker]), expected)
    assert sum(fault.dropped for fault in faults) > 3
    assert sum(fault.duplicated for fault in faults) > 3


def test_every_push_is_counted_once() -> None:
    """Two workers push under repeats and lost answers; both tables count each push once."""
    faults = [MessageFaults(worker, 0.2, 0.2) for worker in range(2)]
    with LocalFleet(2, 2, in_process=True) as fleet:
        count_pushes(fleet, faults.__getitem__)
        assert fleet.wait() == [0, 0]
    assert all(fault.duplicated > 5 for fault in faults)
