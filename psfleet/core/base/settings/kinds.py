"""Kinds of setting values, their forms in flags, variables and files, and names to choose from.

A SettingKind parses a text, checks a value from a TOML or JSON file, and turns a value back into text for
the variables of another process. Add a kind here if settings need a new form, such as "5min" or "8G".
Parsers raise ValueError. declaration.py turns that into a message with the name of the flag, variable or key.
"""

import importlib
import logging
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from psfleet.core.base.errors import ConfigError

Mode = Literal["sync", "async", "ssp", "geo", "half-async"]
"""Names of the consistency modes. This line is written by tools/generate_stubs.py."""
Schedule = Literal["gpipe", "1f1b"]
Device = Literal["cpu", "cuda", "disk"]
"""Memory that holds a table. psfleet/core/engine/tables/memory_choice.py implements each."""
DEVICE_PLACES: dict[Device, str] = {
    "cpu": "in host memory",
    "cuda": "in the memory of an NVIDIA GPU",
    "disk": "in files of --server-disk",
}
"""Each device as a phrase for the help texts of settings."""
Format = Literal["float32", "bfloat16", "int8"]
RowForm = Literal["float32", "bfloat16", "int8", "int4"]
"""Format of rows that are kept for prediction. int8 and int4 have one scale per row."""
ArrayFormat = Literal["npz", "safetensors", "torch"]
"""File format of the arrays of an exported model."""
ExportFormat = Literal[ArrayFormat, "onnx", "faiss"]
"""Format of an exported model: arrays alone, or safetensors with an ONNX graph or a FAISS index."""


_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_MOST_SECONDS = 10 * 365 * 86_400.0


MOST_SERVERS = 1024
"""Largest number of servers of a job. With more, some servers would not get even one virtual shard."""
MOST_WORKERS = 65_536
"""Largest number of workers, or of stage processes of all workers. Servers and launcher list them all."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/{1,3}")  # a Path makes one slash of two
_USER = re.compile(r"(://)[^/@]*@")
ROOT = "psfleet"
"""Name of psfleet's root logger."""
LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "off": logging.CRITICAL,  # which says why a process ends
}
_BYTES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class SnapshotInterval:
    """Interval between snapshots, in time or in rounds. Exactly one of the attributes is not 0.

    Attributes:
        seconds: Interval in time.
        rounds: Interval in rounds (sync mode), or in pushes of one worker (other modes).
    """

    seconds: float = 0.0
    rounds: int = 0

    @classmethod
    def parse(cls, text: str, name: str) -> "SnapshotInterval":
        """Parse an interval like "5min" or "1000 rounds".

        `name`: Name of the setting, for messages.

        Raises:
            ConfigError: The text is not an interval, or is 0.
        """
        match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|h|rounds?)", text.strip())
        number = float(match[1]) if match else 0.0
        if match is None or not number or (match[2][0] == "r" and not number.is_integer()):
            raise ConfigError(f"{name} is {text!r}; it must be like 60s, 5min, 2h or 1000 rounds")
        unit = _SECONDS.get(match[2])
        return cls(rounds=int(number)) if unit is None else cls(number * unit)


class CrashPoint(NamedTuple):
    """Point in the code at which a process is made to fail (`psfleet.core.base.crash_points`).

    Attributes:
        time: The process fails when it reaches the point for the `time`-th time, counted from 1.
        fault: "kill" (as by SIGKILL), "stop" (as by SIGSTOP), or "raise" (an error).
    """

    point: str
    time: int
    fault: str = "kill"

    def __str__(self) -> str:
        return f"{self.point}:{self.time}:{self.fault}"


def _crash_point(text: str) -> CrashPoint:
    match = re.fullmatch(r"(.+?):([1-9]\d*)(?::(kill|stop|raise))?", text.strip())
    if match is None:
        raise ValueError
    return CrashPoint(match[1], int(match[2]), match[3] or "kill")


