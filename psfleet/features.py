"""The features of a model, each described once, see docs/features.md.

users = Table("users", dim=16, optimizer=psfleet.optimizer.Adagrad(0.05))
features = FeatureSet([
    Feature("user", users),
    Feature("friends", users, pooling="mean", last=50),
    Number("age", default=-1.0),
])

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

    [inputs.tags]
    dtype = "text"

    [features.price]
    table = "prices"
    transform = [{ kind = "Log1p" }, { kind = "Quantiles", count = 10 }]

A feature with a table is a Feature, one without is a Number; `inputs` has each Input. The keys are the
arguments in Python.
"""

import difflib
import functools
import inspect
import operator
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from psfleet import entry, initializer, optimizer
from psfleet.errors import ConfigError, UsageError
from psfleet.feature_sets.feature_document import read_features, transform_of
from psfleet.feature_sets.feature_lookup import FeatureLookup, feed
from psfleet.feature_sets.feature_set import Feature, FeatureSet, Input, Number, Table
from psfleet.feature_sets.jagged import Jagged
from psfleet.feature_sets.transforms.buckets import Bucketize, Quantiles
from psfleet.feature_sets.transforms.crosses import Cross
from psfleet.feature_sets.transforms.lists import (
    FillMissing,
    Match,
    Overlap,
    Pad,
    Truncate,
    WeightedValues,
)
from psfleet.feature_sets.transforms.maps import Lookup, MapLookup
from psfleet.feature_sets.transforms.number_transforms import Clip, Log1p, MinMax, Normalize
from psfleet.feature_sets.transforms.texts import Lowercase, NGrams, Split
from psfleet.feature_sets.transforms.transform import Transform
from psfleet.feature_sets.transforms.vocabulary import Vocabulary
from psfleet.feature_sets.value_hashes import hashed
from psfleet.optimizer.wrapping_optimizers import check_outside
from psfleet.platform.named_object import find_object
from psfleet.validation.annotations import checked

__all__ = [
    "Bucketize",
    "Clip",
    "Cross",
    "Feature",
    "FeatureLookup",
    "FeatureSet",
    "FillMissing",
    "Input",
    "Jagged",
    "Log1p",
    "Lookup",
    "Lowercase",
    "MapLookup",
    "Match",
    "MinMax",
    "NGrams",
    "Normalize",
    "Number",
    "Overlap",
    "Pad",
    "Quantiles",
    "Split",
    "Table",
    "Transform",
    "Truncate",
    "Vocabulary",
    "WeightedValues",
    "feed",
    "find_features",
    "hashed",
    "load_features",
]


T = TypeVar("T")


@checked
def load_features(path: str | os.PathLike[str]) -> FeatureSet:
    """The feature set that a TOML file describes, or a file that `FeatureSet.save` has written, `.json`.

    Raises:
        ConfigError: The file cannot be read or says what cannot be; the error names the file and the place.
    """
    is_json = os.fspath(path).endswith(".json")
    try:
        if is_json:
            return _features(read_features(Path(path)))
        return _features(tomllib.loads(Path(path).read_text("utf-8")))
    except OSError as error:
        raise ConfigError(f"{os.fspath(path)} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{os.fspath(path)} is no TOML: {error}") from None
    except UsageError as error:
        raise ConfigError(f"{os.fspath(path)}: {error}") from None


def _features(said: Mapping[str, Any]) -> FeatureSet:
    unknown = sorted(said.keys() - {"tables", "inputs", "features"})
    if unknown:
        raise ConfigError(
            f"[{unknown[0]}] is unknown; use [tables.NAME], [inputs.NAME] and [features.NAME]"
        )
    tables = {name: _table(name, part) for name, part in _parts(said, "tables")}
    inputs = [_input(name, part) for name, part in _parts(said, "inputs")]
    features = [_feature(name, part, tables) for name, part in _parts(said, "features")]
    return FeatureSet([*inputs, *features])


def _parts(said: Mapping[str, Any], kind: str) -> list[tuple[str, dict[str, Any]]]:
    parts = said.get(kind, {})
    for name, part in parts.items() if isinstance(parts, dict) else [(kind, parts)]:
        if not isinstance(part, dict):
            raise ConfigError(f"{kind} has {name} = {part!r:.60}; it must be a table [{kind}.NAME]")
    return list(parts.items())


def _table(name: str, said: dict[str, Any]) -> Table:
    owner, given = f"table {name!r}", dict(said)
    _refuse_unknown(owner, said, _keys(Table))
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


def _input(name: str, said: dict[str, Any]) -> Input:
    owner = f"input {name!r}"
    _refuse_unknown(owner, said, _keys(Input))
    return _constructed(owner, Input, {"name": name, **_with_transforms(owner, said)})


def _with_transforms(owner: str, said: dict[str, Any]) -> dict[str, Any]:
    if "transform" not in said:
        return said
    given = said["transform"]
    parts = given if isinstance(given, list) else [given]
    return {**said, "transform": [transform_of(owner, part) for part in parts]}


def _feature(name: str, said: dict[str, Any], tables: Mapping[str, Table]) -> Feature | Number:
    owner = f"feature {name!r}"
    _refuse_unknown(owner, said, _keys(Feature) if "table" in said else _keys(Number, Feature))
    said = _with_transforms(owner, said)
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
    """Make the object of a class of the module for which `{ kind = NAME, ... }` stands."""
    kind = said.get("kind") if isinstance(said, dict) else None
    made: Any = getattr(module, str(kind)) if kind in module.__all__ else None
    if not isinstance(made, type):
        raise ConfigError(
            f"{owner} is {said!r:.80}; it must have the `kind` of a class of {module.__name__}"
        )
    return _constructed(owner, made, {key: value for key, value in said.items() if key != "kind"})


def _keys(*kinds: type) -> list[str]:
    return [key for kind in kinds for key in inspect.signature(kind).parameters if key != "name"]


def _refuse_unknown(owner: str, said: Mapping[str, Any], known: Iterable[str]) -> None:
    known = list(dict.fromkeys(known))
    for key in said:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"is {near[0]!r} meant?" if near else f"it may have {', '.join(known)}"
            raise ConfigError(f"{owner} has the unknown key {key!r}; {hint}")


def _constructed(owner: str, kind: type[T], given: Mapping[str, Any]) -> T:
    try:
        return kind(**given)
    except UsageError:
        raise
    except TypeError as error:
        raise ConfigError(f"{owner}: {error}") from None


@checked
def find_features(said: str) -> FeatureSet:
    """The feature set that `said` names.

    Args:
        said: The path of a TOML or JSON file, or MODULE:NAME of a FeatureSet in a module, which may lie in
            the present folder. The module is imported.

    Raises:
        ConfigError: There is none; the error quotes `said`.
    """
    in_module = ":" in said and not os.path.exists(said)
    found = _imported(said) if in_module else load_features(said)
    for table in found.tables.values():
        if table.optimizer is not None:
            check_outside(f"table {table.name!r}", table.optimizer)
    return found


def _imported(said: str) -> FeatureSet:
    found = find_object(
        said, "features", "name a TOML or JSON file, or MODULE:NAME of a FeatureSet"
    )
    if not isinstance(found, FeatureSet):
        raise ConfigError(f"the features {said!r} are {found!r:.80}; they must be a FeatureSet")
    return found
