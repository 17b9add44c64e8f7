"""Features of a model: the public names to declare them, and TOML files that describe them.

docs/features.md is the guide. A feature set in Python:

    users = Table("users", dim=16, optimizer=psfleet.optimizer.Adagrad(0.05))
    features = FeatureSet([
        Feature("user", users),
        Feature("friends", users, pooling="mean", last=50),
        Number("age", default=-1.0),
    ])

A feature set in a TOML file, which `load_features` reads:

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

Under `features`, an entry with a table is a Feature, and an entry without a table is a Number. Each entry
under `inputs` is an Input. The keys are the arguments of these classes in Python.
"""

import difflib
import functools
import inspect
import operator
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from psfleet import initializer, optimizer
from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.files import read_toml
from psfleet.core.base.settings.kinds import find_object
from psfleet.core.base.validation.annotations import checked
from psfleet.core.engine.schema import entry
from psfleet.data.feature_sets.feature_document import read_features, transform_of
from psfleet.data.feature_sets.feature_lookup import FeatureLookup, feed
from psfleet.data.feature_sets.feature_set import Feature, FeatureSet, Input, Number, Table
from psfleet.data.feature_sets.jagged import Jagged
from psfleet.data.feature_sets.transforms.cross import Cross
from psfleet.data.feature_sets.transforms.lists import (
    FillMissing,
    Match,
    Overlap,
    Pad,
    Truncate,
    WeightedValues,
)
from psfleet.data.feature_sets.transforms.maps import Lookup, MapLookup
from psfleet.data.feature_sets.transforms.number_transforms import (
    Bucketize,
    Clip,
    Log1p,
    MinMax,
    Normalize,
    Quantiles,
)
from psfleet.data.feature_sets.transforms.texts import Lowercase, NGrams, Split
from psfleet.data.feature_sets.transforms.transform import Transform
from psfleet.data.feature_sets.transforms.vocabulary import Vocabulary
from psfleet.data.feature_sets.value_types import hashed
from psfleet.optimizer.optimizer import check_outside

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
    """Read a feature set from a TOML file, or from a `.json` file that `FeatureSet.save` has written.

        features = psfleet.features.load_features("features.toml")

    Raises:
        ConfigError: The file cannot be read, or has a wrong key or value. The message names the file and
            the key.
    """
    name, document = os.fspath(path), None
    if not name.endswith(".json"):
        document = read_toml(path, name)
    try:
        return _features(read_features(Path(path)) if document is None else document)
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from None
    except UsageError as error:
        raise ConfigError(f"{name}: {error}") from None


def _features(document: Mapping[str, Any]) -> FeatureSet:
    unknown = sorted(document.keys() - {"tables", "inputs", "features"})
    if unknown:
        raise ConfigError(
            f"[{unknown[0]}] is unknown; use [tables.NAME], [inputs.NAME] and [features.NAME]"
        )
    tables = {name: _table(name, part) for name, part in _parts(document, "tables")}
    inputs = [_input(name, part) for name, part in _parts(document, "inputs")]
    features = [_feature(name, part, tables) for name, part in _parts(document, "features")]
    return FeatureSet([*inputs, *features])


def _parts(document: Mapping[str, Any], kind: str) -> list[tuple[str, dict[str, Any]]]:
    parts = document.get(kind, {})
    for name, part in parts.items() if isinstance(parts, dict) else [(kind, parts)]:
        if not isinstance(part, dict):
            raise ConfigError(f"{kind} has {name} = {part!r:.60}; it must be a table [{kind}.NAME]")
    return list(parts.items())


def _table(name: str, fields: dict[str, Any]) -> Table:
    owner, arguments = f"table {name!r}", dict(fields)
    _refuse_unknown(owner, fields, _keys(Table))
    if "optimizer" in arguments:
        arguments["optimizer"] = _made(
            f"the optimizer of {owner}", arguments["optimizer"], optimizer
        )
    if "initializer" in arguments:
        arguments["initializer"] = _made(
            f"the initializer of {owner}", arguments["initializer"], initializer
        )
    if "entry" in arguments:
        # A list in the file is what `A & B` is in Python: an entry with the rules of all its parts.
        parts = arguments["entry"] if isinstance(arguments["entry"], list) else [arguments["entry"]]
        entries = [_entry(f"the entry of {owner}", part) for part in parts]
        arguments["entry"] = functools.reduce(operator.and_, entries) if entries else None
    return _constructed(owner, Table, {"name": name, **arguments})


