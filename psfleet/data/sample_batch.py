"""SampleBatch, the batch that every data source yields, and conversion of single samples to such a batch.

Files are read by column (`arrow_conversion.py`). Messages, such as JSON from Kafka, come as one mapping for
each sample. `sample_of` checks one mapping, and `batch_of` joins checked mappings to a batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from psfleet.data.feature_sets.feature_set import Feature, FeatureSet, Input, Number
from psfleet.data.feature_sets.feature_values import kind_of, no_samples
from psfleet.data.feature_sets.jagged import Jagged, array_of, as_plain, joined
from psfleet.data.feature_sets.value_types import Kind, as_typed, is_missing, is_of, typed


@dataclass(frozen=True)
class SampleBatch:
    """Samples of one step, as values of each feature and each label.

        loss = loss_fn(embed(batch.features), batch.labels["click"])

    Attributes:
        features: Values of each feature, by its name: a Jagged (any number of values for each sample), or
            float32 [n, dim] for a Number. `FeatureLookup`, `psfleet.features.feed` and `FeatureEmbedding`
            take them in this form.
        labels: Values of each label column, by its name, float32 [n].
    """

    features: dict[str, Any]
    labels: dict[str, NDArray[np.float32]]

    def __len__(self) -> int:
        return len(next(iter((self.labels or self.features).values())))


def chosen_columns(columns: Mapping[str, Any], rows: Any) -> dict[str, Any]:
    """Return some samples of each column: those that a slice, a mask or indices select."""
    return {name: values[rows] for name, values in columns.items()}


def joined_columns(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join several parts column by column. A single part is returned without copying."""
    return {name: _joined([part[name] for part in parts]) for name in parts[0]}


def _joined(parts: Sequence[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    return joined(parts) if isinstance(parts[0], Jagged) else np.concatenate(parts)


def sample_of(features: FeatureSet, labels: Sequence[str], values: Any) -> dict[str, list[Any]]:
    """Check one sample, and return its values in each column as a list.

    Args:
        labels: Columns with the labels. Each must have exactly one number.
        values: Value of each column: a single value, a list or array of values, or None for a missing value.

    Raises:
        ValueError: `values` is no mapping, or has a value that cannot be used. The message names the column.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"it is a {type(values).__name__}, not an object with columns")
    sample: dict[str, list[Any]] = {}
    for feature in features.given.values():
        column = feature.columns[0]
        ids = sample[column] = _listed(column, values.get(column), kind_of(feature))
        if isinstance(feature, Number) and not feature.jagged and len(ids) not in (0, feature.dim):
            raise ValueError(f"{column} is {values[column]!r:.80}")
        for weights in feature.columns[1:]:
            sample[weights] = _listed(weights, values.get(weights), "float")
            if len(sample[weights]) != len(ids) or any(map(is_missing, sample[weights])):
                raise ValueError(f"{weights} is {values.get(weights)!r:.80} for {len(ids)} ids")
    for label in labels:
        sample[label] = _listed(label, values.get(label), "float")
        if len(sample[label]) != 1 or is_missing(sample[label][0]):
            raise ValueError(f"{label} is {values.get(label)!r:.80}")
    return sample


def _listed(column: str, value: Any, kind: Kind) -> list[Any]:
    """Return one or more values of a column as a list.

    Raises:
        ValueError: A value is neither missing nor of the given kind.
    """
    if isinstance(value, list | tuple):
        members = list(value)
    elif isinstance(value, str | bytes | int | float | None):
        members = [] if is_missing(value) else [value]
    else:  # an array or tensor, which a parser may make
        members = list(np.atleast_1d(as_plain(value)))
    if not all(is_of(member, kind) for member in members):
        raise ValueError(f"{column} is {value!r:.80}")
    return members


def batch_of(
    features: FeatureSet, labels: Sequence[str], samples: Sequence[Mapping[str, list[Any]]]
) -> SampleBatch:
    """Join samples, as `sample_of` returns them, to a batch."""
    columns = (
        {name: _joined_samples(feature, samples) for name, feature in features.given.items()}
        if samples
        else {}
    )
    return SampleBatch(
        columns or no_samples(features),
        {name: np.array([sample[name][0] for sample in samples], np.float32) for name in labels},
    )


def _joined_samples(
    feature: Feature | Number | Input, samples: Sequence[Mapping[str, list[Any]]]
) -> Any:
    column, kind = feature.columns[0], kind_of(feature)
    flat = array_of([value for sample in samples for value in sample[column]])
    bags = Jagged(flat, [len(sample[column]) for sample in samples])
    if isinstance(feature, Number) and not feature.jagged:
        values, missing, _ = typed(flat, kind)
        return feature.of(bags.with_values(np.where(missing, np.float32("nan"), values)), len(bags))
    if feature.weighted:
        weights = [w for sample in samples for w in sample[feature.columns[1]]]
        bags = Jagged(flat, bags.lengths, weights=np.array(weights, np.float32))
    return as_typed(f"feature {feature.name!r}", bags, kind)
