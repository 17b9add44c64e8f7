"""Applying the transforms of a feature set to a batch, and fitting those that need statistics.

Training, prediction and serving all call `transformed`, so a transformed value means the same in each.
Nothing here keeps state, except that `fit` stores statistics in the transforms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from psfleet.core.base.errors import UsageError
from psfleet.data.feature_sets.feature_values import by_feature, missing_values
from psfleet.data.feature_sets.jagged import Jagged, as_jagged
from psfleet.data.feature_sets.transforms.transform import FittedTransform

if TYPE_CHECKING:
    from psfleet.data.feature_sets.feature_set import Feature, FeatureSet, Input, Number


def transformed(
    features: FeatureSet,
    batch: Mapping[str, Any],
    samples: int,
    fits: bool = False,
    observes: bool = True,
) -> Mapping[str, Any]:
    """Apply all transforms of a feature set to a batch, including transforms that take other features as
    inputs.

    Args:
        batch: Values as `by_feature` returns them.
        fits: True in a pass that fits transforms. A transform that is not fitted yet gets the values in
            `observe`, and the feature then has no value.
        observes: False to skip the call of `observe` in such a pass.

    Raises:
        UsageError: A transform cannot take a value. The message names the feature and quotes the value.
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
            values[name] = _through(feature, bags, fits, observes)
        except UsageError as error:
            raise type(error)(f"feature {name!r}: {error}") from None
    return values


def _bags(features: FeatureSet, name: str, values: Mapping[str, Any], samples: int) -> Jagged:
    value = values.get(name)
    if value is None:
        value = missing_values(features.given[name], samples)
    return as_jagged(name, value)


def _through(
    feature: Feature | Number | Input, bags: list[Jagged], fits: bool, observes: bool
) -> Jagged | None:
    """Apply a feature's transforms. Returns None if a transform must be fitted first."""
    for transform in feature.transform:
        if fits and isinstance(transform, FittedTransform) and not transform.fitted:
            if observes:
                transform.observe(*bags)
            return None
        bags = [transform(*bags)]
    return bags[0]


def fit(features: FeatureSet, batches: Iterable[Any]) -> None:
    """Fit the transforms that have no statistics yet, for `FeatureSet.fit`."""
    passes = 0
    while pending := _pending(features):
        has_batch = False
        for _, transform in pending:
            transform.begin()
        for batch in batches:
            values, samples = by_feature(features, getattr(batch, "features", batch))
            transformed(features, values, samples, fits=True)
            has_batch = True
        if not has_batch:
            fault = (
                f"ended after pass {passes}, and one more is needed" if passes else "have no batch"
            )
            raise UsageError(
                f"the batches {fault} to fit {pending[0][1]!r} of feature {pending[0][0]!r}; give a list, or "
                "files, which begin again"
            )
        passes += 1
        for name, transform in pending:
            try:
                transform.finish()
            except UsageError as error:
                raise type(error)(f"feature {name!r}: {error}") from None


def _pending(features: FeatureSet) -> list[tuple[str, FittedTransform]]:
    """Return each feature's first transform that is not fitted, if the feature's inputs are fitted."""
    first_of: dict[str, FittedTransform] = {}
    waiting: set[str] = set()
    for name, feature in features.transformed.items():
        to_fit = [t for t in feature.transform if isinstance(t, FittedTransform) and not t.fitted]
        if waiting.isdisjoint(feature.inputs) and to_fit:
            first_of[name] = to_fit[0]
        if to_fit or not waiting.isdisjoint(feature.inputs):
            waiting.add(name)
    return list({id(transform): (name, transform) for name, transform in first_of.items()}.values())
