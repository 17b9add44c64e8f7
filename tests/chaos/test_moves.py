"""Rows move to other servers again and again while servers die and answers are lost: nothing else changes.

Each seed makes some moves, repeats those that a death gives up, and has servers die at points of a move and
at any time. PSFLEET_TORTURE=n adds n seeds.
"""

import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine.runtime_interface import Runtime, TableState
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet_launch.chaos.audit import ChaosSettings
from tests.cluster.test_scaling import BIAS, COUNTS, RARE, ROWS, assert_same, gradients_of
from tests.pools import started_pool
from tests.programs import MORE
from tests.trainings import one_more

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
MOVES, STEPS, WORKERS, MOST = 4, 3, 2, 4
IDS, TABLES = np.arange(200), (BIAS, ROWS, RARE)
POINTS = ("opened", "sent", "filled", "prepared", "adopted")
DECIDING = ("promised", "decided")


@dataclass
class Training:
    """What one seed has done, and the tables at its end."""

    moves: list[int] = field(default_factory=list)
    given_up: int = 0
    deaths: list[str] = field(default_factory=list)
    states: list[TableState] = field(default_factory=list)


class Mover:
    """Asks a fleet for other numbers of servers, and kills some of its servers meanwhile."""

    def __init__(self, fleet: LocalFleet, seed: int, training: Training) -> None:
        self._fleet, self._dice, self._training = fleet, random.Random(seed), training
        self._killer = threading.Thread()

    def ask(self, servers: int = 0) -> int:
        """Ask for this number of servers, or choose one; it is returned."""
        servers = servers or self._dice.choice(
            [n for n in range(1, MOST + 1) if n != self._fleet.servers]
        )
        self._killer = threading.Timer(self._dice.uniform(0, 1), self._kill)
        if self._dice.random() < 0.3:
            self._killer.start()
        self._fleet.scale(servers)
        return servers

    def _kill(self) -> None:
        count = len(self._fleet.processes)
        ready = [server for server in range(count) if self._fleet.ready_file(server).exists()]
        if ready:  # a new one that dies before that has no part in a move
            self._fleet.kill(self._dice.choice(ready))

    def is_done(self) -> bool:
        """Return whether the servers that were asked for are there, now that workers have met."""
        if self._killer.ident is not None:
            self._killer.join()
        if self._fleet.settle():
            self._training.given_up += 1
            return False
        self._training.moves.append(self._fleet.servers)
        return True


def trained(mode: Mode, seed: int, folder: Path, patch: pytest.MonkeyPatch) -> Training:
    """Two workers train for MOVES + 1 times STEPS steps, with moves and deaths unless the seed is 0."""
    training, crashes = Training(), crashes_of(seed) if seed else {}
    losses = {"drop": 0.02, "duplicate": 0.03, "delay": 0.03} if seed else {}
    patch.setenv("PSFLEET_CHAOS", ChaosSettings(str(folder), seed, **losses).text())
    with (
        LocalFleet(2, WORKERS, durability="log", crashes=crashes) as fleet,
        fleet.reviving(),
        started_pool(WORKERS) as pool,
    ):
        mover = Mover(fleet, seed, training) if seed else None

        def work(worker: int) -> list[TableState]:
            runtime = fleet.connect(worker, mode)
            try:
                return train(runtime, mover)
            finally:
                runtime.close()

        training.states = next(iter(pool.map(work, range(WORKERS))))
        training.deaths = fleet.deaths
    return training


def crashes_of(seed: int) -> Mapping[int, Sequence[str]]:
    """Where the processes of each server die, one after the other; the last one of each does not."""
    dice = random.Random(f"crashes {seed}")

    def points(server: int) -> list[str]:
        names = POINTS if server else POINTS + 2 * DECIDING
        return [f"{dice.choice(names)}:{dice.randint(1, 3)}" for _ in range(dice.randint(0, 2))]

    return {server: points(server) for server in range(MOST)}


def train(runtime: Runtime, mover: Mover | None) -> list[TableState]:
    """One worker's steps; rows move between each STEPS of them and the next."""
    for spec in (*TABLES, COUNTS):
        runtime.create(spec, None if spec.kind == "sparse" else np.ones(spec.shape, np.float32))
    wanted = 0
    for step in range((MOVES + 1) * STEPS):
        moves = mover is not None and step % STEPS == 0 and step > 0
        if moves and runtime.worker_index == 0:
            assert mover is not None
            wanted = mover.ask()  # the step after it is made while rows are on their way
        runtime.push([*gradients_of(runtime, TABLES, step), one_more(COUNTS, IDS)])
        if moves:
            meet(runtime, mover, wanted)
    runtime.barrier()
    return [runtime.read_table(spec.key) for spec in (*TABLES, COUNTS)]


def meet(runtime: Runtime, mover: Mover | None, wanted: int) -> None:
    """Meet until the rows have moved; worker 0 knows."""
    while True:
        runtime.barrier()
        mine = mover is None or runtime.worker_index > 0 or mover.is_done()
        if runtime.all_reduce(np.array([mine], np.int64), "min")[0]:
            return
        if mover is not None and runtime.worker_index == 0:
            mover.ask(wanted)


@pytest.fixture(scope="module")
def unmoved(tmp_path_factory: pytest.TempPathFactory) -> list[TableState]:
    """The tables of a job in sync mode that keeps its two servers, all of which live."""
    with pytest.MonkeyPatch.context() as patch:
        return trained("sync", 0, tmp_path_factory.mktemp("unmoved"), patch).states


@pytest.mark.parametrize("seed", range(1, 2 + MORE))
def test_sync(
    seed: int, unmoved: list[TableState], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits are those of a job that has never moved and lost nobody."""
    training = trained("sync", seed, tmp_path, monkeypatch)
    assert len(training.moves) == MOVES
    assert_same(training.states, unmoved)
    print(f"sync {seed}: {training.moves}, {training.given_up} given up, deaths {training.deaths}")


@pytest.mark.parametrize("seed", range(1, 2 + MORE))
def test_async(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each push has counted once at every id."""
    training = trained("async", seed, tmp_path, monkeypatch)
    assert len(training.moves) == MOVES
    *_, counts = training.states
    assert counts.values[0].shape == (len(IDS), 1)
    assert np.all(counts.values[0] == WORKERS * (MOVES + 1) * STEPS)
    print(f"async {seed}: {training.moves}, {training.given_up} given up, deaths {training.deaths}")
