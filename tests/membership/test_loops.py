"""Loops over fleet.shard go on where they were when a worker dies and its script runs again.

A death is a call that is not made, or whose answer is not heard, as in test_deaths. The script has what
scripts have: a step before its loops, a schedule that steps in and between loops, noise from a generator,
reductions within a loop, a loop without pushes whose results lie in memory, one that is left early, steps
that push more than once, and a dataset that the fleet deals.
"""

import os
import random
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest

from psfleet.core.base.crash_points import Send
from psfleet.core.base.settings.kinds import Mode
from psfleet.core.engine.rules import make_rule
from psfleet.core.engine.runtime_interface import Gradient, Read, TableState
from psfleet.core.engine.schema.table import TableSpec
from psfleet.core.runtime.dataset_pass import batches
from psfleet.fleet.data_loops import DataLoops
from psfleet.fleet.testing.local_fleet import LocalFleet
from psfleet.optimizer.lr import StepDecay
from psfleet_worker.cluster_runtime import ClusterRuntime
from tests.membership.test_deaths import run as run_script
from tests.programs import MORE
from tests.trainings import one_more, same_bits, zero_rows
from tests.watched_calls import WatchedCalls
from tests.worker_deaths import DeathFault, SimulatedDeath

WEIGHTS = TableSpec("weights", "dense", (64,), make_rule("adam", {}))
COUNTS = zero_rows("counts")


class Script:
    """One incarnation of a worker's script."""

    def __init__(self, runtime: ClusterRuntime) -> None:
        self.runtime = runtime
        self.loops = DataLoops(
            runtime.worker_index, 2, runtime.barrier, runtime=lambda: runtime, restarts=True
        )

    def run(self) -> None:
        """All of it."""
        runtime, loops = self.runtime, self.loops
        runtime.create(COUNTS)
        runtime.create(WEIGHTS, np.linspace(-1, 1, 64, dtype=np.float32))
        self.rate = loops.remember("rate", StepDecay(0.1, step_size=3))
        self.dice = loops.remember("dice", np.random.default_rng(runtime.worker_index))
        self.dice.random(runtime.worker_index + 1)  # as a script that shuffles before it begins
        self.step(0)
        runtime.barrier()
        for epoch in range(2):
            for number in loops.shard(range(1, 13), True):
                self.step(100 * epoch + number)
                self.rate.step()
                if number in (5, 6):
                    assert runtime.all_reduce(np.ones(1)).sum() == 2
            self.rate.step()
            self.predict()
        for number in loops.shard(iter(range(10**9)), True):
            self.step(1000 + number)
            if number >= 6:
                break
        for number in loops.shard([1, 2, 3, 4], True):  # files, of which each has many steps
            for part in range(3):
                self.step(2000 + 10 * number + part)
        for batch in loops.stepping(batches(30, 4, 2, 7, 1, lambda: runtime)):
            self.step(*(3000 + batch))
            self.rate.step()
        for number in loops.shard(range(3), True):
            self.step(4000 + number)
        runtime.barrier()

    def step(self, *samples: int) -> None:
        """Every bit of the weights depends on all of it."""
        weights = self.runtime.pull([Read(WEIGHTS.key)])[0]
        noise = self.dice.standard_normal(64, np.float32) + np.float32(samples[0])
        ids = np.array([64 * sample + self.runtime.worker_index for sample in samples])
        gradient = weights * np.float32(0.1) + noise
        step = Gradient(WEIGHTS.key, gradient, None, self.rate.get_lr())
        self.runtime.push([step, one_more(COUNTS, ids)])

    def predict(self) -> None:
        """What is found lies in memory, and is put together at the end."""
        values = np.zeros(6)
        for number in self.loops.shard(range(6), True):
            self.runtime.pull([Read(WEIGHTS.key)])
            values[number] = 1
        assert self.runtime.all_reduce(values).tolist() == [1] * 6


def uses(runtime: ClusterRuntime, workers: int) -> tuple[TableState, dict[int, float]]:
    """The weights, and how often each sample was used."""
    used = runtime.read_table(COUNTS.key)
    assert used.ids is not None
    counts = dict(zip(used.ids.tolist(), used.values[0][:, 0].tolist(), strict=True))
    return runtime.read_table(WEIGHTS.key), counts