class ServerCount(int):
    """Number of servers that a job starts with, which is also the smallest number that it may have.

    Attributes:
        most: Largest number of servers. The launcher may choose any number in between while the job runs.
    """

    most: int

    def __new__(cls, fewest: int, most: int = 0) -> "ServerCount":
        """Create the number. `most` 0 means that the number of servers is fixed."""
        instance = super().__new__(cls, fewest)
        instance.most = most or fewest
        return instance

    def __str__(self) -> str:
        return f"{int(self)}..{self.most}" if self.most > self else f"{int(self)}"


def _servers(text: str) -> ServerCount:
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text.strip())
    if match is None:
        raise ValueError
    fewest = int(match[1])
    instance = ServerCount(fewest, int(match[2] or fewest))
    if not instance <= instance.most <= MOST_SERVERS:
        raise ValueError
    return instance


def url_of(path: str | os.PathLike[str]) -> str | None:
    """Return a path as a URL, or None for a path on this machine (also as a `file:` URL).

    A Path object turns "s3://bucket" into "s3:/bucket". This function restores the second slash.
    """
    text = os.fspath(path)
    match = _URL.match(text) if isinstance(text, str) else None
    if match is None or match[1].lower() == "file":
        return None
    return f"{match[1]}://{text[match.end() :]}"


def shown_url(url: str) -> str:
    """Return a URL without credentials and query, for messages."""
    return _USER.sub(r"\1", url).partition("?")[0]


def place_or_url(path: str | os.PathLike[str]) -> str:
    """Return an absolute path or a URL, so that another process finds the same folder."""
    return url_of(path) or str(local_path(path).absolute())


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a path on this machine, given as a text, a Path or a `file:` URL.

    Raises:
        ConfigError: The path is a URL of another scheme. Without this check, a local folder "s3:" would be
            created.
    """
    text = os.fspath(path)
    if (url := url_of(path)) is not None:
        raise ConfigError(
            f"{shown_url(url)!r} is a URL, and only local and mounted file systems are read and written "
            f"here; name a folder and copy between the two, or name it {'./' + text!r} if it is one here"
        )
    if isinstance(text, str) and (match := _URL.match(text)):
        return Path("/" + text[match.end() :])
    return Path(text)


def parse_levels(text: str) -> dict[str, int]:
    """Return the level of each logger in a text like "warning,psfleet.server=debug".

    A level without a name is that of psfleet's root logger, whose default is info.

    Raises:
        ValueError: A level is unknown, or a logger is not one of psfleet's.
    """
    levels = {ROOT: logging.INFO}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, level = part.rpartition("=")
        if level not in LEVELS or (equals and f"{name}.".split(".")[0] != ROOT):
            raise ValueError(part)
        levels[name or ROOT] = LEVELS[level]
    return levels


@dataclass(frozen=True)
class SettingKind:
    """Kind of a setting's values, such as a number of seconds.

    Attributes:
        wanted: Allowed values in words, which complete "it must be ...".
        parse: Returns the value of a text from a flag or variable, or raises ValueError.
        fits: Returns True if a value from a file (TOML or JSON) has the right type.
        text: Returns the text of a value for a variable. An empty text leaves the variable unset.
        written: Allowed texts in words, or empty if they are the same as `wanted`.
        choices: All values, if there are only a few.
        is_number: True for a plain number, which may have bounds.
        has_unit: True if a file may give the value as a text, which is then parsed.
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
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+) ?([KMGT]?)(?:I?B)?", text.strip().upper())
    if match is None:
        raise ValueError
    return int(float(match[1]) * _BYTES[match[2]])


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+) ?(s|min|h)?", text.strip())
    if match is None:
        raise ValueError
    seconds = float(match[1]) * _SECONDS[match[2] or "s"]
    if seconds > _MOST_SECONDS:  # system calls cannot wait that long
        raise ValueError
    return seconds


def _interval(text: str) -> str:
    try:
        SnapshotInterval.parse(text, "")
    except ConfigError:
        raise ValueError from None
    return text


def _levels(text: str) -> str:
    parse_levels(text)
    return text


