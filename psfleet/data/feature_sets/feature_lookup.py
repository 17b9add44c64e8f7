"""Looks up all features of a batch: ids to pull by table, values from pulled rows, gradients to push.

Runtimes pull and push; this module only computes what. Ids of features that share a table are joined in the
order of the set, so that a step makes one pull and one push for each table and every run adds in one order.
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
from psfleet.core.engine.interface import PooledIds, frozen
from psfleet.core.engine.kernels.bags import RowBags
from psfleet.data.feature_sets.feature_batches import by_feature, transformed
from psfleet.data.feature_sets.feature_set import Feature, FeatureSet, Number
from psfleet.data.feature_sets.jagged import Jagged
from psfleet.data.feature_sets.value_types import are_value, hashed

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Bags:
    """The ids of one feature in a batch, one bag for each row of its output.

    Attributes:
        ids: int64 [n].
        lengths: int64 [bags]; their sum is n.
        weights: float32 [n] or None.
        shape: Shape of the output, without its last axis, the width of a row.
    """

    ids: Ids
    lengths: Ids
    weights: Floats | None
    shape: tuple[int, ...]


def bags_of(feature: Feature, bags: Jagged | None, samples: int) -> Bags:
    """Return the bags of a feature. `bags` is None if the batch lacks the feature.

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
    """The lengths of the bags, one for each row of the output, and the output's shape."""
    if feature.pooling != "none":
        return bags.lengths, (len(bags),)
    if not feature.last:
        return np.ones(len(bags.values), np.int64), (len(bags.values),)
    is_id = np.arange(feature.last) < bags.lengths[:, None]
    return is_id.reshape(-1).astype(np.int64), (len(bags), feature.last)


class FeatureLookup(Generic[K]):
    """Ids and values of one batch for all features of a set.

    Args:
        features: The set.
        batch: A batch as `by_feature` takes it.
        keys: Key of each table in `ids` and `gradients`, by the tables' names.

    Attributes:
        ids: By table the ids of all its features, int64 [n]: what to pull.
        lengths: By feature, how many ids each sample has, int64 [samples].
        samples: The number of samples.

    Raises:
        UsageError: The batch does not fit the set; the error names the feature.
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
        """Number of ids of each output row, int64, by feature: all 1 for pooling "none" without `last`."""
        return {name: bags.lengths for name, bags in self._bags.items()}

    def _lay_out(self) -> tuple[dict[str, slice], dict[K, Ids]]:
        """Return the slice of each feature's ids among those of its table, and the tables' ids."""
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
        """The features' values, by name in the order of the set.

        Args:
            rows: By table the rows of `ids`, float32 [n, dim]. Others are not looked at.

        Returns:
            float32 [samples, dim]; for pooling "none" [n, dim] or [samples, last, dim].
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
        """Ids of each table and how to pool them. Pull these in place of `ids`, and use `values`."""
        return {
            key: PooledIds(frozen(self.ids[key]), tuple(self._parts[name] for name in names))
            for key, names in self._names.items()
        }

    def values(self, pooled: Mapping[K, Floats]) -> dict[str, Floats]:
        """Do as `pool`, with the same bits, for values pulled with `pooled`.

        It takes less time and memory.

        Args:
            pooled: By table float32 [all bags, dim]. Others are not looked at.
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
        """Return the gradients to push for values pulled with `pooled`, to the same effect as `gradients`.

        Args:
            given: Gradients as for `gradients`.

        Raises:
            ShapeError, UsageError: As `gradients`.
        """
        return {
            key: PooledGradient(
                self._pooled_ids(key, names),
                _joined([self._flat(name, given[name]) for name in names]),
            )
            for key, names in self._given(given).items()
        }

    def _pooled_ids(self, key: K, names: list[str]) -> PooledIds:
        """The ids of some features of a table."""
        if names == self._names[key]:
            return self.pooled[key]
        ids = [self._bags[name].ids for name in names]
        return PooledIds(_joined(ids), tuple(self._parts[name] for name in names))

    def gradients(self, given: Mapping[str, Any]) -> dict[K, tuple[Ids, Floats]]:
        """The gradients of the rows, by table: what to push.

        Args:
            given: By feature the gradient of its value, in its shape. A feature without one, or with None,
                and a Number get none.

        Returns:
            ids int64 [n] and their gradients float32 [n, dim]; those of a repeated id are to be summed. A
            table without gradients is left out.

        Raises:
            ShapeError: A gradient is not of its value's shape. UsageError: There is no such feature.
        """
        return {
            key: self._table_gradient(names, given) for key, names in self._given(given).items()
        }

    def _given(self, gradients: Mapping[str, Any]) -> dict[K, list[str]]:
        """The features with gradients by table, always in the same order."""
        for name in gradients:
            if name not in self._order:
                raise UsageError(f"a gradient is for the feature {name!r}, which the set lacks")
        features = {
            key: [name for name in names if gradients.get(name) is not None]
            for key, names in self._names.items()
        }
        return {key: names for key, names in features.items() if names}

    def _table_gradient(self, names: list[str], gradients: Mapping[str, Any]) -> tuple[Ids, Floats]:
        """The ids and gradients of one table, whose features these are."""
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
        """The gradient of a feature's bags, float32 [bags, dim]."""
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
    """Return the feed of a batch for a program with `layers.features(features)`.

    Args:
        features: The set.
        batch: A batch as `by_feature` takes it.

    Raises:
        UsageError: The batch does not fit the set; the error names the feature.
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
    # A program counts the samples of a step by the first input.
    return dict(sorted(feeds.items(), key=lambda item: len(item[1]) != samples))


def refused_samples(features: FeatureSet, batch: Mapping[str, Any], samples: int) -> dict[int, str]:
    """Find samples that the look-up refuses behind the transforms, such as `Log1p` of -3, and why.

    Transforms take whole batches, so that a batch with such a value is halved until its samples are alone.

    Args:
        features: The set; its transforms may still lack statistics.
        batch: Values in their types, as readers have them.
        samples: Number of samples.
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
    except (ValueError, ArithmeticError) as error:  # also of a function of a user's
        if samples == 1:
            return {0: str(error)}
        half = samples // 2
        first, second = (
            refused_samples(features, {n: v[rows] for n, v in batch.items()}, count)
            for rows, count in ((slice(half), half), (slice(half, None), samples - half))
        )
        return first | {half + index: text for index, text in second.items()}
    return {}
