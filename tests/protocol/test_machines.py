"""Shard and Coordinator under random schedules keep what the protocol promises.

Failures name their seed; `shrunk` says which of its harms matter. PSFLEET_TORTURE=n multiplies the seeds.
"""

import contextlib
import os
from collections import Counter

import pytest

from psfleet.dealing import Range
from psfleet.shard.events import Close, Mode, Push
from psfleet.shard.views import Install
from tests.protocol.simulation import Config, Simulation

SEEDS = 60 * max(1, int(os.environ.get("PSFLEET_TORTURE", "1")))

Round = tuple[tuple[int, int], ...]
"""Who was in it: seats and lives."""


def rounds_of(simulation: Simulation, name: str) -> list[Round]:
    """The rounds that a server has closed, from its journal alone."""
    held: dict[int, Push] = {}
    closed: list[Round] = []
    for record in simulation.disks[name].records:
        match record:
            case Push():
                held[record.worker] = record
            case Install(_, seats):
                for seat, push in list(held.items()):
                    lives = (
                        {life.incarnation: life for life in seats[seat].lives}
                        if seat in seats
                        else {}
                    )
                    life = lives.get(push.incarnation)
                    if life is None or not life.counts_in(push.sequence):
                        del held[seat]
            case Close(number, members):
                assert number == len(closed) + 1
                assert sorted(held) == list(members)
                assert all(push.sequence == number for push in held.values())
                closed.append(tuple((seat, held[seat].incarnation) for seat in members))
                held.clear()
    return closed


def positions(ranges: tuple[Range, ...]) -> list[int]:
    """The positions one by one."""
    return [at for low, high in ranges for at in range(low, high)]


def check_sync(simulation: Simulation) -> None:
    """All servers close the same rounds, and every sample is in exactly one of them."""
    config = simulation.config
    rounds = [rounds_of(simulation, name) for name in simulation.names()[1:]]
    longest = max(rounds, key=len)
    assert all(own == longest[: len(own)] and len(longest) - len(own) <= 1 for own in rounds)
    used = Counter(
        position
        for number, members in enumerate(longest, 1)
        for seat, life in members
        for position in positions(simulation.data[seat, life, number])
    )
    assert used == Counter(range(config.size * config.epochs))
    if not config.removal:  # as in a run without faults
        seats = list(range(config.workers))
        trained = [members for members in longest if members]
        assert all([seat for seat, _ in members] == seats for members in trained)
        plan = simulation.coordinator.supply.datasets[0].plan  # type: ignore[union-attr]
        assert plan is not None
        assert len(plan.entries) == 1


def check_async(simulation: Simulation) -> None:
    """Per server: 1, 2, 3 of each life, no sample twice, and missing only what is declared torn."""
    config, coordinator = simulation.config, simulation.coordinator
    assert coordinator is not None
    tops: list[Counter[tuple[int, int]]] = []
    for name in simulation.names()[1:]:
        top: Counter[tuple[int, int]] = Counter()
        for record in simulation.disks[name].records:
            if isinstance(record, Push):
                life = (record.worker, record.incarnation)
                assert record.sequence == top[life] + 1
                top[life] += 1
        tops.append(top)
    torn = {(step.worker, step.incarnation) for step in coordinator.supply.torn}
    lives = {life for top in tops for life in top}
    assert {life for life in lives if len({top[life] for top in tops}) > 1} <= torn
    for top in tops:
        used = Counter(
            position
            for (seat, life), last in top.items()
            for number in range(1, last + 1)
            for position in positions(simulation.data[seat, life, number])
        )
        lost = {
            position
            for seat, life in torn
            for number in range(top[seat, life] + 1, max(t[seat, life] for t in tops) + 1)
            for position in positions(simulation.data[seat, life, number])
        }
        assert not used or max(used.values()) == 1
        assert set(range(config.size * config.epochs)) - set(used) == lost


def run(
    mode: Mode, removal: bool, seed: int, suppressed: frozenset[int] = frozenset()
) -> Simulation:
    """One run with its checks."""
    simulation = Simulation(Config.of(mode, removal, seed), seed, suppressed)
    simulation.run()
    (check_sync if mode == "sync" else check_async)(simulation)
    return simulation


def shrunk(mode: Mode, removal: bool, seed: int) -> list[str]:
    """The harms without which the run would not fail; for a person at a prompt."""
    suppressed: frozenset[int] = frozenset()
    simulation = Simulation(Config.of(mode, removal, seed), seed)
    with contextlib.suppress(Exception):
        simulation.run()
    for number in reversed(range(len(simulation.harms))):
        try:
            run(mode, removal, seed, suppressed | {number})
        except Exception:
            suppressed |= {number}
    return [what for number, what in enumerate(simulation.harms) if number not in suppressed]


@pytest.mark.parametrize("removal", [False, True], ids=["all stay", "some go"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_random_schedules(mode: Mode, removal: bool) -> None:
    """Messages are lost, doubled and late; everybody dies, at any record; some are removed alive."""
    harms = 0
    for seed in range(SEEDS):
        try:
            harms += len(run(mode, removal, seed).harms)
        except Exception as error:
            error.add_note(f"{mode}, removal {removal}, seed {seed}")
            raise
    assert harms > SEEDS
