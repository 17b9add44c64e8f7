"""The shards and the coordinator of the servers under the scheduler of the model.

The seeds of these tests are those of continuous integration; PSFLEET_TORTURE=n adds n more.
"""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from psfleet.shard.events import Mode
from psfleet.shard.shard import Shard
from psfleet.shard.workers import Workers
from tests.protocol.real import Fleet, Plan
from tests.protocol.scheduler import Broken, Chances, Scheduler, run

MORE = int(os.environ.get("PSFLEET_TORTURE", "0"))
SEEDS = 12 + MORE
SUITES: dict[str, tuple[Mode, ...]] = {
    "sync": ("sync", "sync"),
    "async": ("async",),
    "ssp": ("ssp", "ssp"),
    "switch": ("sync", "async", "ssp", "sync"),
}


def fleet(suite: str, seed: int) -> Callable[[Iterable[int]], Scheduler]:
    """What makes one run."""
    dice = random.Random(f"{suite}/{seed}")
    plan = Plan.drawn(dice, SUITES[suite])
    chances = Chances.drawn(dice, torn=dice.choice([0.001, 0.01, 0.03]))

    def make(without: Iterable[int] = ()) -> Scheduler:
        return Fleet(plan, chances, f"{suite}/{seed}", without)

    return make


@pytest.mark.parametrize("suite", SUITES)
def test_promises_hold(suite: str) -> None:
    """Servers die before and after every record; sync: the bits of a run without faults; else: each
    step is counted once on every server; it ends; the bound of ssp holds."""
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        counts += run(fleet(suite, seed)).counts
    assert counts["dead servers"] > SEEDS / 2
    assert counts["torn"] > SEEDS / 2


def is_noticed(suite: str) -> bool:
    for seed in range(40):
        try:
            run(fleet(suite, seed))
        except Broken:
            return True
    return False


def test_a_shard_that_forgets_what_it_held_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pushes answered without a record are lost with the process, and the runs show it."""
    record = Shard._record

    def forgetful(shard: Shard, entry: object) -> None:
        if type(entry).__name__ != "Push":
            record(shard, entry)  # type: ignore[arg-type]

    monkeypatch.setattr(Shard, "_record", forgetful)
    assert is_noticed("sync")
    assert is_noticed("async")


def test_a_shard_that_takes_repeats_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A repeated push that counts again shows in the counts."""
    monkeypatch.setattr(Workers, "is_new_push", lambda workers, push: True)
    assert is_noticed("async")
