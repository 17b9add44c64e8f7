"""Numbers with their units for people: `13.5 k/s`, `205 MiB`, `47.3 %`, `12.5 ms`.

Screen, `psfleet top`, page and report all write numbers like this. The page draws its charts in a browser, so
charts.js has the same rules in JavaScript; a test compares the two.
"""

from collections.abc import Callable, Mapping, Sequence

_COUNTS, _BYTES = ("", "k", "M", "G", "T"), ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def _digits(value: float, count: int = 3) -> str:
    """Significant digits, without zeros at the end; `1.2e-7` below a millionth."""
    rounded = float(f"{value:.{count - 1}e}")
    if rounded and abs(rounded) < 1e-6:
        mantissa, _, power = f"{rounded:.{count - 1}e}".partition("e")
        return f"{float(mantissa):g}e{int(power)}"
    return f"{rounded:.12f}".rstrip("0").rstrip(".")


def _scaled(value: float, units: Sequence[str], step: float, count: int = 3) -> str:
    unit = 0
    while abs(float(f"{value:.{count - 1}e}")) >= step and unit < len(units) - 1:
        value, unit = value / step, unit + 1
    return f"{_digits(value, count)} {units[unit]}".rstrip()


def _duration(seconds: float) -> str:
    if seconds >= 172_800:
        return f"{seconds / 86_400:.1f} d"
    if seconds >= 7200:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    if seconds >= 1 or seconds == 0:
        return f"{_digits(seconds)} s"
    return f"{_digits(seconds * 1e3)} ms" if seconds >= 1e-3 else f"{_digits(seconds * 1e6)} µs"


_FORMATS: Mapping[str, Callable[[float], str]] = {
    "s": _duration,
    "bytes": lambda value: _scaled(value, _BYTES, 1024),
    "Bps": lambda value: f"{_scaled(value, _BYTES, 1024)}/s",
    "cps": lambda value: f"{_scaled(value, _COUNTS, 1000)}/s",
    "percentunit": lambda value: f"{_digits(value * 100)} %",
    "short": lambda value: _scaled(value, _COUNTS, 1000),
    "none": lambda value: _scaled(value, _COUNTS, 1000, 4),
}


def number_text(value: float, unit: str) -> str:
    """Return the number as a person reads it; `unit` as of a panel
    (psfleet.core.base.observability.panels)."""
    return _FORMATS[unit](value)


def rate_text(value: float, things: str) -> str:
    """Return `13.5 k steps/s` for 13,500 steps in a second."""
    return f"{number_text(value, 'short')} {things}/s"