def _input(name: str, fields: dict[str, Any]) -> Input:
    owner = f"input {name!r}"
    _refuse_unknown(owner, fields, _keys(Input))
    return _constructed(owner, Input, {"name": name, **_with_transforms(owner, fields)})


def _with_transforms(owner: str, fields: dict[str, Any]) -> dict[str, Any]:
    if "transform" not in fields:
        return fields
    transform = fields["transform"]
    parts = transform if isinstance(transform, list) else [transform]
    return {**fields, "transform": [transform_of(owner, part) for part in parts]}


def _feature(name: str, fields: dict[str, Any], tables: Mapping[str, Table]) -> Feature | Number:
    owner = f"feature {name!r}"
    _refuse_unknown(owner, fields, _keys(Feature) if "table" in fields else _keys(Number, Feature))
    fields = _with_transforms(owner, fields)
    if "table" not in fields:
        return _constructed(owner, Number, {"name": name, **fields})
    if fields["table"] not in tables:
        names = ", ".join(tables) or "none"
        raise ConfigError(f"{owner}: table is {fields['table']!r}; the file has {names}")
    return _constructed(owner, Feature, {"name": name, **fields, "table": tables[fields["table"]]})


def _entry(owner: str, part: Any) -> Any:
    """Make one rule of a table's `entry`. Its policy may be a class of psfleet.core.engine.schema.entry."""
    if isinstance(part, dict) and isinstance(part.get("policy"), dict):
        part = {**part, "policy": _made(f"the policy in {owner}", part["policy"], entry)}
    return _made(owner, part, entry)


def _made(owner: str, fields: Any, module: ModuleType) -> Any:
    """Make the object that a mapping `{ kind = NAME, ... }` describes.

    NAME is a class in `module`. The other keys are arguments of the class.
    """
    kind = fields.get("kind") if isinstance(fields, dict) else None
    cls: Any = getattr(module, str(kind)) if kind in module.__all__ else None
    if not isinstance(cls, type):
        raise ConfigError(
            f"{owner} is {fields!r:.80}; it must have the `kind` of a class of {module.__name__}"
        )
    return _constructed(owner, cls, {key: value for key, value in fields.items() if key != "kind"})


def _keys(*kinds: type) -> list[str]:
    return [key for kind in kinds for key in inspect.signature(kind).parameters if key != "name"]


def _refuse_unknown(owner: str, fields: Mapping[str, Any], names: Iterable[str]) -> None:
    names = list(dict.fromkeys(names))
    for key in fields:
        if key not in names:
            near = difflib.get_close_matches(key, names, 1)
            hint = f"is {near[0]!r} meant?" if near else f"it may have {', '.join(names)}"
            raise ConfigError(f"{owner} has the unknown key {key!r}; {hint}")


def _constructed(owner: str, kind: type[T], arguments: Mapping[str, Any]) -> T:
    try:
        return kind(**arguments)
    except UsageError:
        raise
    except TypeError as error:
        raise ConfigError(f"{owner}: {error}") from None


@checked
def find_features(said: str) -> FeatureSet:
    """Return the feature set that a command's option names.

    Args:
        said: Path of a TOML or JSON file, or MODULE:NAME of a FeatureSet. The module may be in the current
            folder, and is imported.

    Raises:
        ConfigError: There is no feature set of this name. The message quotes the name.
    """
    in_module = ":" in said and not os.path.exists(said)
    features = _imported(said) if in_module else load_features(said)
    for table in features.tables.values():
        if table.optimizer is not None:
            check_outside(f"table {table.name!r}", table.optimizer)
    return features


def _imported(name: str) -> FeatureSet:
    value = find_object(
        name, "features", "name a TOML or JSON file, or MODULE:NAME of a FeatureSet"
    )
    if not isinstance(value, FeatureSet):
        raise ConfigError(f"the features {name!r} are {value!r:.80}; they must be a FeatureSet")
    return value
