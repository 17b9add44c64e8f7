"""A feature set in a TOML file.

    [tables.users]
    dim = 16
    optimizer = { kind = "Adagrad", learning_rate = 0.05 }
    initializer = { kind = "Normal", scale = 0.02 }
    entry = [{ kind = "CountFilterEntry", count_filter = 3 }, { kind = "TTLEntry", steps = 100000 }]

    [features.friends]
    table = "users"
    pooling = "mean"

    [features.age]
    default = -1.0

A feature with a table is a Feature, one without is a Number. The keys are the arguments in Python.
"""

import functools
import operator
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from psfleet import entry, initializer, optimizer
from psfleet.errors import ConfigError, UsageError
from psfleet.feature_sets.feature_set import Feature, FeatureSet, Number, Table

__all__ = ["load_features"]

T = TypeVar("T")


def load_features(path: str | os.PathLike[str]) -> FeatureSet:
    """The feature set that a TOML file describes.

    Raises:
        ConfigError: The file cannot be read or says what cannot be; the error names the file and the place.
    """
    try:
        said = tomllib.loads(Path(path).read_text("utf-8"))
        return _features(said)
    except OSError as error:
        raise ConfigError(f"{os.fspath(path)} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{os.fspath(path)} is no TOML: {error}") from None
    except UsageError as error:
        raise ConfigError(f"{os.fspath(path)}: {error}") from None


def _features(said: Mapping[str, Any]) -> FeatureSet:
    unknown = sorted(said.keys() - {"tables", "features"})
    if unknown:
        raise ConfigError(f"[{unknown[0]}] is unknown; use [tables.NAME] and [features.NAME]")
    tables = {name: _table(name, part) for name, part in _parts(said, "tables")}
    return FeatureSet(_feature(name, part, tables) for name, part in _parts(said, "features"))


def _parts(said: Mapping[str, Any], kind: str) -> list[tuple[str, dict[str, Any]]]:
    parts = said.get(kind, {})
    for name, part in parts.items() if isinstance(parts, dict) else [(kind, parts)]:
        if not isinstance(part, dict):
            raise ConfigError(f"{kind} has {name} = {part!r:.60}; it must be a table [{kind}.NAME]")
    return list(parts.items())


def _table(name: str, said: dict[str, Any]) -> Table:
    owner, given = f"table {name!r}", dict(said)
    if "optimizer" in given:
        given["optimizer"] = _made(f"the optimizer of {owner}", given["optimizer"], optimizer)
    if "initializer" in given:
        given["initializer"] = _made(
            f"the initializer of {owner}", given["initializer"], initializer
        )
    if "entry" in given:
        parts = given["entry"] if isinstance(given["entry"], list) else [given["entry"]]
        entries = [_entry(f"the entry of {owner}", part) for part in parts]
        given["entry"] = functools.reduce(operator.and_, entries) if entries else None
    return _constructed(owner, Table, {"name": name, **given})


def _feature(name: str, said: dict[str, Any], tables: Mapping[str, Table]) -> Feature | Number:
    owner = f"feature {name!r}"
    if "table" not in said:
        return _constructed(owner, Number, {"name": name, **said})
    if said["table"] not in tables:
        known = ", ".join(tables) or "none"
        raise ConfigError(f"{owner}: table is {said['table']!r}; the file has {known}")
    return _constructed(owner, Feature, {"name": name, **said, "table": tables[said["table"]]})


def _entry(owner: str, said: Any) -> Any:
    """A part of an entry; its policy may be one of psfleet.entry with hyperparameters."""
    if isinstance(said, dict) and isinstance(said.get("policy"), dict):
        said = {**said, "policy": _made(f"the policy in {owner}", said["policy"], entry)}
    return _made(owner, said, entry)


def _made(owner: str, said: Any, module: ModuleType) -> Any:
    """What `{ kind = NAME, ... }` stands for: an object of a class of the module."""
    kind = said.get("kind") if isinstance(said, dict) else None
    made: Any = getattr(module, str(kind)) if kind in module.__all__ else None
    if not isinstance(made, type):
        raise ConfigError(
            f"{owner} is {said!r:.80}; it must have the `kind` of a class of {module.__name__}"
        )
    return _constructed(owner, made, {key: value for key, value in said.items() if key != "kind"})


def _constructed(owner: str, kind: type[T], given: Mapping[str, Any]) -> T:
    try:
        return kind(**given)
    except UsageError:
        raise
    except TypeError as error:
        raise ConfigError(f"{owner}: {error}") from None
