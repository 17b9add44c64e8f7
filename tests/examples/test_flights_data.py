"""The numbers that the flights example trains on."""

import zipfile
from collections.abc import Sequence
from pathlib import Path

import flights_data
import numpy as np
import pytest
from flights_data import FIELDS, NUMBERS, READ, Flights

AFTER_DEPARTURE = {"dep_time", "dep_delay", "arr_time", "air_time"}


def some(name: str, names: Sequence[str]) -> flights_data.Columns:
    """What the package's files say, of each 20th flight."""
    path = flights_data._package_folder() / name
    is_zip = path.suffix == ".zip"
    content = zipfile.ZipFile(path).read(path.stem) if is_zip else path.read_bytes()
    header, *lines = content.decode().splitlines()
    every = 20 if "arr_delay" in names else 1
    return flights_data._columns(iter([header, *lines[::every]]), names)  # type: ignore[arg-type]


def column(flights: Flights, name: str) -> flights_data.Floats:
    return flights.numbers[:, NUMBERS.index(name)]


def test_every_flight_is_there(flights: Flights) -> None:
    """336,776 flights, of which 9,430 never arrived; 23.7 % of the others were late."""
    assert len(flights.ids) + flights.dropped == 336_776
    assert flights.dropped == 9_430
    assert flights.late.mean() == pytest.approx(0.23715, abs=1e-5)


def test_the_months_of_the_split(flights: Flights) -> None:
    """January to September, October, and November with December are told apart by month alone."""
    assert [len(flights.rows(months)) for months in (range(1, 10), [10], [11, 12])] == [
        244_737,
        28_618,
        53_991,
    ]


def test_nothing_is_read_that_departure_brings() -> None:
    """Of what happened to a flight only arr_delay is read, for the label; no number is made of it."""
    read = {name for names in READ.values() for name in names}
    assert not read & AFTER_DEPARTURE
    assert not {name for field in FIELDS for name in field} & {"arr_delay", *AFTER_DEPARTURE}


@pytest.mark.long
@pytest.mark.usefixtures("flights")
def test_numbers_and_ids_do_not_depend_on_what_happened() -> None:
    """With every delay replaced, ids and numbers are the same bits: only the label changes."""

    def all_late(name: str, names: Sequence[str]) -> flights_data.Columns:
        columns = some(name, names)
        if "arr_delay" in columns:
            delay = columns["arr_delay"]
            columns["arr_delay"] = np.where(delay == "NA", delay, "99")
        return columns

    flights, made = flights_data.make(some), flights_data.make(all_late)
    assert 0 < flights.late.mean() < 1
    assert made.late.all()
    assert made.ids.tobytes() == flights.ids.tobytes()
    assert made.numbers.tobytes() == flights.numbers.tobytes()


def test_past_weather_ends_with_the_hour_of_departure() -> None:
    """A mean over past hours does not change when a later hour does."""
    values = np.random.default_rng(0).random((3, 50), np.float32)
    later = values.copy()
    later[:, 30:] = 7
    means, changed = flights_data._past(values, 8), flights_data._past(later, 8)
    assert np.array_equal(means[:, :30], changed[:, :30])
    assert not np.array_equal(means[:, 30:], changed[:, 30:])
    np.testing.assert_allclose(means[:, 20], values[:, 13:21].mean(axis=1), rtol=1e-6)


def test_counts_before_a_flight() -> None:
    """A window holds the flights of the same group that are scheduled earlier, not the flight itself."""
    group = np.array([0, 0, 0, 1, 0])
    minute = np.array([100, 40, 99, 99, 39])
    assert flights_data._before(group, minute, 60).tolist() == [2, 1, 2, 0, 0]
    assert flights_data._since_last(group, minute).tolist() == [1, 1, 59, 10080, 10080]


def test_ids_are_hashes_of_fields(flights: Flights) -> None:
    """Each field has as many ids as values, and no two fields share one."""
    sizes = [len(np.unique(ids)) for ids in flights.ids.T]
    assert sizes[:7] == [16, 3, 104, 4037, 5706, 19, 7]
    assert len(np.unique(flights.ids)) == sum(sizes)


def test_ranks_are_bounded_and_know_only_the_training_months(flights: Flights) -> None:
    """Ranks lie in [-1.7, 1.7], NaN becomes 0, and other months do not move them."""
    ranks = flights.numbers[flights.rows([1])][:, -14:]
    both = np.concatenate([ranks, 10 * ranks + 5])
    ranked = flights_data.ranks(both, ranks)
    assert np.abs(ranked).max() <= np.float32(1.7)
    assert ranked[: len(ranks)].tobytes() == flights_data.ranks(ranks, ranks).tobytes()
    assert not flights_data.ranks(np.full((2, 14), np.nan, np.float32), ranks).any()


def test_weather_of_one_flight(flights: Flights) -> None:
    """The first flight of the year, UA 1545 from Newark at 5:15, with the weather of its hour."""
    assert column(flights, "departure")[0] == 5 * 60 + 15
    assert column(flights, "distance")[0] == 1400
    assert column(flights, "temp")[0] == pytest.approx(39.02)
    assert column(flights, "wind_speed")[0] == pytest.approx(12.65858)
    assert column(flights, "age")[0] == 2013 - 1999


@pytest.mark.usefixtures("flights")
def test_a_cache_is_filled_once_and_read_back(tmp_path: Path) -> None:
    """The second load reads the file that the first has written."""

    def refuse(name: str, names: Sequence[str]) -> flights_data.Columns:
        raise AssertionError(f"{name} was read although the cache was full")

    first = flights_data.load(tmp_path, some)
    second = flights_data.load(tmp_path, refuse)
    assert [path.suffix for path in tmp_path.iterdir()] == [".npz"]
    assert first.numbers.tobytes() == second.numbers.tobytes()
    assert first.ids.tobytes() == second.ids.tobytes()
    assert first.dropped == second.dropped > 0
