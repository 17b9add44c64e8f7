"""The shards, the coordinator and the standbys of real servers under the scheduler of the model.

Failures name their seed, and `shrink(fleet(suite, seed))` says which of its faults matter. The seeds of
these tests are those of continuous integration; PSFLEET_TORTURE=n adds n more.
"""

import os
from collections import Counter

import pytest

from psfleet.shard.events import Call
from psfleet.shard.shard import Shard
from psfleet.shard.workers import Workers
from psfleet_server.coordinator import coordinator
from psfleet_server.coordinator.barriers import Meetings, Met
from psfleet_server.coordinator.coordinator import Seating
from psfleet_server.coordinator.data_dispatch import Supply
from tests.protocol.fleet.fleet import fleet
from tests.protocol.fleet.job import SUITES
from tests.protocol.fleet.primary import Primary
from tests.protocol.scheduler import Broken, run

MORE = int(os.environ.get("PSFLEET_TORTURE", "0"))
SEEDS = 12 + MORE


@pytest.mark.timeout(180 + 5 * MORE)
@pytest.mark.parametrize("suite", SUITES)
def test_promises_hold(suite: str) -> None:
    """Messages are lost, doubled and late, processes die before and after every record, workers are
    removed alive. Sync: the bits of these rounds without faults, each sample in one round; else: each
    push counted once on every server, missing only what is declared torn; ssp: the bound; it ends. Where
    modes are wished for from outside: each sample once, whether in a round or in a lease."""
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        try:
            counts += run(fleet(suite, seed)).counts
        except Broken as error:
            error.add_note(f"suite {suite!r}, seed {seed}")
            raise
    assert counts["dead servers"] > SEEDS / 2
    assert counts["torn"] > SEEDS / 2
    assert counts["changes"] > SEEDS / 4 or "wishes" not in suite


def is_noticed(suite: str, first: int = 0) -> bool:
    """Whether one of some runs breaks a promise; `first`: a seed to begin with where few of them do."""
    for seed in range(first, first + 40):
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


def test_a_shard_that_closes_rounds_while_views_change_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that has said where it stands, and goes on all the same, closes a round with lives that
    the others leave out (R6)."""
    closing = Shard._may_close

    def hasty(shard: Shard) -> bool:
        return closing(shard) or (not shard._replaying and shard.rounds.is_complete())

    monkeypatch.setattr(Shard, "_may_close", hasty)
    assert is_noticed("sync removal", 404)


def test_a_primary_that_does_not_wait_for_its_standby_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was said before the standby had it is not true any more after a takeover (R1)."""
    monkeypatch.setattr(Primary, "_is_settled", lambda primary, end: True)
    assert is_noticed("async standbys")


# -- a mode that is wished for from outside ----------------------------------------------------------


def test_a_wish_that_later_lives_are_not_told_of_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """W1: what a barrier has told of a wish is kept for those who pass it later; else they come to other
    meetings than the rest."""
    take = Meetings.take

    def forgetful(meetings: Meetings, met: Met) -> object:
        released = take(meetings, met)
        meetings.told.clear()
        return released

    monkeypatch.setattr(Meetings, "take", forgetful)
    assert is_noticed("sync wishes", 1)


def test_data_that_a_change_does_not_deal_anew_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """W2: the decision that all have met for another mode deals anew what is not used by then."""
    monkeypatch.setattr(Supply, "turn", lambda supply, to_rounds, reached: None)
    assert is_noticed("async wishes", 4)


def test_a_life_that_is_not_told_of_a_change_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """W3: who registers after all have met joins with that change, which perhaps no server knows."""

    def silent(call: Call, life: int, first: int, view: int, met: int, *_: object) -> Seating:
        return Seating(call, life, first, view, met)

    monkeypatch.setattr(coordinator, "Seating", silent)
    assert is_noticed("sync wishes", 5)
