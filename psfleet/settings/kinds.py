"""Kinds of settings: how a value is written in a flag or a variable, and what it is in a file."""

import re
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from psfleet.errors import ConfigError
from psfleet.settings.durations import SnapshotInterval

__all__ = ["BYTES", "INTERVAL", "SECONDS", "URL", "SettingKind", "kind_of", "one_of"]

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_BYTES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class SettingKind:
    """What a setting takes.

    Attributes:
        wanted: What a value must be, for the sentence "it must be ...".
        parse: The value that a text means. Raises ValueError if it means none.
        fits: Whether a value of a file (TOML or JSON) can be taken.
        text: The value as a variable says it; empty: the variable is not set.
        written: What a text must be; empty: as `wanted`.
        choices: All values, if they are few.
        is_number: It takes plain numbers.
        has_unit: A file may give a text, which is parsed, in place of a number.
    """

    wanted: str
    parse: Callable[[str], Any]
    fits: Callable[[Any], bool]
    text: Callable[[Any], str] = str
    written: str = ""
    choices: tuple[str, ...] = ()
    is_number: bool = False
    has_unit: bool = False


def _bytes(text: str) -> int:
    number = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = number[-1] if number and number[-1] in _BYTES else ""
    return int(float(number.removesuffix(unit) or 0) * _BYTES[unit])


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+) ?(s|min|h)?", text.strip())
    if found is None:
        raise ValueError
    return float(found[1]) * _SECONDS[found[2] or "s"]


def _interval(text: str) -> str:
    try:
        SnapshotInterval.parse(text, "")
    except ConfigError:
        raise ValueError from None
    return text


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ValueError
    return text.rstrip("/")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError
    return text == "1"


_TEXT = SettingKind("a text", str, _is_text)
_WHOLE = SettingKind("a whole number", int, _is_whole, is_number=True)
_PLAIN: dict[Any, SettingKind] = {
    str: _TEXT,
    int: _WHOLE,
    float: SettingKind("a number", float, _is_number, is_number=True),
    bool: SettingKind(
        "true or false",
        _switch,
        lambda value: isinstance(value, bool),
        lambda value: "1" if value else "",
        written="1 or nothing",
    ),
    Path: SettingKind("a path", Path, lambda value: False, has_unit=True),
}
SECONDS = SettingKind(
    "like 30s or 5min", _seconds, _is_number, lambda value: f"{value:.12g}s", has_unit=True
)
BYTES = SettingKind("a number and K, M, G or T, as in 8G", _bytes, _is_whole, has_unit=True)
URL = SettingKind("like http://127.0.0.1:4318", _url, lambda value: False, has_unit=True)
INTERVAL = SettingKind(
    "like 60s, 5min, 2h or 1000 rounds", _interval, lambda value: False, has_unit=True
)


def kind_of(annotation: Any) -> SettingKind:
    """What a field with this annotation takes; None in a union stands for "not given"."""
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return kind_of(next(one for one in inner if one is not types.NoneType))
    if origin is Literal:
        return one_of(*(one for one in inner if one is not None))
    assert origin is tuple, f"no setting is a {annotation}"
    return _list_of(kind_of(inner[0]))


def one_of(*choices: str) -> SettingKind:
    """One of a few texts."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    wanted = f"{', '.join(choices[:-1])} or {choices[-1]}"
    return SettingKind(wanted, parse, lambda value: value in choices, choices=choices)


def _list_of(item: SettingKind) -> SettingKind:
    def parse(text: str) -> tuple[Any, ...]:
        return tuple(item.parse(part.strip()) for part in text.split(",") if part.strip())

    def fits(value: Any) -> bool:
        return isinstance(value, list | tuple) and all(map(item.fits, value))

    plural = item.wanted.removeprefix("a ") + "s"
    return SettingKind(
        "a list", parse, fits, lambda value: ",".join(map(str, value)), written=plural
    )