def _url(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise ValueError
    return text.rstrip("/")


def _whole(text: str) -> int:
    if (
        re.fullmatch(r" *[+-]?[0-9]+ *", text) is None
    ):  # int() also takes 1_0 and digits of any script
        raise ValueError
    return int(text)


def _number(text: str) -> float:
    number = float(text) if text.isascii() and "_" not in text else math.nan
    if not math.isfinite(number):
        raise ValueError
    return number


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max  # false for nan too


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError
    return text == "1"


_PLAIN: dict[Any, SettingKind] = {
    str: SettingKind("a text", str, lambda value: isinstance(value, str)),
    int: SettingKind("a whole number", _whole, _is_whole, is_number=True),
    float: SettingKind("a number", _number, _is_number, is_number=True),
    bool: SettingKind(
        "true or false",
        _switch,
        lambda value: isinstance(value, bool),
        lambda value: "1" if value else "",
        written="1 or nothing",
    ),
    Path: SettingKind("a path", local_path, lambda value: False, has_unit=True),
}
SECONDS = SettingKind(
    "like 30s or 5min", _seconds, _is_number, lambda value: f"{value:.12g}s", has_unit=True
)
BYTES = SettingKind(
    "a number and K, M, G or T, as in 8G",
    _bytes,
    lambda value: _is_whole(value) and value >= 0,
    has_unit=True,
)
URL = SettingKind("like http://127.0.0.1:4318", _url, lambda value: False, has_unit=True)
FOLDER = SettingKind(
    "a path", lambda text: str(local_path(text)), lambda value: False, has_unit=True
)
FOLDER_OR_URL = SettingKind(
    "a path or URL",
    lambda text: url_of(text) or str(local_path(text)),
    lambda value: False,
    has_unit=True,
)
SERVERS = SettingKind(
    f"a number from 1 to {MOST_SERVERS}, or the fewest and the most, as in 2..8; to train without a "
    "cluster run the script by itself",
    _servers,
    _is_whole,
    has_unit=True,
)
INTERVAL = SettingKind(
    "like 60s, 5min, 2h or 1000 rounds", _interval, lambda value: False, has_unit=True
)

CRASH_POINT = SettingKind(
    "like append:3, append:3:stop or append:3:raise",
    _crash_point,
    lambda value: False,
    has_unit=True,
)
LOG_LEVELS = SettingKind(
    "debug, info, warning, error or off, for single loggers like warning,psfleet.server=debug",
    _levels,
    lambda value: False,
    has_unit=True,
)


def kind_of(annotation: Any) -> SettingKind:
    """Return the kind of a field with this annotation. In a union with None, the field may be unset."""
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return kind_of(next(choice for choice in inner if choice is not types.NoneType))
    if origin is Literal:
        return one_of(*(choice for choice in inner if choice is not None))
    assert origin is tuple, f"no setting is a {annotation}"
    return _list_of(kind_of(inner[0]))


def one_of(*choices: str) -> SettingKind:
    """Return the kind of a setting whose value is one of these texts."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError
        return text

    requirement = f"{', '.join(choices[:-1])} or {choices[-1]}"
    return SettingKind(requirement, parse, lambda value: value in choices, choices=choices)


def _list_of(item: SettingKind) -> SettingKind:
    def parse(text: str) -> tuple[Any, ...]:
        return tuple(item.parse(part.strip()) for part in text.split(",") if part.strip())

    def fits(value: Any) -> bool:
        return isinstance(value, list | tuple) and all(map(item.fits, value))

    plural = item.wanted.removeprefix("a ") + "s"
    return SettingKind(
        "a list", parse, fits, lambda value: ",".join(map(str, value)), written=plural
    )


def find_object(reference: str, what: str, advice: str) -> Any:
    """Import the object that a text MODULE:NAME refers to, and return it.

    The module may be in the present folder, which is appended to sys.path.

    Args:
        what: Kind of the object, for the error.
        advice: Alternatives for the user, for the error.

    Raises:
        ConfigError: The object cannot be imported.
    """
    module, _, name = reference.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # at the end, so that a file of the user cannot hide a library
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:
        raise ConfigError(
            f"the {what} {reference!r} cannot be imported ({type(error).__name__}: {error}); {advice}"
        ) from error
