"""The protocol as three pure state machines keeps its promises under random faults, and needs its rules.

The seeds of these tests are those of continuous integration; PSFLEET_TORTURE=n adds n more.
"""

import os

import pytest

from tests.protocol.model.settings import MUTANTS, SUITES, Rule, settings_of
from tests.protocol.model.world import World, world
from tests.protocol.scheduler import Broken, run, shrink

MORE = int(os.environ.get("PSFLEET_TORTURE", "0"))
SEEDS = 12 + MORE
RARE = {  # seeds that it takes to meet what the rule is against; None: more than anybody has run
    Rule.TERM_ON_DISK: None,
    Rule.BOOT_FENCE: None,
    Rule.FLOOR: None,
    Rule.CALL_TERM: 1000,
    Rule.LAST_COMMIT: None,  # without it a step more is done again, which is no fault
    Rule.PERSIST_FIRST: 1500,
    Rule.FINISHED_ENDS: 300,
    Rule.VIEW_ABORTS: None,  # the coordinator's look at the view covers for it
    Rule.DRAINED_BEFORE: 500,
}


def is_noticed(rule: Rule, seeds: int) -> bool:
    """Whether one of the runs without the rule breaks a promise."""
    for seed in range(seeds):
        try:
            run(world(MUTANTS[rule], seed, rule))
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


@pytest.mark.parametrize("rule", [rule for rule in MUTANTS if rule not in RARE])
def test_a_missing_rule_is_noticed(rule: Rule) -> None:
    """Without the rule some run breaks a promise, within a few dozen seeds."""
    assert is_noticed(rule, 60)


@pytest.mark.skipif(not MORE, reason="takes minutes; PSFLEET_TORTURE=1 runs it")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rule", [rule for rule, seeds in RARE.items() if seeds])
def test_a_rarely_needed_rule_is_noticed(rule: Rule) -> None:
    """The same with more seeds."""
    assert is_noticed(rule, RARE[rule] or 0)


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
