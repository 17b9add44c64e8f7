"""Batches of features: their values in declared types, what transforms make of them, and the first pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from psfleet.errors import ShapeError, UsageError
from psfleet.feature_sets.jagged import Jagged, as_jagged, as_plain
from psfleet.feature_sets.transforms.transform import FittedTransform
from psfleet.feature_sets.value_types import as_typed

if TYPE_CHECKING:
    from psfleet.feature_sets.feature_set import Feature, FeatureSet, Input, Number


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
    given = batch.to_dict() if callable(getattr(batch, "to_dict", None)) else batch
    if not isinstance(given, Mapping):
        raise UsageError(
            f"a batch of features is {given!r:.80}; it must be a mapping from their names to their ids"
        )
    for name in given:
        if name not in features.given:
            raise _unknown(features, name)
    found = {
        name: _values(features.given[name], value)
        for name, value in given.items()
        if value is not None
    }
    if not found:
        raise UsageError("the batch has no feature, so its number of samples is unknown")
    counts = {name: len(value) for name, value in found.items()}
    first, samples = next(iter(counts.items()))
    for name, count in counts.items():
        if count != samples:
            raise ShapeError(
                f"feature {name!r} has {count} samples and feature {first!r} has {samples}; a batch has as "
                "many of each"
            )
    return found, samples


def _unknown(features: FeatureSet, name: str) -> UsageError:
    if name in features.features:
        inputs = ", ".join(features.features[name].inputs)
        return UsageError(
            f"the batch has the feature {name!r}, which is made of {inputs}; leave it out"
        )
    known = ", ".join(features.given) or "none"
    return UsageError(f"the batch has the feature {name!r}; the set has {known}")


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
    features: FeatureSet, given: Mapping[str, Any], samples: int, fits: bool = False
) -> Mapping[str, Any]:
    """The values of a batch behind the transforms, those of features with inputs too.

    Args:
        features: The set.
        given: Values as `by_feature` returns them.
        samples: Number of samples.
        fits: Show the values to the transforms that are to be fitted, and leave out what comes behind them.

    Raises:
        UsageError: A transform cannot take a value; the error names the feature and quotes the value.
    """
    if not features.transformed:
        return given
    found = dict(given)
    for name, feature in features.transformed.items():
        sources = feature.inputs or (name,)
        if fits and any(source in found and found[source] is None for source in sources):
            found[name] = None
            continue
        bags = [_bags(features, source, found, samples) for source in sources]
        try:
            found[name] = _through(feature, bags, fits)
        except UsageError as error:
            raise type(error)(f"feature {name!r}: {error}") from None
    return found


def _bags(features: FeatureSet, name: str, found: Mapping[str, Any], samples: int) -> Jagged:
    value = found.get(name)
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
        seen = False
        for _, each in pending:
            each.begin()
        for batch in batches:
            given, samples = by_feature(features, getattr(batch, "features", batch))
            transformed(features, given, samples, fits=True)
            seen = True
        if not seen:
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
    found: dict[str, FittedTransform] = {}
    waiting: set[str] = set()
    for name, feature in features.transformed.items():
        unfitted = [t for t in feature.transform if isinstance(t, FittedTransform) and not t.fitted]
        if waiting.isdisjoint(feature.inputs) and unfitted:
            found[name] = unfitted[0]
        if unfitted or not waiting.isdisjoint(feature.inputs):
            waiting.add(name)
    return list({id(each): (name, each) for name, each in found.items()}.values())
