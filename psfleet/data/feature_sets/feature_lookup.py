"""Lookup of all features of a batch: ids to pull, values from the pulled rows, and gradients to push.

Nothing is pulled or pushed here; runtimes do that. Features that share a table have their ids joined in the
order of the set. So a step makes one pull and one push for each table, and gradients are added in the same
order in every run.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from psfleet.core.base.errors import ShapeError, UsageError
from psfleet.core.engine.gradient_checks import as_ids
from psfleet.core.engine.gradients import PooledGradient
from psfleet.core.engine.kernels.bags import RowBags
from psfleet.core.engine.runtime_interface import PooledIds, frozen
from psfleet.data.feature_sets.applying_transforms import transformed
from psfleet.data.feature_sets.feature_set import Feature, FeatureSet, Number
from psfleet.data.feature_sets.feature_values import by_feature
from psfleet.data.feature_sets.jagged import Jagged
from psfleet.data.feature_sets.value_types import are_value, hashed

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Bags:
    """Ids of one feature in a batch, divided into bags. Each bag gives one row of the feature's output.

    Attributes:
        ids: Ids of all bags, int64 [n].
        lengths: Number of ids in each bag, int64 [bags]. The sum is n.
        weights: Factor for each id's row, float32 [n], or None.
        shape: Shape of the output without its last axis, which is the width of a row.
    """

    ids: Ids
    lengths: Ids
    weights: Floats | None
    shape: tuple[int, ...]


def bags_of(feature: Feature, bags: Jagged | None, samples: int) -> Bags:
    """Return the ids of a feature, divided into bags: the ids of one row of the feature's output.

    Args:
        bags: Values of the feature in each sample, or None if the batch lacks the feature.

    Raises:
        IdError: A value is not an id.
    """
    if bags is None:
        bags = Jagged(np.empty(0, np.int64), np.zeros(samples, np.int64))
    if feature.padding is not None and len(bags.values):
        is_padding = are_value(bags.values, feature.padding)
        bags = bags.kept(~is_padding) if np.any(is_padding) else bags
    bags = bags.last(feature.last) if feature.last else bags
    ids = (
        hashed(bags.values, feature.buckets, feature.salt)
        if feature.hashed
        else as_ids(bags.values, f"feature {feature.name!r}")
    )
    weights = None
    if feature.weighted:
        weights = np.ones(len(ids), np.float32) if bags.weights is None else bags.weights
    lengths, shape = _shaped(feature, bags)
    return Bags(ids, lengths, weights, shape)


def _shaped(feature: Feature, bags: Jagged) -> tuple[Ids, tuple[int, ...]]:
    """Return the number of ids in each bag, and the shape of the output without its last axis."""
    if feature.pooling != "none":
        return bags.lengths, (len(bags),)
    if not feature.last:
        return np.ones(len(bags.values), np.int64), (len(bags.values),)
    is_id = np.arange(feature.last) < bags.lengths[:, None]
    return is_id.reshape(-1).astype(np.int64), (len(bags), feature.last)


class FeatureLookup(Generic[K]):
    """Lookup of one batch: computes the ids to pull, the values of features and the gradients to push.

        lookup = FeatureLookup(features, batch, {"users": "users"})
        rows = {table: pull(table, ids) for table, ids in lookup.ids.items()}
        values = lookup.pool(rows)                 # {"user": float32 [samples, dim], ...}
        gradients = lookup.gradients({"user": gradient_of_user})

    Args:
        features: Features of the model.
        batch: Batch in a form that `by_feature` takes.
        keys: For each table, by its name, the key that represents it in `ids` and `gradients`.

    Attributes:
        ids: For each table, the ids to pull for all its features, int64 [n].
        samples: Number of samples.

    Raises:
        UsageError: The batch does not fit the features. The message names the feature.
    """

    def __init__(self, features: FeatureSet, batch: Any, keys: Mapping[str, K]) -> None:
        columns, self.samples = by_feature(features, batch)
        values = transformed(features, columns, self.samples)
        self._keys = {f.name: keys[f.table.name] for f in features.looked_up}
        self._bags = {
            f.name: bags_of(f, values.get(f.name), self.samples) for f in features.looked_up
        }
        self._parts = {
            f.name: RowBags(
                self._bags[f.name].lengths, self._bags[f.name].weights, f.pooling == "mean"
            )
            for f in features.looked_up
        }
        self._dims = {f.name: f.table.dim for f in features.looked_up}
        self._numbers = {
            n.name: n.of(values.get(n.name), self.samples)
            for n in features
            if isinstance(n, Number)
        }
        self._order = list(features.features)
        self._names: dict[K, list[str]] = {}
        for name, key in self._keys.items():
            self._names.setdefault(key, []).append(name)
        self._places, self.ids = self._lay_out()

    @property
    def lengths(self) -> dict[str, Ids]:
        """For each feature, the number of ids in each row of its output, int64.

        With pooling "none" and without `last`, every row of the output is a single id, so all numbers are 1.
        """
        return {name: bags.lengths for name, bags in self._bags.items()}

    def _lay_out(self) -> tuple[dict[str, slice], dict[K, Ids]]:
        """Return the slice of each feature's ids within the ids of its table, and the ids of each table."""
        slices = {}
        for names in self._names.values():
            start = 0
            for name in names:
                slices[name] = slice(start, start + len(self._bags[name].ids))
                start = slices[name].stop
        ids = {
            key: _joined([self._bags[name].ids for name in names])
            for key, names in self._names.items()
        }
        return slices, ids

    def pool(self, rows: Mapping[K, Floats]) -> dict[str, Floats]:
        """Compute the features' values from pulled rows, by name in the order of the set.

        Args:
            rows: Rows of `ids` for each table, float32 [n, dim]. Further tables are ignored.

        Returns:
            For each feature float32 [samples, dim]. With pooling "none", [n, dim] or [samples, last, dim].
        """
        return {name: self._value(name, rows) for name in self._order}

    def _value(self, name: str, rows: Mapping[K, Floats]) -> Floats:
        if name in self._numbers:
            return self._numbers[name]  # type: ignore[no-any-return]
        feature_rows = rows[self._keys[name]][self._places[name]]
        return self._shaped(name, self._parts[name].pool(feature_rows))

    def _shaped(self, name: str, rows: Floats) -> Floats:
        return rows.reshape(*self._bags[name].shape, rows.shape[1])

    @functools.cached_property
    def pooled(self) -> dict[K, PooledIds]:
        """For each table, its ids and the bags to pool them by. Pull these instead of `ids`, and then call
        `values`.
        """
        return {
            key: PooledIds(frozen(self.ids[key]), tuple(self._parts[name] for name in names))
            for key, names in self._names.items()
        }

    def values(self, pooled: Mapping[K, Floats]) -> dict[str, Floats]:
        """Compute the features' values from rows that were pulled with `pooled`.

        The values are bit-identical to those of `pool`, but take less time and memory.

        Args:
            pooled: Pooled rows for each table, float32 [all bags, dim]. Further tables are ignored.
        """
        values = dict(self._numbers)
        for key, names in self._names.items():
            start = 0
            for name in names:
                end = start + len(self._parts[name])
                values[name] = self._shaped(name, pooled[key][start:end])
                start = end
        return {name: values[name] for name in self._order}

    def pooled_gradients(self, given: Mapping[str, Any]) -> dict[K, PooledGradient]:
        """Compute the gradients to push after a pull with `pooled`. They have the same effect as `gradients`.

        Args:
            given: Gradients of the features' values, as in `gradients`.

        Raises:
            ShapeError, UsageError: As in `gradients`.
        """
        return {
            key: PooledGradient(
                self._pooled_ids(key, names),
                _joined([self._flat(name, given[name]) for name in names]),
            )
            for key, names in self._given(given).items()
        }

    def _pooled_ids(self, key: K, names: list[str]) -> PooledIds:
        if names == self._names[key]:
            return self.pooled[key]
        ids = [self._bags[name].ids for name in names]
        return PooledIds(_joined(ids), tuple(self._parts[name] for name in names))

    def gradients(self, given: Mapping[str, Any]) -> dict[K, tuple[Ids, Floats]]:
        """Compute the gradients of the rows, to push to each table.

        Args:
            given: Gradient of each feature's value, by the feature's name, in the shape of the value. A
                feature may be missing or have None. A Number's gradient is ignored.

        Returns:
            For each table, ids int64 [n] and their gradients float32 [n, dim]. An id may occur several
            times; its gradients must then be added up. A table without gradients is left out.

        Raises:
            ShapeError: A gradient has another shape than its value.
            UsageError: There is no such feature.
        """
        return {
            key: self._table_gradient(names, given) for key, names in self._given(given).items()
        }

    def _given(self, gradients: Mapping[str, Any]) -> dict[K, list[str]]:
        """Return for each table the features that have a gradient, in the order of the set."""
        for name in gradients:
            if name not in self._order:
                raise UsageError(f"a gradient is for the feature {name!r}, which the set lacks")
        features = {
            key: [name for name in names if gradients.get(name) is not None]
            for key, names in self._names.items()
        }
        return {key: names for key, names in features.items() if names}

    def _table_gradient(self, names: list[str], gradients: Mapping[str, Any]) -> tuple[Ids, Floats]:
        if len(names) == 1:
            [name] = names
            return self._bags[name].ids, self._parts[name].spread(self._flat(name, gradients[name]))
        ids = np.concatenate([self._bags[name].ids for name in names])
        rows, at = np.empty((len(ids), self._dims[names[0]]), np.float32), 0
        for name in names:
            end = at + len(self._bags[name].ids)
            self._parts[name].spread(self._flat(name, gradients[name]), rows[at:end])
            at = end
        return ids, rows

    def _flat(self, name: str, value: Any) -> Floats:
        """Check the gradient of a feature's value, and return it with a row for each bag, [bags, dim]."""
        bags, gradient = self._bags[name], np.asarray(value, np.float32)
        shape = (*bags.shape, self._dims[name])
        if gradient.shape != shape:
            raise ShapeError(
                f"the gradient of feature {name!r} has the shape {gradient.shape}; it must be {shape}"
            )
        return gradient.reshape(-1, self._dims[name])


