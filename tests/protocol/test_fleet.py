"""The workers, shards, coordinators, standbys and followers keep their promises under random faults.

Failures name their seed, and `shrink(fleet(suite, seed))` says which of its faults matter. The seeds of
these tests are those of continuous integration; PSFLEET_TORTURE=n adds n more.
"""

from collections import Counter

import pytest

from tests.programs import MORE
from tests.protocol.fleet import follower_mutants, scaling_mutants
from tests.protocol.fleet.job import SUITES
from tests.protocol.fleet.mutants import COVERED, MUTANTS, Mutant
from tests.protocol.fleet.runs import fleet
from tests.protocol.scheduler import Broken, run, shrink

assert follower_mutants  # adds to MUTANTS, as the other one does
assert scaling_mutants
SEEDS = range(18, 18 + 5 + MORE)
"""Few, in which all of HAPPENS does."""
FOLLOWED = range(18, 18 + 8 + MORE)
"""Likewise where followers are."""
MOVED = range(25, 25 + 6 + MORE)
"""Likewise where the number of servers changes."""
LOGGED = range(36, 36 + 3 + MORE)
"""Likewise where these servers keep logs."""
FOLLOWING = range(38, 38 + 3 + MORE)
"""Likewise where they have standbys."""
USUAL = {
    *("switch", "ssp", "sync removal", "sync standbys machines", "sync mode_requests"),
    *("async standbys", "async snapshots", "async groups standbys", "sync standbys followers"),
    *(
        "async snapshots followers",
        "sync removal moves",
        "async followers moves",
        "sync logs moves",
    ),
}
"""Suites that `make test` runs. Each mode and each kind of fault is in one of them."""
assert SUITES.keys() >= USUAL
HAPPENS = {
    "removal": ("silences",),
    "standbys": ("takeovers", "deposed"),
    "machines": ("without power", "cut off"),
    "snapshots": ("snapshots",),
    "followers": ("cuts", "gaps", "dead followers"),
    "mode_requests": ("changes",),
}
"""What must have happened in some run of a suite, by words of its name."""


@pytest.mark.timeout(180 + 5 * MORE)
@pytest.mark.parametrize(
    "suite",
    [suite if suite in USUAL else pytest.param(suite, marks=pytest.mark.long) for suite in SUITES],
)
def test_promises_hold(suite: str) -> None:
    """Messages are lost, doubled and late, processes die before and after every record, workers are
    removed alive, machines are lost with all their servers or come back after a takeover. Sync: the bits
    of these rounds without faults, each sample in one round; else: each push counted once on every server,
    missing only what is declared torn; ssp: the bound; it ends. Where modes are wished for from outside:
    each sample once, whether in a round or in a lease. Followers: each cut is what all servers held, in
    sync mode the training after a round; it has all pushes that were acknowledged before it was asked for;
    no server that answers later lacks what was in it; its number never falls; the last one is the end.
    Another number of servers: workers go on with the old one or the new one, which all servers have; no push
    is lost and none counts twice over all servers; a move that is given up changes nothing. Where these
    servers keep no logs, the death of one ends the job; where they do, any of them dies at any record and at
    any step of a move, and the logs give what it holds; where they have standbys, no death ends the job
    whose server has one that is ready, whether rows of before or after the move count."""
    counts: Counter[str] = Counter()
    seeds = _seeds(suite)
    for seed in seeds:
        try:
            counts += run(fleet(suite, seed)).counts
        except Broken as error:
            error.add_note(f"suite {suite!r}, seed {seed}")
            raise
    if "moves" in suite:
        assert counts["given up"]
        assert counts["dead at moves"]
        assert counts["moves"] or "removal" in suite  # there workers meet at the ends alone
        return
    assert counts["dead servers"] > len(seeds) / 2
    assert counts["torn"] >= len(seeds) / 4
    for word in set(HAPPENS) & set(suite.split()):
        assert all(counts[what] > len(seeds) / 4 for what in HAPPENS[word])


def _seeds(suite: str) -> range:
    if "moves" in suite:
        return LOGGED if "logs" in suite else FOLLOWING if "standbys" in suite else MOVED
    return FOLLOWED if "followers" in suite else SEEDS


def broken_by(mutant: Mutant, patch: pytest.MonkeyPatch, seeds: range) -> int | None:
    """The first seed with which a run without the rule breaks a promise."""
    mutant.remove(patch)
    for seed in seeds:
        try:
            run(fleet(mutant.suite, seed))
        except Broken:
            return seed
    return None


def named(mutant: Mutant) -> str:
    """A name of the test."""
    return f"{mutant.rule} [{mutant.suite}]"


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS, ids=named)
def test_a_missing_rule_is_noticed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rule some run breaks a promise, and with it the same run keeps all of them."""
    seed = broken_by(mutant, monkeypatch, range(mutant.first, mutant.first + 40))
    assert seed is not None
    monkeypatch.undo()
    run(fleet(mutant.suite, seed))


@pytest.mark.long
@pytest.mark.parametrize("mutant", COVERED, ids=named)
def test_a_covered_rule_is_not_missed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rule all promises hold, for the reason that is given."""
    assert broken_by(mutant, monkeypatch, SEEDS) is None


def test_a_seed_says_all() -> None:
    """The same seed gives the same faults and the same end."""
    runs = [run(fleet("async standbys", 3)) for _ in range(2)]
    assert runs[0].faults == runs[1].faults
    assert runs[0].counts == runs[1].counts
    logs = [[body for _, body, _ in each.disks["S0.0"].log] for each in runs]
    assert logs[0] == logs[1]


@pytest.mark.long
def test_a_failure_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the faults of a failing run those are said that it needs."""
    torn = next(mutant for mutant in MUTANTS if "torn" in mutant.rule)
    torn.remove(monkeypatch)
    make = fleet(torn.suite, 14)
    whole = make(())
    with pytest.raises(Broken):
        whole.run()
    assert 1 <= len(shrink(make)) < len(whole.faults)