def run(mode: Mode, deaths: dict[int, list[DeathFault]]) -> tuple[TableState, dict[int, float]]:
    """Weights and uses after the script, on two servers, with these deaths of each worker."""
    with LocalFleet(2, 2, in_process=True) as fleet:
        return run_script(mode, fleet, deaths, lambda runtime, _: Script(runtime).run(), uses)


@pytest.fixture(scope="module")
def expected() -> tuple[TableState, dict[int, float]]:
    """Sync, without deaths."""
    return run("sync", {})


def some(seed: int, lowest: int, highest: int) -> DeathFault:
    """A death at a call that the seed chooses."""
    dice = random.Random(seed)
    return DeathFault(dice.randint(lowest, highest), dice.random() < 0.5)


@pytest.mark.parametrize("seed", range(2 + MORE))
def test_no_bit_changes(expected: tuple[TableState, dict[int, float]], seed: int) -> None:
    """Sync mode: both workers die, one of them twice, anywhere; weights and uses are the same."""
    deaths = {0: [some(seed, 20, 330)], 1: [some(seed + 1000, 20, 200), some(seed + 2000, 20, 200)]}
    weights, used = run("sync", deaths)
    same_bits([weights], [expected[0]])
    assert used == expected[1]


@pytest.mark.parametrize("seed", range(1 + MORE))
def test_async_uses_no_sample_twice(
    expected: tuple[TableState, dict[int, float]], seed: int
) -> None:
    """Async mode: a step that counts on the furthest server is not made again."""
    _, used = run("async", {0: [some(seed, 20, 200)], 1: [some(seed + 1000, 20, 200)]})
    times = defaultdict(float, dict.fromkeys([0, *range(3000, 3030)], 2.0))
    for place in expected[1]:
        times[place // 64] = times[place // 64] or 1.0
    for place, uses in used.items():
        times[place // 64] -= uses
    assert min(times.values()) == 0
    assert sum(times.values()) <= 8  # of a death between servers one may lack the step


def die_leaving(server: int, method: str, _: bytes) -> None:
    """Let a worker die when server 1 has heard that it leaves, before server 0 hears it."""
    if method == "Shard/Leave" and server == 0:
        raise SimulatedDeath("the worker has died before every server knew that it leaves")


def test_who_dies_while_it_leaves_does_nothing_again() -> None:
    """Its next incarnation passes over the script, and leaves too, while another worker is still there."""

    def run_script(inject_faults: Callable[[int, Send], Send] | None) -> None:
        runtime = ClusterRuntime(fleet.environment(0), "async", inject_faults=inject_faults)
        loops = DataLoops(0, 1, lambda: None, runtime=lambda: runtime, restarts=True)
        runtime.create(COUNTS)
        for number in loops.shard(range(8), True):
            runtime.push([one_more(COUNTS, np.array([number]))])
        try:
            runtime.close()
        finally:
            runtime.abandon()

    with LocalFleet(2, 2, in_process=True) as fleet:
        other = ClusterRuntime(fleet.environment(1), "async")
        with pytest.raises(SimulatedDeath):
            run_script(WatchedCalls(die_leaving))
        run_script(None)
        other.create(COUNTS)
        used = other.read_table(COUNTS.key)
        assert used.ids is not None
        assert used.ids.tolist() == list(range(8))
        assert used.values[0].tolist() == [[1.0]] * 8
        other.close()
        assert fleet.wait() == [0, 0]


def test_what_cannot_be_read_again_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    """Once, where workers are started again; a pipe is known for it, and of others the script says so."""
    loops = [DataLoops(0, 1, lambda: None, restarts=restarts) for restarts in (False, True)]
    read, write = os.pipe()
    with os.fdopen(read) as lines, os.fdopen(write, "w") as other:
        other.write("a\nb\n")
        other.close()
        assert list(loops[True].shard(lines, True)) == ["a\n", "b\n"]
    assert list(loops[True].shard(iter("ab"), False)) == ["a", "b"]
    assert capfd.readouterr().err.count("cannot read") == 1
    assert list(loops[False].shard(iter("ab"), False)) == ["a", "b"]
    assert not capfd.readouterr().err
