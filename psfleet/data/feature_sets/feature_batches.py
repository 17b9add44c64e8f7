"""Batches of features: their values in declared types, what transforms make of them, and the first pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from psfleet.core.base.errors import ShapeError, UsageError
from psfleet.data.feature_sets.jagged import Jagged, as_jagged, as_plain
from psfleet.data.feature_sets.transforms.transform import FittedTransform
from psfleet.data.feature_sets.value_types import as_typed

if TYPE_CHECKING:
    from psfleet.data.feature_sets.feature_set import Feature, FeatureSet, Input, Number


def by_feature(features: FeatureSet, batch: Any) -> tuple[dict[str, Any], int]:
    """Return a batch's values by feature, in their declared types, and its number of samples.

    Args:
        features: The set.
        batch: A mapping from names to what `as_jagged` takes, or for a Number an array; or an object with
            a method `to_dict` that gives one, as TorchRec's KeyedJaggedTensor. A feature that is missing,
            or None, has no ids in any sample.

    Raises:
        UsageError: It names a feature that is not in the set, or none of the set's.
        IdError: A value is not of the declared type.
        ShapeError: The features have different numbers of samples.
    """
    columns = batch.to_dict() if callable(getattr(batch, "to_dict", None)) else batch
    if not isinstance(columns, Mapping):
        raise UsageError(
            f"a batch of features is {columns!r:.80}; it must be a mapping from their names to their ids"
        )
    for name in columns:
        if name not in features.given:
            raise _unknown(features, name)
    values = {
        name: _values(features.given[name], value)
        for name, value in columns.items()
        if value is not None
    }
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


def _unknown(features: FeatureSet, name: str) -> UsageError:
    if name in features.features:
        inputs = ", ".join(features.features[name].inputs)
        return UsageError(
            f"the batch has the feature {name!r}, which is made of {inputs}; leave it out"
        )
    names = ", ".join(features.given) or "none"
    return UsageError(f"the batch has the feature {name!r}; the set has {names}")


def _values(feature: Feature | Number | Input, value: Any) -> Any:
    if not feature.jagged:
        return as_plain(value)
    bags = as_jagged(feature.name, value)
    dtype = feature.value_type
    return bags if dtype is None else as_typed(f"feature {feature.name!r}", bags, dtype)


def no_samples(features: FeatureSet) -> dict[str, Any]:
    """A batch without samples."""
    return {name: _nothing(each, 0) for name, each in features.given.items()}


def _nothing(feature: Feature | Number | Input, samples: int) -> Any:
    """The values of a feature that a batch lacks."""
    if not feature.jagged:
        return feature.of(None, samples)  # type: ignore[union-attr]
    kinds = {"text": object, "float": np.float32}
    values = np.empty(0, kinds.get(feature.value_type or "", np.int64))
    return Jagged(values, np.zeros(samples, np.int64))


def transformed(
    features: FeatureSet, batch: Mapping[str, Any], samples: int, fits: bool = False
) -> Mapping[str, Any]:
    """The values of a batch behind the transforms, those of features with inputs too.

    Args:
        features: The set.
        batch: Values as `by_feature` returns them.
        samples: Number of samples.
        fits: Show the values to the transforms that are to be fitted, and leave out what comes behind them.

    Raises:
        UsageError: A transform cannot take a value; the error names the feature and quotes the value.
    """
    if not features.transformed:
        return batch
    values = dict(batch)
    for name, feature in features.transformed.items():
        sources = feature.inputs or (name,)
        if fits and any(source in values and values[source] is None for source in sources):
            values[name] = None
            continue
        bags = [_bags(features, source, values, samples) for source in sources]
        try:
            values[name] = _through(feature, bags, fits)
        except UsageError as error:
            raise type(error)(f"feature {name!r}: {error}") from None
    return values


def _bags(features: FeatureSet, name: str, values: Mapping[str, Any], samples: int) -> Jagged:
    value = values.get(name)
    if value is None:
        value = _nothing(features.given[name], samples)
    return as_jagged(name, value)


def _through(feature: Feature | Number | Input, bags: list[Jagged], fits: bool) -> Jagged | None:
    """The values of a feature behind its transforms; None: one is to be fitted first."""
    for each in feature.transform:
        if fits and isinstance(each, FittedTransform) and not each.fitted:
            each.observe(*bags)
            return None
        bags = [each(*bags)]
    return bags[0]


def fit(features: FeatureSet, batches: Iterable[Any]) -> None:
    """Fit the transforms that need it, see `FeatureSet.fit`."""
    passes = 0
    while pending := _pending(features):
        has_batch = False
        for _, each in pending:
            each.begin()
        for batch in batches:
            values, samples = by_feature(features, getattr(batch, "features", batch))
            transformed(features, values, samples, fits=True)
            has_batch = True
        if not has_batch:
            what = (
                f"ended after pass {passes}, and one more is needed" if passes else "have no batch"
            )
            raise UsageError(
                f"the batches {what} to fit {pending[0][1]!r} of feature {pending[0][0]!r}; give a list, or "
                "files, which begin anew"
            )
        passes += 1
        for name, each in pending:
            try:
                each.finish()
            except UsageError as error:
                raise type(error)(f"feature {name!r}: {error}") from None


def _pending(features: FeatureSet) -> list[tuple[str, FittedTransform]]:
    """The first transform of each feature that is to be fitted, of those whose inputs are fitted."""
    first_of: dict[str, FittedTransform] = {}
    waiting: set[str] = set()
    for name, feature in features.transformed.items():
        to_fit = [t for t in feature.transform if isinstance(t, FittedTransform) and not t.fitted]
        if waiting.isdisjoint(feature.inputs) and to_fit:
            first_of[name] = to_fit[0]
        if to_fit or not waiting.isdisjoint(feature.inputs):
            waiting.add(name)
    return list({id(each): (name, each) for name, each in first_of.items()}.values())
