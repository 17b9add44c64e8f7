"""The most frequent ids of a stream in fixed memory, and how a worker finds and names them."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from psfleet_worker.worker_metrics import FrequentIds, HotIds

PLACES = 5


@given(st.lists(st.lists(st.integers(0, 20), max_size=40), max_size=10))
def test_counts_are_within_their_bound(batches: list[list[int]]) -> None:
    """No count is too high, none too low by more than total / (places + 1), and places suffice."""
    actual, exact = FrequentIds(PLACES), Counter[int]()
    for batch in batches:
        actual.add(np.array(batch, np.int64))
        exact.update(batch)
    total = sum(exact.values())
    counts = dict(zip(actual.ids.tolist(), actual.counts.tolist(), strict=True))
    assert actual.total == total
    assert len(counts) <= PLACES
    for one, count in exact.items():
        assert count - total / (PLACES + 1) <= counts.get(one, 0) <= count


def test_what_fades_weighs_less() -> None:
    """Shares are those of the weights; without ids they are 0."""
    actual = FrequentIds()
    assert (actual.share(1), actual.first()) == (0, None)
    actual.add(np.array([1, 1, 1, 2]))
    actual.fade(0.5)
    actual.add(np.array([2, 2]))
    assert actual.first() == 2
    assert actual.share(1) == pytest.approx(2.5 / 4)
    assert actual.share(100) == 1


def test_a_hot_id_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    """A worker says once which id makes up more than 10 %; a table of few ids is nothing to tell of."""
    numbers = np.random.default_rng(0)
    batches: dict[str, np.ndarray] = {}
    hot = HotIds(3, lambda: batches)
    fractions = {}
    for _ in range(3):
        ids = numbers.integers(1000, 100_000, 4000)
        ids[:1000] = 7
        batches = {"users": ids, "days": numbers.integers(0, 7, 4000), "none": ids[:0]}
        for family in hot.families():
            for one in family.samples:
                fractions[one.name, one.labels["table"]] = one.value
    assert fractions["psfleet_hottest_id_share", "users"] == pytest.approx(0.25, abs=0.05)
    assert fractions["psfleet_hot_ids_share", "days"] == 1
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    assert output.startswith("psfleet: worker 3: 2")
    assert "of the ids of table 'users' are 7;" in output


def test_a_batch_counts_once() -> None:
    """Looks between which nothing was trained change nothing."""
    batches = {"users": np.array([1, 1, 2])}
    hot = HotIds(0, lambda: batches)
    first = [family.samples for family in hot.families()]
    assert [family.samples for family in hot.families()] == first
