"""Conversion of a raw batch to the values of each feature in their declared types.

Training, prediction and serving all use `by_feature`, so a value means the same in each. The features'
transforms come after it, in applying_transforms.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from psfleet.core.base.errors import ShapeError, UsageError
from psfleet.data.feature_sets.jagged import Jagged, as_jagged
from psfleet.data.feature_sets.value_types import Kind, as_typed, typed

if TYPE_CHECKING:
    from psfleet.data.feature_sets.feature_set import Feature, FeatureSet, Input, Number


def by_feature(features: FeatureSet, batch: Any) -> tuple[dict[str, Any], int]:
    """Return the values of each feature of a batch in their declared types, and the number of samples.

        values, samples = by_feature(features, {"user": [17, 42], "item": [[3, 5], [8]]})

    Args:
        batch: One of: a mapping from names of features or of their columns to values, in a form that
            `as_jagged` takes; a data frame of pandas or Polars, or an Arrow table; an object with a method
            `to_dict` that returns a mapping, such as TorchRec's KeyedJaggedTensor. A feature that is
            missing in the batch, or None, has no ids in any sample.

    Raises:
        UsageError: The batch has a name that the set lacks, no name of the set, or two names for one feature.
        IdError: A value does not have the declared type.
        ShapeError: The features have different numbers of samples.
    """
    columns = columns_of(batch)
    values = {}
    for name, (ids, weights) in _sources(features, columns).items():
        if columns[ids] is not None:
            factors = None if weights is None else columns[weights]
            values[name] = _values(features.given[name], columns[ids], factors)
    if not values:
        raise UsageError("the batch has no feature, so its number of samples is unknown")
    counts = {name: len(value) for name, value in values.items()}
    first, samples = next(iter(counts.items()))
    for name, count in counts.items():
        if count != samples:
            raise ShapeError(
                f"feature {name!r} has {count} samples and feature {first!r} has {samples}; a batch has as "
                "many of each"
            )
    return values, samples


def columns_of(batch: Any) -> Mapping[str, Any]:
    """Return the columns of a batch by name. The batch may have any form that `by_feature` takes.

    Raises:
        UsageError: The object is not a batch, or two columns have the same name.
    """
    if isinstance(batch, Mapping):
        return batch
    if hasattr(batch, "column_names"):  # an Arrow table
        names, column = list(batch.column_names), batch.column
    elif hasattr(batch, "columns") and hasattr(batch, "shape"):  # a data frame
        names, column = list(batch.columns), batch.__getitem__
    else:
        columns = batch.to_dict() if callable(getattr(batch, "to_dict", None)) else batch
        if isinstance(columns, Mapping):
            return columns
        raise UsageError(
            f"a batch of features is {columns!r:.80}; it must be a mapping from their names to their ids"
        )
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"the batch has several columns {name!r}; rename all but one")
    return {name: column(name) for name in names}


def _sources(features: FeatureSet, columns: Mapping[str, Any]) -> dict[str, tuple[str, str | None]]:
    """Map each feature that a batch has to a pair: the names of the columns with its values and its weights.

    The second is None if the batch has no weights for the feature.
    """
    sources: dict[str, tuple[str, str | None]] = {}
    used: set[str | None] = set()
    for name, feature in features.given.items():
        key = name if name in columns else feature.columns[0]
        if key not in columns:
            continue
        # A column may have the name of another feature. Then the batch's `key` could mean either of the two.
        namesake = features.given.get(key, feature)
        if key not in (name, namesake.columns[0]):
            raise UsageError(
                f"the batch has {key!r}, which is the name of one feature and the column of {name!r}; give "
                f"{name!r} under its own name, or None"
            )
        weights = feature.columns[1] if feature.weighted else None
        sources[name] = key, weights if weights in columns else None
        used.update(sources[name])
    for key in columns:
        if key not in used:
            raise _unknown(features, key)
    return sources


def _unknown(features: FeatureSet, name: str) -> UsageError:
    if name in features.features and name not in features.given:
        inputs = ", ".join(features.features[name].inputs)
        return UsageError(
            f"the batch has the feature {name!r}, which is made of {inputs}; leave it out"
        )
    for given_name, feature in features.given.items():
        if name == feature.columns[0]:
            return UsageError(
                f"the batch has {given_name!r} under its name and under its column {name!r}; leave one out"
            )
        if name in feature.columns:
            return UsageError(
                f"the batch has the weights {name!r} and no {given_name!r}; give both"
            )
    names = ", ".join(features.given) or "none"
    return UsageError(f"the batch has the feature {name!r}; the set has {names}")


def kind_of(feature: Feature | Number | Input) -> Kind:
    """Return the kind of a feature's values, which decides how `typed` judges them."""
    usual: Kind = "key" if feature.hashed else "id" if feature.jagged else "float"
    return feature.value_type or usual


def _values(feature: Feature | Number | Input, value: Any, weights: Any = None) -> Any:
    owner = f"feature {feature.name!r}"
    if not feature.jagged:
        return _numbers(feature, owner, value)
    bags = as_jagged(feature.name, value)
    if weights is not None:
        bags = _weighted(owner, bags, as_jagged(feature.columns[1], weights))
    if bags.weights is not None and not (finite := np.isfinite(bags.weights)).all():
        bad = int(np.argmin(finite))
        raise UsageError(
            f"{owner} has the weight {bags.weights[bad]} in sample {bags.rows[bad]}; it must be a finite "
            "number"
        )
    return as_typed(owner, bags, kind_of(feature))


def _weighted(owner: str, bags: Jagged, weights: Jagged) -> Jagged:
    """Add weights, which the batch has in a separate column, to the values of a feature."""
    if bags.weights is not None or not np.array_equal(bags.lengths, weights.lengths):
        raise ShapeError(
            f"{owner} has {bags.lengths.tolist()!r:.60} values and {weights.lengths.tolist()!r:.60} weights "
            "in its samples; give each value one weight"
        )
    numbers = as_typed(f"the weights of {owner}", weights, "float").values
    if len(numbers) < len(bags.values):
        raise ShapeError(f"{owner} has a weight that is missing; give each value a finite number")
    return Jagged(bags.values, bags.lengths, weights=numbers)


def _numbers(feature: Any, owner: str, value: Any) -> Any:
    """Return the values of a Number without dtype and transforms, with NaN for missing values."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.ndim:
        return value
    bags = as_jagged(feature.name, value)
    numbers, missing, bad = typed(bags.values, "float")
    if bad.any():
        as_typed(owner, bags, "float")
    numbers[missing] = np.nan
    width = int(bags.lengths[0]) if len(bags) else feature.dim
    if width and (bags.lengths == width).all():
        return numbers.reshape(len(bags), width)
    return feature.of(bags.with_values(numbers), len(bags))


def no_samples(features: FeatureSet) -> dict[str, Any]:
    """Return a batch with all features of the set, but without samples."""
    return {name: missing_values(feature, 0) for name, feature in features.given.items()}


def missing_values(feature: Feature | Number | Input, samples: int) -> Any:
    """Return the values of a feature that a batch lacks: no ids in any sample, or the declared default."""
    if not feature.jagged:
        return feature.of(None, samples)  # type: ignore[union-attr]
    kinds = {"text": object, "float": np.float32}
    values = np.empty(0, kinds.get(feature.value_type or "", np.int64))
    return Jagged(values, np.zeros(samples, np.int64))