def _joined(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def feed(features: FeatureSet, batch: Any) -> dict[str, NDArray[Any]]:
    """Convert a batch to feeds for a program that uses `layers.features(features)`.

        loss_value, = executor.run(program, feed=feed(features, batch), fetch_list=[loss])

    Args:
        features: Features of the model.
        batch: Batch in a form that `by_feature` takes.

    Raises:
        UsageError: The batch does not fit the features. The message names the feature.
    """
    columns, samples = by_feature(features, batch)
    values = transformed(features, columns, samples)
    feeds: dict[str, NDArray[Any]] = {}
    for feature in features:
        if isinstance(feature, Number):
            feeds[feature.name] = feature.of(values.get(feature.name), samples)
            continue
        bags = bags_of(feature, values.get(feature.name), samples)
        feeds[f"{feature.name}.lengths"] = bags.lengths
        feeds[f"{feature.name}.ids"] = bags.ids
        if bags.weights is not None:
            feeds[f"{feature.name}.weights"] = bags.weights
    # A program counts the samples of a step by its first input, so put an input with one entry per sample
    # first.
    return dict(sorted(feeds.items(), key=lambda item: len(item[1]) != samples))


def refused_samples(features: FeatureSet, batch: Mapping[str, Any], samples: int) -> dict[int, str]:
    """Find the samples that a transform or the lookup after it would refuse, such as -3 for `Log1p`.

    Transforms take whole batches. So a batch that fails is halved until the bad samples are alone. Returns a
    mapping from the index of each bad sample to the reason.

    Args:
        features: Features of the model. Transforms need not be fitted yet.
        batch: Values of the features in their declared types, as readers return them.
    """
    if not features.transformed or not samples:
        return {}
    try:
        values = transformed(features, batch, samples, fits=True, observes=False)
        for name in features.transformed:
            feature, value = features.features.get(name), values[name]
            if isinstance(feature, Number):
                feature.of(value, samples)
            elif feature is not None:
                bags_of(feature, value, samples)
    except (ValueError, ArithmeticError) as error:  # a user's function may raise either
        if samples == 1:
            return {0: str(error)}
        half = samples // 2
        first, second = (
            refused_samples(features, {n: v[rows] for n, v in batch.items()}, count)
            for rows, count in ((slice(half), half), (slice(half, None), samples - half))
        )
        return first | {half + index: text for index, text in second.items()}
    return {}
