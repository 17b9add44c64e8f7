"""Samples that come one by one, as mappings such as JSON objects, and their batches."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from psfleet.datasets.sample_batch import SampleBatch
from psfleet.feature_sets.feature_lookup import no_samples
from psfleet.feature_sets.feature_set import Feature, FeatureSet, Number
from psfleet.feature_sets.jagged import Jagged

__all__ = ["LARGEST", "batch_of", "sample_of", "time_of"]

LARGEST = float(np.finfo(np.float32).max)


def sample_of(features: FeatureSet, labels: Sequence[str], given: Any) -> dict[str, list[Any]]:
    """The values of each column of a sample.

    Args:
        features: The set.
        labels: Names of the labels.
        given: By column a value, a list of values or None. A label has one number.

    Raises:
        ValueError: It is no mapping, or a value cannot be used; the text says which.
    """
    if not isinstance(given, Mapping):
        raise ValueError(f"it is a {type(given).__name__}, not an object with columns")
    found: dict[str, list[Any]] = {}
    for feature in features:
        column = feature.columns[0]
        if isinstance(feature, Number):
            found[column] = _numbers(column, given.get(column), feature.dim)
            continue
        found[column] = _ids(column, given.get(column), feature)
        for weights in feature.columns[1:]:
            found[weights] = _numbers(weights, given.get(weights), len(found[column]))
            if len(found[weights]) != len(found[column]):
                raise ValueError(
                    f"{weights} is {given.get(weights)!r:.80} for {len(found[column])} ids"
                )
    for label in labels:
        found[label] = _numbers(label, given.get(label), 1)
        if not found[label]:
            raise ValueError(f"{label} is {given.get(label)!r:.80}")
    return found


def time_of(column: str, given: Mapping[str, Any]) -> int:
    """The time in this column of a sample.

    Raises:
        ValueError: It is no whole number.
    """
    time = given.get(column)
    if type(time) is not int or not -(2**63) <= time < 2**63:
        raise ValueError(f"{column} is {time!r:.80}")
    return time


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _ids(column: str, value: Any, feature: Feature) -> list[Any]:
    ids = _listed(value)
    for each in ids:
        text = feature.hashed and isinstance(each, str)
        if not text and (type(each) is not int or not -(2**63) <= each < 2**63):
            raise ValueError(f"{column} is {value!r:.80}")
    return ids


def _numbers(column: str, value: Any, count: int) -> list[float]:
    """So many numbers that are finite as float32, or none."""
    found = _listed(value)
    if found and (
        len(found) != count
        or not all(isinstance(each, int | float) and abs(each) <= LARGEST for each in found)
    ):
        raise ValueError(f"{column} is {value!r:.80}")
    return found


def batch_of(
    features: FeatureSet,
    labels: Sequence[str],
    samples: Sequence[Mapping[str, list[Any]]],
    times: Sequence[int] | None = None,
) -> SampleBatch:
    """The samples, which `sample_of` has made, as a batch; `times`: when each happened."""
    given = {feature.name: _joined(feature, samples) for feature in features} if samples else {}
    return SampleBatch(
        given or no_samples(features),
        {name: np.array([sample[name][0] for sample in samples], np.float32) for name in labels},
        None if times is None else np.array(times, np.int64),
    )


def _joined(feature: Feature | Number, samples: Sequence[Mapping[str, list[Any]]]) -> Any:
    column = feature.columns[0]
    if isinstance(feature, Number):
        missing = [feature.default] * feature.dim
        return np.array([sample[column] or missing for sample in samples], np.float32)
    flat = [value for sample in samples for value in sample[column]]
    texts = any(isinstance(value, str) for value in flat)
    weights = [w for name in feature.columns[1:] for sample in samples for w in sample[name]]
    return Jagged(
        np.array(flat, object if texts else np.int64),
        [len(sample[column]) for sample in samples],
        weights=np.array(weights, np.float32) if feature.weighted else None,
    )
