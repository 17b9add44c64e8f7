"""Feature sets as JSON: the declarations, and the statistics and vocabularies of their transforms.

    {"format": "feature set", "version": 1,
     "tables": {"users": {"dim": 16}},
     "inputs": {},
     "features": {"price": {"table": "users", "transform": [{"kind": "Quantiles", "count": 10, ...}]}}}

The keys are those of the TOML files in psfleet/features.py. Fields of tables that only training needs are
left out. Features are in the order of the set.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psfleet.core.base.errors import ConfigError, UsageError
from psfleet.core.base.files import reason, replace
from psfleet.core.base.json_documents import Format, exact, reading
from psfleet.data.feature_sets.transforms import (
    cross,
    lists,
    maps,
    number_transforms,
    texts,
    vocabulary,
)
from psfleet.data.feature_sets.transforms.transform import FittedTransform, Function, Transform

if TYPE_CHECKING:
    from psfleet.data.feature_sets.feature_set import FeatureSet

FORMAT = Format("feature set")
_TRAINING = ("optimizer", "initializer", "entry")  # fields of a table that the document leaves out

TRANSFORMS: dict[str, type[Transform]] = {
    "Bucketize": number_transforms.Bucketize,
    "Quantiles": number_transforms.Quantiles,
    "Cross": cross.Cross,
    "Match": lists.Match,
    "Overlap": lists.Overlap,
    "Truncate": lists.Truncate,
    "Pad": lists.Pad,
    "FillMissing": lists.FillMissing,
    "WeightedValues": lists.WeightedValues,
    "Lookup": maps.Lookup,
    "MapLookup": maps.MapLookup,
    "Log1p": number_transforms.Log1p,
    "Clip": number_transforms.Clip,
    "Normalize": number_transforms.Normalize,
    "MinMax": number_transforms.MinMax,
    "Lowercase": texts.Lowercase,
    "Split": texts.Split,
    "NGrams": texts.NGrams,
    "Vocabulary": vocabulary.Vocabulary,
}
"""Class of each transform by its name in files. The names are listed here, so that renaming a class does
not change the files.
"""
_NAMES = {kind: name for name, kind in TRANSFORMS.items()}


def write_features(features: "FeatureSet", where: Path) -> None:
    """Write a feature set as JSON. `read_features` reads the file.

    Raises:
        UsageError: A transform is not fitted, or the file cannot be written.
    """
    text = json.dumps(FORMAT.document(**document_of(features)), indent=1)
    try:
        replace(where, lambda draft: draft.write_text(text, "utf-8"))
    except OSError as error:
        raise UsageError(
            f"the features {str(where)!r} cannot be written: {reason(error)}"
        ) from None


def document_of(features: "FeatureSet") -> dict[str, Any]:
    """Return the set as a document for JSON, with the same keys as a TOML file."""
    tables = {
        name: {key: value for key, value in _changed(table) if key not in _TRAINING}
        for name, table in features.tables.items()
    }
    parts: dict[str, dict[str, Any]] = {"tables": tables, "inputs": {}, "features": {}}
    for declaration in features.members:
        name = declaration.name
        kind = "features" if name in features.features else "inputs"
        member = dict(_changed(declaration))
        if "table" in member:
            member["table"] = declaration.table.name  # type: ignore[union-attr]
        if "transform" in member:
            member["transform"] = [_transform(name, part) for part in declaration.transform]
        parts[kind][name] = member
    parts["features"] = {name: parts["features"][name] for name in features.features}
    return parts


def _changed(item: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each field of a dataclass that differs from its default, except `name`."""
    for field in dataclasses.fields(item):
        value = getattr(item, field.name)
        if field.init and field.name != "name" and value != field.default:
            yield field.name, list(value) if isinstance(value, tuple) else value


def _transform(name: str, transform: Transform) -> dict[str, Any]:
    kind = _NAMES.get(type(transform))
    if kind is None:  # a user's transform, which has no name in files
        type_name = (
            transform.name if isinstance(transform, Function) else type(transform).__qualname__
        )
        return {"kind": "Function", "name": type_name}
    if isinstance(transform, FittedTransform):
        try:
            transform.check_fitted()
        except UsageError as error:
            raise UsageError(f"feature {name!r}: {error}") from None
    return {"kind": kind, **dict(_changed(transform))}


def transform_of(owner: str, document: Any) -> Transform:
    """Make a transform from `{ kind = NAME, ... }` in a file.

    Raises:
        ConfigError: No transform has this name, or the transform does not have these arguments.
    """
    kind = document.get("kind") if isinstance(document, dict) else None
    if kind == "Function":
        raise ConfigError(
            f"{owner} has the function {document.get('name')!r}, which no file holds; name the set as "
            "MODULE:NAME in place of the file"
        )
    transform = TRANSFORMS.get(kind) if isinstance(kind, str) else None
    if transform is None:
        raise ConfigError(
            f"{owner} has the transform {document!r:.80}; its `kind` must be one of "
            f"{', '.join(sorted(TRANSFORMS))}"
        )
    try:
        return transform(**{key: value for key, value in document.items() if key != "kind"})
    except TypeError as error:
        raise ConfigError(f"{owner}, transform {kind}: {error}") from None


def read_features(where: Path) -> dict[str, Any]:
    """Read a file of `write_features`, and return its content in the form of a parsed TOML file.

    Raises:
        ConfigError: The file is damaged or has another format.
    """
    with reading(where, ConfigError):
        content = FORMAT.parse(where.read_bytes())
        exact(content, FORMAT.name, tables=dict, inputs=dict, features=dict)
    return content


def read_statistics(features: "FeatureSet", where: Path) -> None:
    """Read statistics and vocabularies from a file of `write_features`, and store them in the set's
    transforms.

    Raises:
        ConfigError: The file is damaged, or its transforms differ from those of the set.
    """
    try:
        document = read_features(where)
    except FileNotFoundError:
        raise ConfigError(
            f"the features {str(where)!r} do not exist; save(path) of a fitted feature set writes them"
        ) from None
    members = {**document["inputs"], **document["features"]}
    for name, feature in features.transformed.items():
        parts = members.get(name, {}).get("transform", [])
        for index, transform in enumerate(feature.transform):
            if isinstance(transform, FittedTransform):
                owner = f"{str(where)!r}: feature {name!r}"
                part = parts[index] if index < len(parts) else None
                _take(owner, transform, transform_of(owner, part))


def _take(owner: str, target: FittedTransform, source: Transform) -> None:
    """Copy from `source` the fields that `target` lacks. Fields that both have must be equal."""
    if type(source) is not type(target):
        raise ConfigError(
            f"{owner} has {source!r:.80}, and the set has {target!r:.80}; fit it again"
        )
    for field in dataclasses.fields(target):
        value = getattr(target, field.name)
        source_value = getattr(source, field.name)
        if field.init and value is not None and value != source_value:
            raise ConfigError(
                f"{owner} has {field.name} {source_value!r:.80}, and the set has {value!r:.80}; fit it again"
            )
    for field in dataclasses.fields(target):
        if field.init:
            setattr(target, field.name, getattr(source, field.name))
