"""The protocol as three pure state machines keeps its promises under random faults, and needs its rules.

The seeds of these tests are those of continuous integration; PSFLEET_TORTURE=n adds n more.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from tests.protocol.model.settings import MUTANTS, SUITES, Rule, settings_of
from tests.protocol.model.world import World, world
from tests.protocol.scheduler import Broken, Chances, Scheduler, run, shrink

MORE = int(os.environ.get("PSFLEET_TORTURE", "0"))
SEEDS = 12 + MORE
HASTY = Chances(steps=800, drop=0, fault=0.05, old=0, decisive=200)
"""Mostly the coordinator dies, and mostly within a decision."""
SLOW = Chances(steps=2000, deliver=0.93, drop=0, duplicate=0.3, fault=0.05, torn=0.006, old=0.04)
"""Nothing is lost, but much comes twice and very late."""
SPECIAL: dict[Rule, dict[str, Any]] = {
    Rule.PERSIST_FIRST: {"chances": HASTY, "shards": 2, "seats": ("w0", "w1")},
    Rule.BOOT_FENCE: {"chances": SLOW, "shards": 2},
}
"""Settings under which what a rule is against happens more often than by chance alone."""
FIRST = {
    Rule.TERM_ON_DISK: 1936,
    Rule.BOOT_FENCE: 1066,
    Rule.CALL_TERM: 614,
    Rule.PERSIST_FIRST: 85,
    Rule.FINISHED_ENDS: 148,
    Rule.DRAINED_BEFORE: 270,
}
"""What these rules are against takes several rare things in a row: where to begin to look for it. When the
model changes it happens elsewhere: run more seeds, and put here the one that shows it."""
COVERED = {
    Rule.LAST_COMMIT: "the last closed round is enough, as every server holds a push that closed anywhere; "
    "that the commits count too saves doing a step again",
    Rule.VIEW_ABORTS: "a part of a snapshot names its view, and the coordinator takes none of another view; "
    "that servers give up theirs lets pushes go on sooner",
}
"""Rules whose absence nothing notices, because another rule is enough for the promises."""


def without(rule: Rule, seed: int) -> Callable[[Iterable[int]], Scheduler]:
    """What makes a run that does without the rule."""
    suite = MUTANTS[rule]
    settings = replace(settings_of(suite, seed, rule), **SPECIAL.get(rule, {}))
    return lambda suppressed: World(settings, f"{suite}/{seed}", suppressed)


def is_noticed(rule: Rule, seeds: Iterable[int]) -> bool:
    """Whether one of the runs without the rule breaks a promise."""
    for seed in seeds:
        try:
            run(without(rule, seed))
        except Broken:
            return True
    return False


@pytest.mark.parametrize("suite", SUITES)
def test_promises_hold(suite: str) -> None:
    """Whatever is lost, doubled, late or dead: nothing is lost, nothing counts twice, and all of it ends."""
    counted = sum(1 for seed in range(SEEDS) if run(world(suite, seed)).is_calm)
    assert counted == SEEDS


def test_faults_happen() -> None:
    """The runs are what they say: processes die, also within an event; standbys take over; modes change."""
    seen: set[str] = set()
    for suite in SUITES:
        for seed in range(6):
            seen |= {what for what, count in run(world(suite, seed)).counts.items() if count}
    assert seen >= {
        "torn",
        "dead servers",
        "dead workers",
        "dead coordinators",
        "expired seats",
        "expired servers",
        "roll-backs",
        "snapshots",
        "switches",
    }


@pytest.mark.parametrize("rule", [rule for rule in MUTANTS if rule not in COVERED])
def test_a_missing_rule_is_noticed(rule: Rule) -> None:
    """Without the rule some run breaks a promise, within a few dozen seeds."""
    first = FIRST.get(rule, 0)
    assert is_noticed(rule, range(first, first + 60))


@pytest.mark.parametrize("rule", COVERED)
def test_a_covered_rule_is_not_missed(rule: Rule) -> None:
    """Without the rule all promises hold, for the reason that is given."""
    assert not is_noticed(rule, range(SEEDS)), COVERED[rule]


@pytest.mark.parametrize("rule", sorted({*FIRST, *SPECIAL}, key=str))
def test_with_the_rule_it_holds(rule: Rule) -> None:
    """It is the rule that is missing: the same run keeps all promises with it."""
    first = FIRST.get(rule, 0)
    settings = replace(settings_of(MUTANTS[rule], first), **SPECIAL.get(rule, {}))
    run(lambda suppressed: World(settings, f"{MUTANTS[rule]}/{first}", suppressed))


def test_every_rule_has_a_suite() -> None:
    """No rule of the model is left out of these tests."""
    assert set(MUTANTS) == set(Rule)
    assert set(MUTANTS.values()) <= set(SUITES)


def test_a_seed_says_all() -> None:
    """The same seed gives the same faults and the same end."""
    runs = [World(settings_of("switch-removal", 3), "seed") for _ in range(2)]
    for one in runs:
        one.run()
    assert runs[0].faults == runs[1].faults
    assert runs[0].acknowledged == runs[1].acknowledged


def test_a_failure_shrinks() -> None:
    """Of the faults of a failing run those are said that it needs."""
    make = world("async-removal", 1, Rule.TORN_NAMED)
    whole = make(())
    with pytest.raises(Broken):
        whole.run()
    assert 1 <= len(shrink(make)) < len(whole.faults)
