"""Batches that are read ahead: guessed right or wrong, they are those that were asked for."""

import contextlib
from collections.abc import Callable

import pytest

from psfleet.core.engine.round_plan import Range
from psfleet.data.read_ahead import ReadAhead, probable

pytestmark = pytest.mark.quick

Ranges = tuple[Range, ...]


def test_wrong_guesses() -> None:
    """Whatever is asked for is returned, and only what is taken is reported."""
    reported: list[Ranges] = []

    def prepare(ranges: Ranges) -> Callable[[], Ranges]:
        def finish() -> Ranges:
            reported.append(ranges)
            return ranges

        return finish

    lows = [0, 20, 40, 60, 10, 15, 20, 25, 95, 100, 200, 220, 7]
    asked: list[Ranges] = [((low, low + 5),) for low in lows]
    asked[6:6] = [((3, 5), (8, 9))]
    with contextlib.closing(ReadAhead(prepare, 100, 3)) as ahead:
        assert [ahead.take(ranges) for ranges in asked] == asked
    assert reported == asked


def test_guesses_end_with_the_epoch() -> None:
    """The next steps are as far from each other as the last two, and stop at the epoch's end."""
    assert list(probable((100, 110), 20, 50, 5)) == [((120, 130),), ((140, 150),)]
    assert list(probable((100, 110), 15, 50, 2)) == [((115, 125),), ((130, 140),)]
    assert list(probable((130, 140), 15, 50, 2)) == [((145, 150),)]
    assert list(probable((130, 140), -20, 50, 2)) == []
    assert list(probable((130, 140), 0, 50, 2)) == []
