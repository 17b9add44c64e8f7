"""The rules of snapshots: what the real shards and the real snapshot coordinator are without each of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from psfleet.shard.snapshot_cuts import Cuts, Cutting
from psfleet_server.snapshots.snapshot_coordinator import SnapshotCoordinator
from psfleet_server.snapshots.snapshot_events import SnapshotRequested, WorkerStateArrived
from tests.protocol.fleet.fleet import fleet
from tests.protocol.scheduler import Broken, run

SEEDS = 40
Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutant:
    """How to do without a rule, and the seed to begin with where few runs show that it is missing."""

    remove: Callable[[Patch], None]
    first: int = 0
    suite: str = "async snapshots"


def take_pushes_behind_marks(patch: Patch) -> None:
    """Servers do not hold back what comes after a mark, and cut once all have marked."""

    def is_due(cuts: Cuts, closed: int, sequences: object, left: object) -> bool:
        now = cuts.under_way
        return now is not None and now.members is not None and set(now.marks) == set(now.members)

    patch.setattr(Cuts, "is_behind", lambda cuts, worker, sequence: False)
    patch.setattr(Cuts, "is_due", is_due)


def take_old_marks(patch: Patch) -> None:
    """R12: marks of earlier snapshots count."""
    mark = Cuts.mark

    def lenient(cuts: Cuts, number: int, worker: int, incarnation: int, last: int) -> None:
        now = cuts.under_way
        mark(cuts, number if now is None else now.number, worker, incarnation, last)

    patch.setattr(Cuts, "mark", lenient)


def begin_old_cuts(patch: Patch) -> None:
    """R12: a server begins a cut whose number it has used already."""

    def begin(cuts: Cuts, cutting: Cutting) -> None:
        cuts.under_way = cutting

    patch.setattr(Cuts, "begin", begin)


def keep_cuts_across_views(patch: Patch) -> None:
    """R11: a change of the fleet leaves cuts under way."""
    give_up = Cuts.give_up

    def reluctant(cuts: Cuts, number: int | None = None) -> None:
        if number is not None:
            give_up(cuts, number)

    patch.setattr(Cuts, "give_up", reluctant)


def use_numbers_again(patch: Patch) -> None:
    """R12: a coordinator that has started again does not look which numbers were used, nor do servers."""
    requested = SnapshotCoordinator._requested

    def forgetful(coordinator: SnapshotCoordinator, event: SnapshotRequested) -> Any:
        return requested(coordinator, replace(event, seen=0))

    patch.setattr(SnapshotCoordinator, "_requested", forgetful)
    begin_old_cuts(patch)


def take_old_states(patch: Patch) -> None:
    """The state of a worker in an earlier snapshot counts."""
    arrived = SnapshotCoordinator._state_arrived

    def lenient(coordinator: SnapshotCoordinator, event: WorkerStateArrived) -> None:
        arrived(coordinator, replace(event, number=coordinator._number))

    patch.setattr(SnapshotCoordinator, "_state_arrived", lenient)


MUTANTS = {
    "pushes behind a mark wait for the cut": Mutant(take_pushes_behind_marks),
    "R12: marks of earlier snapshots are ignored": Mutant(take_old_marks),
    "R12: the numbers of cuts only rise": Mutant(begin_old_cuts, first=30),
    "R12: a coordinator uses no number twice": Mutant(use_numbers_again),
    "R11: a change of the fleet ends a snapshot": Mutant(
        keep_cuts_across_views, suite="async snapshots removal"
    ),
    "states of workers are of the same snapshot": Mutant(take_old_states, first=45),
}


@pytest.mark.parametrize("rule", MUTANTS)
def test_a_missing_rule_is_noticed(rule: str, monkeypatch: Patch) -> None:
    """Without the rule some run breaks a promise, and with it the same run keeps all of them."""
    mutant = MUTANTS[rule]
    with monkeypatch.context() as patch:
        mutant.remove(patch)
        seed = first_broken(mutant)
    assert seed is not None
    run(fleet(mutant.suite, seed))


def first_broken(mutant: Mutant) -> int | None:
    """The first seed whose run breaks a promise; None: none of some does."""
    for seed in range(mutant.first, mutant.first + SEEDS):
        try:
            run(fleet(mutant.suite, seed))
        except Broken:
            return seed
    return None
